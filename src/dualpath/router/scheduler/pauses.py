"""Engines that get no new requests for now: they drain, an operator paused them, or are suspect.

The requests of a paused engine go on.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from dualpath.core.control import Drained, Report, RouterMessage, Sync
from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.router.engine_calls import EngineHealth
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.dispatch import Dispatch
from dualpath.router.scheduler.exchange import Exchange
from dualpath.router.scheduler.registry import (
    MOST_FORMER_ENGINES,
    EngineState,
    Pause,
    Registry,
)
from dualpath.router.settings import RouterSettings
from dualpath.router.waits import gather_or_cancel, within_own_time

#: An operator pauses (POST) and resumes (DELETE) an engine here.
PAUSE_PATH = "/dualpath/v1/engines/{engine_id}/pause"

logger = logging.getLogger(__name__)

#: Each engine without requests is asked once in this time, if there are not too many: there is at
#: least this gap between two of them.
_PATROL_S, _PATROL_GAP_S = 5.0, 0.1


class Pauses:
    """Notifies the scheduler of changes of ``EngineState.pauses``.

    A draining engine is notified when it has no requests left, so that it may leave: only the
    router knows of requests that were placed on it and have not reached it yet.  With one rank of a
    data-parallel group the others leave as well, so all of them drain together.

    ``dispatch`` is called only after an engine has joined.
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
        #: Whether no engine gets requests, because the weights change.
        self.held = False

    def is_paused(self, info: EngineInfo) -> bool:
        """Whether an engine that begins a session is paused: an operator's pause persists."""
        state = self._registry.get(info.engine_id)
        if state is not None and self.held:
            state.pauses.add(Pause.WEIGHTS)
        return state is not None and bool(state.pauses)

    def hold(self, *, held: bool) -> None:
        """Pause all engines, those that join later as well, or let them get requests again."""
        self.held = held
        for state in self._registry.all():
            if held:
                self.pause(state.info.engine_id, Pause.WEIGHTS)
            else:
                self.resume(state.info.engine_id, Pause.WEIGHTS)

    def reported(self, info: EngineInfo, report: Report) -> None:
        """An engine reports whether it drains; it is notified once when its group has drained."""
        state = self._registry.get(info.engine_id)
        # While a rank drains, all ranks of its group have the pause ``DRAINING``.
        drains = state is None or state.drained or Pause.DRAINING in state.pauses
        if report.draining is None and not drains:
            return
        group = [rank for rank in self._registry.group(info) if rank.has_session]
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
                self._notify_drained(rank)

    def _notify_drained(self, engine: EngineState) -> None:
        if not engine.drained:
            engine.drained = True
            logger.warning("engine %s has drained", engine.info.engine_id)
            self._send(engine.info.engine_id, Drained())

    def pause(self, engine_id: str, why: Pause) -> bool:
        """Pause a live engine for a reason; return whether that is new."""
        state = self._live(engine_id)
        if state is None or why in state.pauses:
            return False
        if not state.pauses:
            self._dispatch().pause(engine_id, paused=True)
        state.pauses.add(why)
        return True

    def resume(self, engine_id: str, why: Pause) -> None:
        """Remove one reason; the engine gets requests again when it was the last."""
        state = self._registry.get(engine_id)
        if state is None or why not in state.pauses:
            return
        state.pauses.discard(why)
        if state.alive and not state.pauses:
            self._dispatch().pause(engine_id, paused=False)

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
    """Return the error for a pause of an unknown engine."""
    return f"no engine {engine_id[:80]!r} lives here; GET /dualpath/v1/status names those that do"


