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
    task = await _run_until(work, broken)
    if task.cancelled() and broken.done():
        broken.result()
    return task.result()


async def run_until_done(work: Awaitable[object], done: "asyncio.Future[None]") -> None:
    """Return when ``work`` has ended, raising its exception, or when ``done`` is done.

    Then the work is cancelled and has ended; an exception of ``done`` is left to its owner.
    """
    task = await _run_until(work, done)
    if not task.cancelled():
        task.result()


async def _run_until(work: Awaitable[T], other: "asyncio.Future[None]") -> "asyncio.Future[T]":
    """Return the task of ``work``, which has ended; it is cancelled once ``other`` is done."""
    task = asyncio.ensure_future(work)
    watched: set[asyncio.Future[Any]] = {task, other}
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            # Also if this call is cancelled again, while it waits here.
            task.add_done_callback(_retrieve)
            task.cancel()
            await asyncio.wait({task})
        else:
            _retrieve(task)
    return task


#: Parts into which ``within_own_time`` divides its limit.
_SLICES = 10


async def within_own_time(work: Awaitable[T], limit_s: float) -> T:
    """Return what ``work`` returns; raises ``TimeoutError`` if that takes longer than ``limit_s``.

    Time in which this process's event loop did not run counts little: the result may have arrived
    by then, unread.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(_SLICES):
            if (await asyncio.wait({task}, timeout=limit_s / _SLICES))[0]:
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def gather_or_cancel(*works: Awaitable[T]) -> list[T]:
    """Return all results; if one fails, cancel the others and wait for their end."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)


def _retrieve(task: "asyncio.Future[Any]") -> None:
    """Mark the exception of a task as retrieved, if it has one."""
    if not task.cancelled():
        task.exception()
