"""What an attempt asks of its engines, command by command, with a limit on each wait.

Here are the messages and their time-outs; in which order they go, and what becomes of the
answers, stands in ``lifecycle``.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from dualpath.core.blocks import BlockKey, BlockOrigin, chain_root
from dualpath.core.control import Persist, PrefillDone, Read, ReadDone, Reserved, Sync
from dualpath.core.errors import EngineLostError, TransportError
from dualpath.core.runs import HitRun
from dualpath.router.control.context import SchedulerContext
from dualpath.router.control.exchange import AttemptChannel, CallAnswer
from dualpath.router.engines import EngineInfo

T = TypeVar("T")


class AttemptSteps:
    """Commands about one attempt.

    What starts something new raises ``EngineLostError`` once ``channel`` is broken.  An engine that
    gives no answer in time is suspect from then on.
    """

    def __init__(self, context: SchedulerContext, channel: AttemptChannel) -> None:
        self._context = context
        self._channel = channel
        self._attempt_id = channel.attempt_id
        self._assigned: set[str] = set()

    async def assign(self, engine: EngineInfo) -> None:
        """Let an engine count the request, of which it holds nothing in its buffer.

        Returns when the engine has taken it up: the vLLM request travels on another connection
        and must not overtake its ``Assign``.
        """
        self._send_assign(engine, 0)
        await self.synced(engine)

    async def reserve(
        self, engine: EngineInfo, blocks: int, keys: tuple[BlockKey, ...] = ()
    ) -> Reserved:
        """Let an engine count the request and grant buffer slots; return them, in block order.

        ``keys`` name the first of the blocks: what of them the engine keeps need not be read.
        """
        granted = self._channel.expect(Reserved, engine.engine_id)
        self._send_assign(engine, blocks, keys)
        return await granted

    async def synced(self, engine: EngineInfo) -> None:
        """Wait until an engine has taken up all it was sent, or is lost.

        Raises ``EngineLostError`` after ``engine_timeout_s``.
        """
        limit_s = self._context.settings.engine_timeout_s
        await self._within(
            limit_s,
            engine,
            self._answer_to_sync(engine),
            f"engine {engine.engine_id} has not taken up within {limit_s:g} s what it was sent "
            "(engine_timeout_s); see its log, raise the limit if its machine is overloaded",
        )

    async def read(
        self, engine: EngineInfo, run: HitRun, keys: tuple[BlockKey, ...], parent: BlockKey
    ) -> ReadDone:
        """Return the outcome of a storage read of a run's blocks into its slots.

        Raises ``EngineLostError`` if the engine does not even say that its deadline has passed.
        """
        self._channel.check()
        settings = self._context.settings
        answer = self._channel.expect(ReadDone, engine.engine_id)
        self._context.dispatch.reading(self._attempt_id, engine.engine_id)
        self._context.send(
            engine.engine_id,
            Read(
                request_id=self._attempt_id,
                run=run,
                keys=keys,
                deadline_s=settings.read_deadline_s,
                parent=parent,
            ),
        )
        limit_s = settings.read_deadline_s + settings.read_margin_s
        return await self._within(
            limit_s,
            engine,
            answer,
            f"engine {engine.engine_id} has not answered a read of {len(keys)} blocks within "
            f"{limit_s:g} s; check its storage",
        )

    async def kv_arrived(
        self, engine: EngineInfo, to: EngineInfo, done: Awaitable[PrefillDone]
    ) -> PrefillDone:
        """Return the PE's word that the prompt's KV is complete in the DE's buffer.

        Its first token alone does not say so, and a token is streamed only once it is true.  Raises
        ``EngineLostError`` after ``read_margin_s``, ``TransportError`` if KV did not arrive.
        """
        limit_s = self._context.settings.read_margin_s
        answer = await self._within(
            limit_s,
            engine,
            done,
            f"engine {engine.engine_id} computed the first token but has not confirmed its "
            f"transfers within {limit_s:g} s; see its log",
        )
        if answer.failure is not None:
            error = f"engine {engine.engine_id} could not send KV: {answer.failure}"
            # The PE has just spoken; the DE may be gone.
            self._context.suspicions.suspect(to, error)
            raise TransportError(error)
        return answer

    def prefilled(self, engine: EngineInfo) -> None:
        """Let the PE go, whose part is over."""
        self._channel.done_with(engine.engine_id)
        self._assigned.discard(engine.engine_id)
        self._context.releases.release(engine.engine_id, self._attempt_id, "prefill done")
        self._context.dispatch.prefill_done(self._attempt_id, engine.engine_id)

    def persist(
        self, engine: EngineInfo, hit_blocks: int, keys: tuple[BlockKey, ...], tenant: str
    ) -> None:
        """Have the DE store those of a prompt's full blocks that are new; sent even without any.

        The DE gives the buffer back only when it knows that nothing more is to be stored.
        """
        self._channel.check()
        self._context.send(
            engine.engine_id,
            Persist(
                request_id=self._attempt_id,
                first_block=hit_blocks,
                keys=keys[hit_blocks:],
                origin=BlockOrigin(keys[hit_blocks - 1] if hit_blocks else chain_root(), tenant),
                hit_keys=keys[:hit_blocks],
            ),
        )

    def release(self, prefill: EngineInfo, decode: EngineInfo, reason: str) -> None:
        """Give back what the attempt still has at its engines."""
        releases = self._context.releases
        if prefill.engine_id in self._assigned:
            releases.release(prefill.engine_id, self._attempt_id, reason)
        if decode.engine_id in self._assigned:
            releases.release_when_safe(decode.engine_id, self._attempt_id, reason)

    def _send_assign(
        self, engine: EngineInfo, reserve_blocks: int, keys: tuple[BlockKey, ...] = ()
    ) -> None:
        self._channel.check()
        message = self._context.dispatch.assign(
            engine.engine_id, self._attempt_id, reserve_blocks, keys
        )
        self._assigned.add(engine.engine_id)
        self._context.send(engine.engine_id, message)

    async def _answer_to_sync(self, engine: EngineInfo) -> CallAnswer | None:
        if not self._context.is_alive(engine):
            return None
        call_id, answer = self._context.exchange.call(engine.engine_id)
        self._context.send(engine.engine_id, Sync(call_id))
        return await answer

    async def _within(
        self, limit_s: float, engine: EngineInfo, answer: Awaitable[T], otherwise: str
    ) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            self._context.suspicions.suspect(engine, otherwise)
            raise EngineLostError(otherwise) from None
