"""Waits that leave no task behind, and no exception that asyncio reports as never retrieved."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_until_broken(work: Awaitable[T], broken: "asyncio.Future[None]") -> T:
    """Return what ``work`` returns, or cancel it and raise the exception of ``broken``.

    The cancelled work has ended when this returns.  If this call is cancelled, an exception of
    ``work`` is dropped: the caller waits for it no longer.
    """
    task = _task(work)
    watched: set[asyncio.Future[Any]] = {task, broken}
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled() and broken.done():
        broken.result()
    return task.result()


async def gather_or_cancel(*works: Awaitable[T]) -> list[T]:
    """Return all results; if one fails, cancel the others and wait for their end."""
    tasks = [_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)


def _task(work: Awaitable[T]) -> "asyncio.Future[T]":
    """Return a task of ``work``; its exception counts as retrieved even if its waiter has left."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_retrieve)
    return task


def _retrieve(task: "asyncio.Future[Any]") -> None:
    if not task.cancelled():
        task.exception()
