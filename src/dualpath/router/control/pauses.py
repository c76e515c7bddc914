"""Engines that get nothing new for now: they drain, an operator asked for it, or they are suspect.

What is on such an engine goes on.  A draining engine is told when nothing is left, so that it may
go: only the router knows of requests that were placed on it and have not reached it yet.  With one
rank of a data-parallel group the others go as well, so all of them drain with it.
"""

import logging
from collections.abc import Callable

from dualpath.core.control import Drained, Report, RouterMessage
from dualpath.router.control.dispatch import Dispatch
from dualpath.router.control.engine_state import EngineState, Pause
from dualpath.router.control.exchange import Exchange
from dualpath.router.control.registry import Registry
from dualpath.router.engines import EngineInfo

#: Where an operator pauses an engine (POST) and lets it go on (DELETE).
PAUSE_PATH = "/dualpath/v1/engines/{engine_id}/pause"

logger = logging.getLogger(__name__)


class Pauses:
    """Keeps ``EngineState.pauses`` and the scheduler in step.

    ``dispatch`` is asked for once an engine has joined.
    """

    def __init__(
        self,
        registry: Registry,
        exchange: Exchange,
        send: Callable[[str, RouterMessage], None],
        dispatch: Callable[[], Dispatch],
    ) -> None:
        self._registry = registry
        self._exchange = exchange
        self._send = send
        self._dispatch = dispatch

    def joined(self, info: EngineInfo) -> None:
        """An engine begins a session; an operator's wish holds on."""
        state = self._registry.get(info.engine_id)
        if state is not None and state.pauses:
            self._dispatch().paused(info.engine_id)

    def reported(self, info: EngineInfo, report: Report) -> None:
        """An engine says whether it drains; it is told when nothing is left on its group, once."""
        group = [rank for rank in self._registry.group(info) if rank.talks]
        leaving = [r for r in group if r.report is not None and r.report.draining is not None]
        if not leaving:
            for rank in group:
                rank.drained = False
                self.resume(rank.info.engine_id, Pause.DRAINING)
            return
        for rank in group:
            if self.pause(rank.info.engine_id, Pause.DRAINING):
                why = report.draining or f"{leaving[0].info.engine_id} of its group drains"
                logger.warning("engine %s drains: %s", rank.info.engine_id, why)
        if not any(self._exchange.depends_on(rank.info.engine_id) for rank in group):
            for rank in leaving:
                self._tell(rank)

    def _tell(self, engine: EngineState) -> None:
        if not engine.drained:
            engine.drained = True
            logger.warning("engine %s has drained", engine.info.engine_id)
            self._send(engine.info.engine_id, Drained())

    def pause(self, engine_id: str, why: Pause) -> bool:
        """Give a live engine nothing new; return whether that is news."""
        state = self._live(engine_id)
        if state is None or why in state.pauses:
            return False
        if not state.pauses:
            self._dispatch().paused(engine_id)
        state.pauses.add(why)
        return True

    def resume(self, engine_id: str, why: Pause) -> None:
        """Take one reason back; the engine gets requests again when it was the last."""
        state = self._registry.get(engine_id)
        if state is None or why not in state.pauses:
            return
        state.pauses.discard(why)
        if state.alive and not state.pauses:
            self._dispatch().resumed(engine_id)

    def others_open(self, info: EngineInfo) -> bool:
        """Whether another engine of its role gets requests."""
        states = self._registry.all()
        return any(
            s.alive and not s.pauses and s.info.role is info.role and s.info != info for s in states
        )

    def _live(self, engine_id: str) -> EngineState | None:
        state = self._registry.get(engine_id)
        return state if state is not None and state.alive else None


def no_such_engine(engine_id: str) -> str:
    """Return the answer to who pauses an engine that is not there."""
    return f"no engine {engine_id[:80]!r} lives here; GET /dualpath/v1/status names those that do"