class SuspectList:
    """Engines on which something failed: paused until they prove that they live.

    The proof is fresh: an answer to a ``Sync`` that was sent after the failure, and after a failed
    HTTP call one of the engine's HTTP server too.  A late report proves nothing, and a control link
    may outlive the server beside it.  An engine without a proof in time is lost.

    Ranks of a data-parallel group end together, but not at the same moment.  So a failure on one
    makes all of them suspect until each has given a proof; retries go to another group.

    There is one probe at a time of each process of an engine.

    *A silent core.*  The control link of an engine lives in a thread, and its HTTP server perhaps
    in a process of its own: both may answer while the core of the engine hangs.  Front ends notify
    of calls that an engine has and does not answer (``call_waits``).  If its reports have shown no
    step for ``core_timeout_s`` as well, it is lost.

    *A lost engine that registers again*, in the same process, is suspect until what was silent has
    shown its life: its HTTP server by an answer, its core by a step or after ``engine_wait_s``.

    *Idle engines.*  No call shows that the HTTP server of an engine without requests is silent, so
    ``patrol`` asks one after the other, at a rate that does not grow with their number.

    ``send`` sends a control message, ``lose`` declares an engine lost with a reason; ``clock`` is
    that of engines' reports.
    """

    def __init__(
        self,
        registry: Registry,
        exchange: Exchange,
        pauses: Pauses,
        calls: EngineHealth,
        send: Callable[[str, RouterMessage], None],
        lose: Callable[[str, str], None],
        settings: RouterSettings,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._exchange = exchange
        self._pauses = pauses
        self._calls = calls
        self._send = send
        self._lose = lose
        self._timeout_s = settings.suspect_timeout_s
        self._settings = settings
        self._clock = clock
        self._probes: dict[tuple[str, str], asyncio.Task[None]] = {}
        #: Lost processes that may register again, and their steps if their core was silent.
        self._lost: dict[tuple[str, str], int | None] = {}
        #: Engines that are suspect since they have registered again.
        self._returning: set[tuple[str, str]] = set()
        #: Engines that a probe covers, by the suspect engine.
        self._covered: dict[tuple[str, str], frozenset[str]] = {}
        self._resting: set[asyncio.Task[None]] = set()

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        """Something failed on an engine: requests go elsewhere until it is cleared.

        As long as another engine of its role gets requests, it also stays paused for
        ``suspect_timeout_s``, so that the failed request is not retried here.
        """
        name = engine.writer.id
        if name in self._probes or not self._lives(engine):
            return
        group = [rank.info for rank in self._registry.group(engine) if rank.alive]
        self._covered[name] = frozenset(rank.engine_id for rank in group)
        for rank in group:
            self._pauses.pause(rank.engine_id, Pause.SUSPECT)
        self._probes[name] = asyncio.create_task(
            self._probe(engine, group, why, call_failed), name=f"probe {engine.engine_id}"
        )

    def call_waits(self, engine: EngineInfo, silent_s: float) -> None:
        """An engine's HTTP server has a call and has sent nothing of its answer for a while."""
        state = self._registry.get(engine.engine_id)
        if state is None or not self._lives(engine) or state.report is None:
            return
        still_s = min(silent_s, self._clock() - state.step_s)
        if still_s > self._settings.core_timeout_s:
            self._note_lost(engine, state.report.steps)
            self._lose(
                engine.engine_id,
                f"its core has made no step for {still_s:.0f} s while a call waits for it "
                "(core_timeout_s); see its log, and restart it",
            )

    def joined(self, engine: EngineInfo) -> None:
        """An engine begins a session."""
        name = engine.writer.id
        if name not in self._lost:
            return
        steps = self._lost.pop(name)
        self._pauses.pause(engine.engine_id, Pause.SUSPECT)
        self._returning.add(name)
        task = asyncio.create_task(self._return(engine, steps), name=f"return {engine.engine_id}")
        self._resting.add(task)
        task.add_done_callback(self._resting.discard)

    async def patrol(self) -> None:
        """Ask the HTTP servers of engines without requests, one after the other, without end."""
        turn = 0
        while True:
            engines = self._registry.alive()
            await asyncio.sleep(max(_PATROL_S / max(len(engines), 1), _PATROL_GAP_S))
            turn += 1
            if engines and self._idle(engine := engines[turn % len(engines)]):
                try:
                    limit_s = self._settings.engine_timeout_s
                    await within_own_time(self._calls.answers(engine), limit_s)
                except (DualPathError, TimeoutError) as error:
                    if self._lives(engine):
                        why = str(error) or f"its HTTP server is silent for {limit_s:g} s"
                        self.suspect(engine, why, call_failed=True)

    def _idle(self, engine: EngineInfo) -> bool:
        state = self._registry.get(engine.engine_id)
        report = state.report if state is not None and not state.pauses else None
        return report is not None and report.load.unfinished_requests == 0

    async def await_liveness(self, engines: Iterable[EngineInfo]) -> None:
        """Wait until it is known which of these engines live."""
        open_ones = [self._probes.get(engine.writer.id) for engine in engines]
        tasks = [task for task in open_ones if task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """End all probes; idempotent."""
        tasks = [*self._probes.values(), *self._resting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(
        self, engine: EngineInfo, group: Sequence[EngineInfo], why: str, call_failed: bool
    ) -> None:
        try:
            answers = gather_or_cancel(*(self._answers(rank, call_failed) for rank in group))
            await within_own_time(answers, self._timeout_s)
        except Exception as error:  # any error means there is no proof
            if self._lives(engine):
                answer = str(error) or f"no answer within {self._timeout_s:g} s"
                for rank in group if call_failed else ():
                    self._note_lost(rank, None)
                self._lose(engine.engine_id, f"{answer} after a failure ({why})")
            return
        finally:
            del self._probes[engine.writer.id], self._covered[engine.writer.id]
        for rank in group:
            if rank.engine_id != engine.engine_id:
                self._clear(rank)
        rest = asyncio.create_task(self._rest(engine), name=f"rest {engine.engine_id}")
        self._resting.add(rest)
        rest.add_done_callback(self._resting.discard)

    async def _answers(self, engine: EngineInfo, call_failed: bool) -> None:
        if call_failed:
            await self._calls.answers(engine)
        call_id, answer = self._exchange.call(engine.engine_id)
        self._send(engine.engine_id, Sync(call_id))
        if await answer is None:
            raise EngineLostError(f"engine {engine.engine_id} is lost")

    async def _rest(self, engine: EngineInfo) -> None:
        if self._pauses.others_open(engine):
            await asyncio.sleep(self._timeout_s)
        self._clear(engine)

    def _clear(self, engine: EngineInfo) -> None:
        """Let an engine get requests again, unless another probe covers it."""
        covered = any(engine.engine_id in engines for engines in self._covered.values())
        covered = covered or engine.writer.id in self._returning
        if self._lives(engine) and not covered:
            self._pauses.resume(engine.engine_id, Pause.SUSPECT)

    def _note_lost(self, engine: EngineInfo, steps: int | None) -> None:
        self._lost[engine.writer.id] = steps
        while len(self._lost) > MOST_FORMER_ENGINES:
            del self._lost[next(iter(self._lost))]

    async def _return(self, engine: EngineInfo, steps: int | None) -> None:
        try:
            if steps is None:
                await self._server_answers(engine)
            else:
                await self._core_steps(engine, steps)
        finally:
            self._returning.discard(engine.writer.id)
        self._clear(engine)

    async def _server_answers(self, engine: EngineInfo) -> None:
        """Return when the HTTP server of a live engine answers, or the engine is lost."""
        warned = False
        while self._lives(engine):
            try:
                await within_own_time(self._calls.answers(engine), self._timeout_s)
                return
            except (DualPathError, TimeoutError):
                if not warned:
                    logger.warning(
                        "engine %s has registered again but gets no requests: its HTTP server at "
                        "%s does not answer",
                        *(engine.engine_id, engine.api_url),
                    )
                warned = True
            await asyncio.sleep(self._timeout_s)

    async def _core_steps(self, engine: EngineInfo, steps: int) -> None:
        """Return when an engine makes steps, is lost, or might serve again after a long time."""
        waited_s = 0.0
        while self._lives(engine) and waited_s < self._settings.engine_wait_s:
            state = self._registry.get(engine.engine_id)
            if state is not None and state.report is not None and state.report.steps != steps:
                return
            await asyncio.sleep(self._timeout_s)
            waited_s += self._timeout_s

    def _lives(self, engine: EngineInfo) -> bool:
        state = self._registry.get(engine.engine_id)
        return state is not None and state.alive and state.info.epoch == engine.epoch
