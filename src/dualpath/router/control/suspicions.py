"""Engines on which something failed: they get nothing new until they have proven that they live.

The proof is fresh: an answer to a ``Sync`` that was sent after the failure, and where a call over
HTTP failed one of the engine's HTTP server too.  A late report proves nothing, and a control link
may outlive the server beside it.  Who proves nothing in time is lost.

Ranks of a data-parallel group end together, but not in the same moment.  So a failure on one makes
all of them suspect until each has proven that it lives; what is tried again goes to another group.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from dualpath.core.control import RouterMessage, Sync
from dualpath.core.errors import EngineLostError
from dualpath.router.control.engine_state import Pause
from dualpath.router.control.exchange import Exchange
from dualpath.router.control.pauses import Pauses
from dualpath.router.control.registry import Registry
from dualpath.router.engine_calls import EngineHealth
from dualpath.router.engines import EngineInfo
from dualpath.router.waits import gather_or_cancel


class Suspicions:
    """One inquiry at a time into each process of an engine.

    ``send`` sends a control message, ``lose`` declares an engine lost with a reason.
    """

    def __init__(
        self,
        registry: Registry,
        exchange: Exchange,
        pauses: Pauses,
        calls: EngineHealth,
        send: Callable[[str, RouterMessage], None],
        lose: Callable[[str, str], None],
        timeout_s: float,
    ) -> None:
        self._registry = registry
        self._exchange = exchange
        self._pauses = pauses
        self._calls = calls
        self._send = send
        self._lose = lose
        self._timeout_s = timeout_s
        self._inquiries: dict[tuple[str, str], asyncio.Task[None]] = {}
        #: Engines that an inquiry covers, by the engine it is about.
        self._covered: dict[tuple[str, str], frozenset[str]] = {}
        self._resting: set[asyncio.Task[None]] = set()

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        """Something failed on an engine: its next requests go elsewhere until it is cleared.

        As long as another engine of its role gets requests, it also rests for
        ``suspect_timeout_s``, so that what failed here is not tried here again.
        """
        name = engine.writer.id
        if name in self._inquiries or not self._lives(engine):
            return
        group = [rank.info for rank in self._registry.group(engine) if rank.alive]
        self._covered[name] = frozenset(rank.engine_id for rank in group)
        for rank in group:
            self._pauses.pause(rank.engine_id, Pause.SUSPECT)
        self._inquiries[name] = asyncio.create_task(
            self._inquire(engine, group, why, call_failed), name=f"inquiry {engine.engine_id}"
        )

    async def settled(self, engines: Iterable[EngineInfo]) -> None:
        """Wait until it is known which of these engines live."""
        open_ones = [self._inquiries.get(engine.writer.id) for engine in engines]
        tasks = [task for task in open_ones if task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """End all inquiries; idempotent."""
        tasks = [*self._inquiries.values(), *self._resting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _inquire(
        self, engine: EngineInfo, group: Sequence[EngineInfo], why: str, call_failed: bool
    ) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await gather_or_cancel(*(self._answers(rank, call_failed) for rank in group))
        except Exception as error:  # whatever it is, it is no proof
            if self._lives(engine):
                said = str(error) or f"no answer within {self._timeout_s:g} s"
                self._lose(engine.engine_id, f"{said} after a failure ({why})")
            return
        finally:
            del self._inquiries[engine.writer.id], self._covered[engine.writer.id]
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
        """Let an engine get requests again, unless another inquiry goes on that covers it."""
        covered = any(engine.engine_id in engines for engines in self._covered.values())
        if self._lives(engine) and not covered:
            self._pauses.resume(engine.engine_id, Pause.SUSPECT)

    def _lives(self, engine: EngineInfo) -> bool:
        state = self._registry.get(engine.engine_id)
        return state is not None and state.alive and state.info.epoch == engine.epoch
