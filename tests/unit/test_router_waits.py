"""A waiter that leaves in the loop iteration in which its work fails: asyncio reports nothing."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dualpath.router.waits import gather_or_cancel, run_until_broken


async def _alone(work: Awaitable[None]) -> None:
    await run_until_broken(work, asyncio.get_running_loop().create_future())


async def _beside_another(work: Awaitable[None]) -> None:
    await gather_or_cancel(work, asyncio.Event().wait())


@pytest.mark.parametrize("wait", [_alone, _beside_another])
# The work fails ``later`` callbacks of the event loop before the waiter is cancelled.
@pytest.mark.parametrize("later", range(4))
async def test_no_exception_is_reported_as_never_retrieved(
    wait: Callable[[Awaitable[None]], Awaitable[None]], later: int
):
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    await _fails_as_its_waiter_leaves(wait, later)
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


async def _fails_as_its_waiter_leaves(
    wait: Callable[[Awaitable[None]], Awaitable[None]], later: int
) -> None:
    loop = asyncio.get_running_loop()
    call = loop.create_future()

    async def work() -> None:
        await call

    async def waits() -> None:
        await wait(work())

    waiting = asyncio.create_task(waits())
    for _ in range(3):
        await asyncio.sleep(0)

    def leaves(after: int) -> None:
        if after:
            loop.call_soon(leaves, after - 1)
        else:
            waiting.cancel()

    call.set_exception(ValueError("the scheduler is lost"))
    leaves(later)
    with pytest.raises((asyncio.CancelledError, ValueError)):
        await waiting


async def test_work_that_is_broken_off_ends_before_the_error_is_raised():
    loop = asyncio.get_running_loop()
    broken, ended = loop.create_future(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    loop.call_soon(lambda: loop.call_soon(broken.set_exception, ValueError("lost")))
    with pytest.raises(ValueError, match="lost"):
        await run_until_broken(work(), broken)
    assert ended
