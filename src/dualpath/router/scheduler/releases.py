"""When a decode engine may reuse the slots of an attempt.

A PE writes KV directly into the DE's buffer.  When a request ends, the DE must not reuse its slots
before every process that could write to them is known to write no more.  Proof is

* the PE's ``PrefillDone`` without a failure or its ``Released``, or its registration in a new
  session that does not name the request;
* tokens of the DE, or its report that the KV is in HBM: all KV has arrived;
* the death of the PE's process (``ControlListener.on_dead``).

Until then the DE's ``Release`` waits, and after a time limit, or when the PE is lost, the slots go
into quarantine: everything else of the request is released.  A DE that registers names the slots
that earlier sessions have left in quarantine, with the writers that it knew, since neither a
restarted router nor a restarted DE remembers them.

Third DEs, from which the PE only loads, hold their slots until the same proof, so that a PE that
goes on loads no other request's KV.  But their slots are never in quarantine: what the PE loads for
an attempt that has ended is not used.

A request that has ended at its DE by itself needs no ``Release``: the DE has copied its KV, and
reports that it has released it (``RequestOver``).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from dualpath.core.cluster import Writer
from dualpath.core.control import Release, RouterMessage
from dualpath.router.engines import EngineInfo

logger = logging.getLogger(__name__)

#: How long the report of a DE that a request has ended there may take after its last token.
OVER_WAIT_S = 1.0

_FORMER = "the slots of a former session are free"


class _Slots:
    """Slots of an attempt at its DE, and the processes that may still write to them."""

    def __init__(self, holder: str, writers: Iterable[Writer]) -> None:
        self.holder = holder
        self.writers = {writer.id: writer for writer in writers}
        #: Third DEs that the attempt is to be released at.
        self.thirds: tuple[str, ...] = ()
        #: Reason of the release; None while the attempt goes on.
        self.reason: str | None = None
        #: When the quarantine began, by the scheduler's clock; None before it does.
        self.quarantined_s: float | None = None


class Quarantine(NamedTuple):
    """Slots at engine ``holder`` that processes ``writers`` may still write to since ``since_s``.

    ``since_s`` is by the scheduler's clock, and at the earliest its start.
    """

    attempt_id: str
    holder: str
    writers: tuple[Writer, ...]
    since_s: float


class Releases:
    """Sends every ``Release``; ``wait_s`` bounds how long one is delayed by ``clock``.

    ``is_dead`` returns whether this router has proof of a process's death already: a DE that was
    disconnected meanwhile may still name such a process.
    """

    def __init__(
        self,
        send: Callable[[str, RouterMessage], None],
        wait_s: float,
        is_dead: Callable[[Writer], bool] = lambda writer: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._send = send
        self._is_dead = is_dead
        self._wait_s = wait_s
        self._slots: dict[str, _Slots] = {}
        #: Requests that end at their DE: the DE and the timer of its report.
        self._ending: dict[str, tuple[str, asyncio.TimerHandle]] = {}
        #: Live PEs, each with the attempts that have transfers in flight there.
        self._live: dict[tuple[str, str], set[str]] = {}

    @property
    def held(self) -> int:
        """Releases that wait for a proof."""
        return sum(slots.reason is not None for slots in self._slots.values())

    def quarantines(self) -> Iterator[Quarantine]:
        """Yield the attempts with slots in quarantine, by the order of their assignment."""
        for attempt_id, slots in self._slots.items():
            if slots.quarantined_s is not None:
                writers = tuple(slots.writers.values())
                yield Quarantine(attempt_id, slots.holder, writers, slots.quarantined_s)

    def in_doubt(self) -> list[Writer]:
        """Return the processes that are not live and hold slots until they are confirmed dead."""
        writers = {w.id: w for slots in self._slots.values() for w in slots.writers.values()}
        return [writer for name, writer in writers.items() if name not in self._live]

    def is_unsettled(self, writer: Writer, attempt_id: str) -> bool:
        """Whether a live PE still has transfers of an earlier attempt of this name in flight.

        Its ``Released`` would be taken for that of the present one.
        """
        return attempt_id in self._live.get(writer.id, ())

    def writer_started(self, attempt_id: str, writer: Writer, holder: str) -> None:
        """A PE may write into the attempt's slots at ``holder`` from now on."""
        self._slots[attempt_id] = _Slots(holder, [writer])

    def writer_done(self, attempt_id: str, writer: Writer | None = None) -> None:
        """A PE writes no more; ``writer`` reports it, None if the DE has received all KV."""
        if writer is not None:
            self._live.get(writer.id, set()).discard(attempt_id)
        slots = self._slots.get(attempt_id)
        if slots is None:
            return
        if writer is None:
            slots.writers.clear()
        else:
            slots.writers.pop(writer.id, None)
        self._release_if_safe(attempt_id, slots)

    def engine_dead(self, writer: Writer) -> None:
        """A process is dead: it writes nowhere."""
        self._live.pop(writer.id, None)
        for attempt_id in list(self._slots):
            self.writer_done(attempt_id, writer)

    def engine_lost(self, writer: Writer) -> None:
        """A PE is lost and can no longer report its writes; a DE has nothing of any request."""
        for attempt_id, (engine_id, _) in list(self._ending.items()):
            if engine_id == writer.engine_id:
                self.over(engine_id, attempt_id)
        self._live.pop(writer.id, None)
        for attempt_id, slots in self._slots.items():
            if slots.reason is not None and writer.id in slots.writers:
                self._quarantine(attempt_id, slots)

    def engine_joined(self, info: EngineInfo) -> None:
        """An engine begins a session: it reports the in-doubt attempts of earlier sessions."""
        self._live[info.writer.id] = set(info.unsettled)
        for attempt_id, slots in list(self._slots.items()):
            for writer in list(slots.writers.values()):
                settled = writer.id == info.writer.id and attempt_id not in info.unsettled
                if settled or self._is_dead(writer):
                    self.writer_done(attempt_id, writer)
            if slots.holder == info.engine_id and attempt_id not in info.quarantined:
                # The engine names all slots that it does not reuse; a new process has none.
                self.writer_done(attempt_id)
        for attempt_id in info.quarantined:
            self._adopt(attempt_id, info)

    def release(self, engine_id: str, attempt_id: str, reason: str, assignment: int = 0) -> None:
        """Release an attempt at an engine if no other process writes to its buffer.

        ``assignment`` is as in ``Release``.
        """
        self._send(engine_id, Release(attempt_id, reason, assignment=assignment))

    def await_over(self, engine_id: str, attempt_id: str, release: Callable[[], None]) -> None:
        """A request has got its last token: its DE reports its end, or is to ``release`` it.

        The report comes within ``OVER_WAIT_S``, or the session of the DE ends.
        """
        loop = asyncio.get_running_loop()
        timer = loop.call_later(OVER_WAIT_S, self._not_over, attempt_id, release)
        self._ending[attempt_id] = engine_id, timer

    def over(self, engine_id: str, attempt_id: str) -> None:
        """A DE has released a request that has ended there."""
        if self._ending.get(attempt_id, ("",))[0] == engine_id:
            self._ending.pop(attempt_id)[1].cancel()

    def _not_over(self, attempt_id: str, release: Callable[[], None]) -> None:
        del self._ending[attempt_id]
        release()

    def release_when_safe(self, engine_id: str, attempt_id: str, reason: str) -> None:
        """Release an attempt at its DE as soon as no PE can write to its slots any more."""
        slots = self._slots.get(attempt_id)
        if slots is None:
            self.release(engine_id, attempt_id, reason)
            return
        slots.reason = reason
        if any(name not in self._live for name in slots.writers):
            self._quarantine(attempt_id, slots)
        elif slots.writers:
            asyncio.get_running_loop().call_later(self._wait_s, self._late, attempt_id, slots)
        self._release_if_safe(attempt_id, slots)

    def release_thirds(self, attempt_id: str, thirds: Iterable[str], reason: str) -> None:
        """Release an attempt at third DEs, once no PE loads from them or the PE is lost or late.

        To be called before ``release_when_safe``.
        """
        slots = self._slots.get(attempt_id)
        if slots is not None and slots.writers and slots.quarantined_s is None:
            slots.thirds = tuple(thirds)
            return
        for third in thirds:
            self.release(third, attempt_id, reason)

    def _adopt(self, attempt_id: str, holder: EngineInfo) -> None:
        """Take over slots that an earlier session has left in quarantine."""
        slots = self._slots.get(attempt_id)
        if slots is None:
            slots = self._slots[attempt_id] = _Slots(
                holder.engine_id, [w for w in holder.writers if self._may_write(w, attempt_id)]
            )
        elif slots.reason is None:
            return  # The attempt is breaking; its end releases them.
        slots.reason = slots.reason or _FORMER
        if slots.quarantined_s is None:
            slots.quarantined_s = self._clock()
        self._release_if_safe(attempt_id, slots)

    def _may_write(self, writer: Writer, attempt_id: str) -> bool:
        """Whether a PE may write for an attempt that this router does not know (any more)."""
        if self._is_dead(writer):
            return False
        unsettled = self._live.get(writer.id)
        return unsettled is None or attempt_id in unsettled

    def _release_if_safe(self, attempt_id: str, slots: _Slots) -> None:
        if slots.writers:
            return
        assert self._slots[attempt_id] is slots, f"slots of {attempt_id} are released once"
        del self._slots[attempt_id]
        if slots.reason is not None:
            for engine_id in (slots.holder, *slots.thirds):
                self.release(engine_id, attempt_id, slots.reason)

    def _late(self, attempt_id: str, slots: _Slots) -> None:
        if self._slots.get(attempt_id) is slots and slots.quarantined_s is None:
            logger.warning(
                "engines %s have not confirmed the release of %s within %g s; slots at %s stay in "
                "quarantine until they do",
                *(", ".join(name for name, _ in slots.writers), attempt_id, self._wait_s),
                slots.holder,
            )
            self._quarantine(attempt_id, slots)

    def _quarantine(self, attempt_id: str, slots: _Slots) -> None:
        if slots.quarantined_s is None:
            slots.quarantined_s = self._clock()
            assert slots.reason is not None
            release = Release(attempt_id, slots.reason, writer_certain=False)
            self._send(slots.holder, release)
            thirds, slots.thirds = slots.thirds, ()
            for third in thirds:
                self.release(third, attempt_id, slots.reason)
