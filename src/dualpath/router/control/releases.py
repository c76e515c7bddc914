"""When a decode engine's slots may be reused.

A PE writes KV straight into the DE's buffer.  Whoever ends a request must not let the DE reuse
its slots before the PE is known to write no more: the DE's ``Release`` therefore waits for the
PE's ``Released``, for the PE's certain death, or, with the slots going into quarantine, for its
uncertain loss or a time limit.
"""

import asyncio
import logging
from collections.abc import Callable

from dualpath.core.control import Release, RouterMessage

logger = logging.getLogger(__name__)


class _Held:
    def __init__(self, writer: str, holder: str, reason: str) -> None:
        self.writer = writer
        self.holder = holder
        self.reason = reason
        self.quarantined = False


class Releases:
    """Sends every ``Release``; ``wait_s`` bounds how long one is held back."""

    def __init__(self, send: Callable[[str, RouterMessage], None], wait_s: float) -> None:
        self._send = send
        self._wait_s = wait_s
        self._held: dict[str, _Held] = {}
        self._writing: dict[str, str] = {}
        self._gone: set[str] = set()
        self._epochs: dict[str, str] = {}

    @property
    def held(self) -> int:
        """Releases waiting for a PE's word."""
        return len(self._held)

    def writer_started(self, attempt_id: str, engine_id: str) -> None:
        """A PE may write into the attempt's DE slots from now on."""
        self._writing[attempt_id] = engine_id

    def writer_done(self, attempt_id: str, engine_id: str | None = None) -> None:
        """It writes no more; ``engine_id`` is who says so, None for the DE that took over."""
        if engine_id not in (None, self._writing.get(attempt_id)):
            return
        self._writing.pop(attempt_id, None)
        if (held := self._held.pop(attempt_id, None)) is not None:
            self._let_go(attempt_id, held.holder, held.reason)

    def engine_lost(self, engine_id: str, certain: bool) -> None:
        """Answer for a writer that cannot."""
        self._gone.add(engine_id)
        if certain:
            self._writer_dead(engine_id)
            return
        for attempt_id, held in self._held.items():
            if held.writer == engine_id:
                self._quarantine(attempt_id, held)

    def engine_joined(self, engine_id: str, epoch: str) -> None:
        """An engine is there (again); a new epoch proves that its former process is dead."""
        self._gone.discard(engine_id)
        former = self._epochs.get(engine_id)
        self._epochs[engine_id] = epoch
        if former not in (None, epoch):
            self._writer_dead(engine_id)

    def release(self, engine_id: str, attempt_id: str, reason: str) -> None:
        """Release an attempt at an engine into whose buffer nobody else writes."""
        self._let_go(attempt_id, engine_id, reason)

    def release_when_safe(self, engine_id: str, attempt_id: str, reason: str) -> None:
        """Release an attempt at its DE as soon as its PE cannot write any more."""
        writer = self._writing.get(attempt_id)
        if writer is None:
            self._let_go(attempt_id, engine_id, reason)
            return
        held = self._held[attempt_id] = _Held(writer, engine_id, reason)
        if writer in self._gone:
            self._quarantine(attempt_id, held)
        else:
            asyncio.get_running_loop().call_later(self._wait_s, self._late, attempt_id)

    def _writer_dead(self, engine_id: str) -> None:
        for attempt_id, writer in list(self._writing.items()):
            if writer == engine_id:
                self.writer_done(attempt_id)

    def _late(self, attempt_id: str) -> None:
        if (held := self._held.get(attempt_id)) is not None and not held.quarantined:
            logger.warning(
                "engine %s has not confirmed the release of %s within %g s; slots at %s stay in "
                "quarantine until it does",
                held.writer, attempt_id, self._wait_s, held.holder,
            )  # fmt: skip
            self._quarantine(attempt_id, held)

    def _quarantine(self, attempt_id: str, held: _Held) -> None:
        if not held.quarantined:
            held.quarantined = True
            release = Release(
                request_id=attempt_id,
                reason=held.reason,
                writer_certain=False,
                writer_engine=held.writer,
            )
            self._send(held.holder, release)

    def _let_go(self, attempt_id: str, holder: str, reason: str) -> None:
        self._send(holder, Release(request_id=attempt_id, reason=reason))
