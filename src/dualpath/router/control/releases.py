"""When a decode engine's slots may be reused.

A PE writes KV straight into the DE's buffer.  Whoever ends a request must not let the DE reuse its
slots before every process that could write to them is known to write no more.  What proves it:

* the PE's ``Released``, or its registration in a new session that does not name the request;
* tokens of the DE, or its word that the KV is in HBM: all that was to be written has arrived;
* the end of the PE's process (``ControlListener.on_dead``).

Until then the DE's ``Release`` waits, and after a time limit, or when the PE is lost, the slots go
into quarantine: everything else of the request is given back.  A DE that greets names the slots
that sessions before have left in quarantine, with the writers it knew, since nobody else may
remember them: neither a router that was started anew, nor a DE.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from dualpath.core.cluster import Writer
from dualpath.core.control import Release, RouterMessage
from dualpath.router.engines import EngineInfo

logger = logging.getLogger(__name__)

_FORMER = "the slots of a former session are free"


class _Slots:
    """Slots of an attempt at its DE, and who may still write to them."""

    def __init__(self, holder: str, writers: Iterable[Writer]) -> None:
        self.holder = holder
        self.writers = {writer.id: writer for writer in writers}
        #: Why they are to be released; None while the attempt goes on.
        self.reason: str | None = None
        self.quarantined = False


class Releases:
    """Sends every ``Release``; ``wait_s`` bounds how long one is held back.

    ``is_dead`` says what this router has proof of already: a DE that was out of sight meanwhile may
    still name such a process.
    """

    def __init__(
        self,
        send: Callable[[str, RouterMessage], None],
        wait_s: float,
        is_dead: Callable[[Writer], bool] = lambda writer: False,
    ) -> None:
        self._send = send
        self._is_dead = is_dead
        self._wait_s = wait_s
        self._slots: dict[str, _Slots] = {}
        #: Live PEs, and the attempts whose transfers they have not seen end.
        self._live: dict[tuple[str, str], set[str]] = {}

    @property
    def held(self) -> int:
        """Releases waiting for somebody's word."""
        return sum(slots.reason is not None for slots in self._slots.values())

    def doubted(self) -> list[Writer]:
        """Return the processes whose end would free slots, and which are not live."""
        doubted = {w.id: w for slots in self._slots.values() for w in slots.writers.values()}
        return [writer for name, writer in doubted.items() if name not in self._live]

    def writer_started(self, attempt_id: str, writer: Writer, holder: str) -> None:
        """A PE may write into the attempt's slots at ``holder`` from now on."""
        self._slots[attempt_id] = _Slots(holder, [writer])

    def writer_done(self, attempt_id: str, writer: Writer | None = None) -> None:
        """It writes no more; ``writer`` is who says so, None for the DE that took over."""
        if writer is not None:
            self._live.get(writer.id, set()).discard(attempt_id)
        slots = self._slots.get(attempt_id)
        if slots is None:
            return
        if writer is None:
            slots.writers.clear()
        else:
            slots.writers.pop(writer.id, None)
        self._let_go_if_safe(attempt_id, slots)

    def engine_dead(self, writer: Writer) -> None:
        """A process is gone: it writes nowhere."""
        self._live.pop(writer.id, None)
        for attempt_id in list(self._slots):
            self.writer_done(attempt_id, writer)

    def engine_lost(self, writer: Writer) -> None:
        """A PE cannot answer for what it writes."""
        self._live.pop(writer.id, None)
        for attempt_id, slots in self._slots.items():
            if slots.reason is not None and writer.id in slots.writers:
                self._quarantine(attempt_id, slots)

    def engine_joined(self, info: EngineInfo) -> None:
        """An engine begins a session: it says what those before have left in doubt."""
        self._live[info.writer.id] = set(info.unsettled)
        for attempt_id, slots in list(self._slots.items()):
            for writer in list(slots.writers.values()):
                settled = writer.id == info.writer.id and attempt_id not in info.unsettled
                if settled or self._is_dead(writer):
                    self.writer_done(attempt_id, writer)
        for attempt_id in info.quarantined:
            self._adopt(attempt_id, info)

    def release(self, engine_id: str, attempt_id: str, reason: str) -> None:
        """Release an attempt at an engine into whose buffer nobody else writes."""
        self._send(engine_id, Release(request_id=attempt_id, reason=reason))

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
        self._let_go_if_safe(attempt_id, slots)

    def _adopt(self, attempt_id: str, holder: EngineInfo) -> None:
        """Take over slots that a session which is over has left in quarantine."""
        slots = self._slots.get(attempt_id)
        if slots is None:
            slots = self._slots[attempt_id] = _Slots(
                holder.engine_id, [w for w in holder.writers if self._may_write(w, attempt_id)]
            )
        elif slots.reason is None:
            return  # The attempt is being broken off; its end releases them.
        slots.reason, slots.quarantined = slots.reason or _FORMER, True
        self._let_go_if_safe(attempt_id, slots)

    def _may_write(self, writer: Writer, attempt_id: str) -> bool:
        """Whether a PE may write for an attempt of which this router knows nothing (any more)."""
        if self._is_dead(writer):
            return False
        unsettled = self._live.get(writer.id)
        return unsettled is None or attempt_id in unsettled

    def _let_go_if_safe(self, attempt_id: str, slots: _Slots) -> None:
        if slots.writers:
            return
        del self._slots[attempt_id]
        if slots.reason is not None:
            self.release(slots.holder, attempt_id, slots.reason)

    def _late(self, attempt_id: str, slots: _Slots) -> None:
        if self._slots.get(attempt_id) is slots and not slots.quarantined:
            logger.warning(
                "engines %s have not confirmed the release of %s within %g s; slots at %s stay in "
                "quarantine until they do",
                *(", ".join(name for name, _ in slots.writers), attempt_id, self._wait_s),
                slots.holder,
            )
            self._quarantine(attempt_id, slots)

    def _quarantine(self, attempt_id: str, slots: _Slots) -> None:
        if not slots.quarantined:
            slots.quarantined = True
            assert slots.reason is not None
            release = Release(attempt_id, slots.reason, writer_certain=False)
            self._send(slots.holder, release)
