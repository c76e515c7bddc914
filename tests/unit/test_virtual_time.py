"""The event loop on virtual time, on which the router's faults are tested."""

import asyncio
import socket
import threading
import time

import pytest

from dualpath_lab.faults.virtual_time import VirtualTimeLoop

pytestmark = pytest.mark.virtual_time


async def test_waits_end_in_the_order_of_their_times_without_waiting():
    loop, ended = asyncio.get_running_loop(), []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append((seconds, loop.time()))

    started_s = time.monotonic()
    await asyncio.gather(wait(3600.0), wait(0.5), wait(60.0))
    assert ended == [(0.5, 0.5), (60.0, 60.0), (3600.0, 3600.0)]
    assert time.monotonic() - started_s < 3600


async def test_a_time_out_passes_only_when_no_task_can_run():
    answer: asyncio.Queue[int] = asyncio.Queue()
    asyncio.get_running_loop().call_later(0.999, answer.put_nowait, 7)
    async with asyncio.timeout(1.0):
        assert await answer.get() == 7
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await answer.get()


async def test_the_clock_stands_still_while_a_thread_runs():
    may_end = threading.Event()
    working = asyncio.ensure_future(asyncio.to_thread(may_end.wait))
    asyncio.get_running_loop().call_later(0.0, may_end.set)
    async with asyncio.timeout(1e-6):
        assert await working


def run(story) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(story)


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def by_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        await asyncio.get_running_loop().sock_recv(ours, 1)


@pytest.mark.parametrize(
    ("story", "words"), [(never, "waits for ever"), (by_a_socket, "waits for a socket")]
)
def test_a_task_that_would_hang_fails_at_once_with_the_reason(story, words):
    with pytest.raises(RuntimeError, match=words):
        run(story())
