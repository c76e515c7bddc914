"""Asking engines how much of a prompt is stored, within one time for all of it.

All engines see the same storage.  So one that says by its deadline only what it knows is not asked
after, but for one that is lost or silent another is asked in the time left.  Whoever was asked may
still answer until then: a router or an engine that is late for a moment loses no hits.
"""

import asyncio

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.control import Lookup, LookupDone
from dualpath.router.attempts.hit_account import ENGINE_LOST, TIMEOUT
from dualpath.router.control.context import SchedulerContext
from dualpath.router.control.exchange import CallAnswer
from dualpath.router.engines import EngineInfo

_TRIES = 2
#: Of the router's patience with an engine, what the engine may use; the rest is for the way.
ENGINE_SHARE = 0.75


class LookedUp(msgspec.Struct, frozen=True):
    """Blocks at the head of a prompt known to be stored; ``failure`` says why no more is known."""

    stored_blocks: int
    failure: str | None = None


async def look_up(context: SchedulerContext, keys: tuple[BlockKey, ...]) -> LookedUp:
    """Ask up to two engines, and return after ``lookup_timeout_s`` at the latest.

    Where several DEs may be writing what follows the chain's last known block, and the first of
    them knows of an end, the others are asked in the time left: the longest answer counts.
    """
    end_s = asyncio.get_running_loop().time() + context.settings.lookup_timeout_s
    writers = context.chain_writers(keys)
    others = [engine for engine in context.engines_in_turn() if engine not in writers]
    known = await _ask_in_turn(context, [*writers, *others][:_TRIES], keys, end_s)
    if known.failure is not None or known.stored_blocks == len(keys):
        return known
    more = [_ask_in_turn(context, [writer], keys, end_s) for writer in writers[1:]]
    return max([known, *await asyncio.gather(*more)], key=lambda answer: answer.stored_blocks)


async def _ask_in_turn(
    context: SchedulerContext, engines: list[EngineInfo], keys: tuple[BlockKey, ...], end_s: float
) -> LookedUp:
    """Return the first answer; the next engine is asked once one had its share of the time."""
    loop = asyncio.get_running_loop()
    asked: set[asyncio.Future[CallAnswer | None]] = set()
    try:
        for left, engine in zip(range(len(engines), 0, -1), engines, strict=True):
            within_s = (end_s - loop.time()) / left
            if context.is_alive(engine):
                asked.add(_ask(context, engine, keys, ENGINE_SHARE * within_s))
            answer, asked = await _first(asked, within_s)
            if answer is not None:
                stored_blocks = max(0, min(answer.hit_blocks, len(keys)))
                return LookedUp(stored_blocks, TIMEOUT if answer.partial else None)
        return LookedUp(0, TIMEOUT if asked else ENGINE_LOST)
    finally:
        for answers in asked:
            answers.cancel()


def _ask(
    context: SchedulerContext, engine: EngineInfo, keys: tuple[BlockKey, ...], deadline_s: float
) -> asyncio.Future[CallAnswer | None]:
    """Return a future of an engine's answer, None if it is lost."""
    call_id, answer = context.exchange.call(engine.engine_id)
    context.send(engine.engine_id, Lookup(call_id, keys, deadline_s))
    return answer


async def _first(
    asked: set[asyncio.Future[CallAnswer | None]], within_s: float
) -> tuple[LookupDone | None, set[asyncio.Future[CallAnswer | None]]]:
    """Return the first answer and who has not answered; None once nobody is left, or in time."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    while asked and (left_s := end_s - loop.time()) > 0:
        done, asked = await asyncio.wait(asked, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            if isinstance(answer := one.result(), LookupDone):
                return answer, asked
    return None, asked
