"""A request loses its scheduler when two of its three attempts have failed for other reasons."""

import asyncio

import pytest
from tests.control_network import ControlNetwork
from tests.front_end_links import Link, link_server
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import expected
from tests.unit.test_router_front_ends import PROMPT, Far, nothing_is_left

from dualpath.core.errors import EngineLostError

pytestmark = pytest.mark.virtual_time


class Story:
    """The request at its third attempt, which has come to ``stage``, once ``begun``."""

    def __init__(self, made: Cluster, network: ControlNetwork, stage: str) -> None:
        self._made, self._stage = made, stage
        self._link = Link(network.connect(), "f")
        self._front = Far(made, self._link)
        made.calls.errors.extend(EngineLostError("the test says so") for _ in range(2))
        made.calls.gates[stage], made.calls.gate_after_tokens = asyncio.Event(), 2

    async def begun(self) -> None:
        self._link.start()
        self._answer = asyncio.create_task(self._front.run("a"))
        await self._made.arrives(self._stage)

    async def attempts(self) -> int:
        """Return how many it took, its answer being right."""
        self._made.calls.gates.pop(self._stage).set()
        assert await self._answer == expected(PROMPT, 6)
        await self._front.front_end.end_requests()
        await self._link.stop()
        return self._front.front_end.records[0].attempts


async def test_an_attempt_that_is_lost_with_the_scheduler_is_no_third_failure() -> None:
    network = ControlNetwork()
    async with cluster() as made:
        story = Story(made, network, "prefill")
        async with link_server(made.service.scheduler, network):
            await story.begun()
        async with link_server(made.service.scheduler, network):
            assert await story.attempts() == 4
            await nothing_is_left(made)


async def test_whether_an_engine_has_died_is_asked_of_the_scheduler_that_follows() -> None:
    network = ControlNetwork()
    async with cluster(decode=2) as made:
        story = Story(made, network, "decode")
        async with link_server(made.service.scheduler, network):
            await story.begun()
        (dies,) = made.calls.decodes
        await made.engines[dies].kill()
        await asyncio.sleep(1.0)  # its stream has ended, and no scheduler can give the reason
        made.lose(dies, certain=True)
        async with link_server(made.service.scheduler, network):
            assert await story.attempts() == 4
            await made.settled(*made.engines.keys() - {dies})
