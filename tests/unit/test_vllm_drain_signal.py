"""Signals of a vLLM engine: which process handles SIGTERM, and when the server gets SIGINT."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from multiprocessing.synchronize import Event

import pytest
from tests.guard import GUARD_S

from dualpath.vllm.drain_on_sigterm import drain_engine_core, drain_on_sigterm, on_drain_signal


@pytest.fixture
async def interrupted() -> AsyncIterator[asyncio.Event]:
    """vLLM's server: its handlers of SIGINT, and of SIGTERM until ours replaces it."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    yield interrupted
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)


@pytest.mark.parametrize("again", [False, True])
async def test_the_server_is_interrupted_when_all_has_drained_or_at_a_second_sigterm(
    interrupted: asyncio.Event, again: bool
) -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        begun.set()
        await over.wait()

    drain_on_sigterm(drain)
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(GUARD_S):
        await begun.wait()
        assert not interrupted.is_set()
        if again:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            over.set()
        await interrupted.wait()
        over.set()


def _engine_core(ready: Event) -> None:
    """Reports an empty engine to its server at once."""
    signal.set_wakeup_fd(-1)  # the parent's event loop's
    asked: list[bool] = []
    on_drain_signal(lambda: asked.append(True))
    ready.set()
    while not asked:
        signal.sigtimedwait((), 0.01)
    os.kill(os.getppid(), signal.SIGINT)


async def test_the_engine_core_is_asked_to_drain_and_interrupts_its_server(
    interrupted: asyncio.Event,
) -> None:
    await drain_engine_core(GUARD_S)  # at once: no engine is running
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    core = context.Process(target=_engine_core, args=(ready,), name="EngineCore")
    core.start()
    try:
        assert await asyncio.to_thread(ready.wait, GUARD_S)
        drain_on_sigterm(lambda: drain_engine_core(GUARD_S))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(GUARD_S):
            await interrupted.wait()
    finally:
        await asyncio.to_thread(core.join, GUARD_S)
        core.kill()
    for task in asyncio.all_tasks():
        if task.get_name() == "drain":
            task.cancel()
