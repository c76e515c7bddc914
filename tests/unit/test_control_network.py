"""A wait for a state of the router ends when it occurs, with or without a message."""

import asyncio

import pytest
from tests.unit.router_cluster import cluster

from dualpath.core import control

pytestmark = pytest.mark.virtual_time


async def test_what_comes_true_without_a_message_is_seen() -> None:
    async with cluster(prefill=0, decode=0) as made:
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(5.0, over.set)
        await made.service.arrivals.until(over.is_set, 10.0)


async def test_what_a_message_brings_is_seen_when_it_comes() -> None:
    async with cluster() as made:
        seen = made.service.arrivals.messages
        loop, count = asyncio.get_running_loop(), len(seen)
        made.engines["p0"].report()
        begin_s = loop.time()
        await made.service.arrivals.until(lambda: len(seen) > count, 10.0)
        assert isinstance(seen[count], control.Report)
        assert loop.time() == begin_s


async def test_what_never_comes_true_ends_with_the_limit() -> None:
    async with cluster() as made:
        with pytest.raises(TimeoutError):
            await made.service.arrivals.until(lambda: False, 10.0)
