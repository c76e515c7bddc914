"""Random interleavings: engines die, restart or fall silent, clients leave, reads are short."""

import asyncio
import contextlib
import random

import pytest
from tests.control_network import ControlNetwork
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import GUARD_S, expected, job

from dualpath.core import control
from dualpath.core import control as request_messages
from dualpath.core.control import Message
from dualpath.router.settings import RouterSettings
from dualpath_lab.faults.virtual_time import VirtualTimeLoop

MODES = ["basic", "round-robin", "dualpath", "split", "oracle"]
DISTURBANCES = 6
DISTURBANCE_KINDS = (
    "restart", "lose", "reset", "goodbye", "leave", "fail", "short", "malformed"
)  # fmt: skip
#: An attempt fails for one of the disturbances or not at all.
SETTINGS = RouterSettings(max_attempts=DISTURBANCES + 1)
#: Seconds that a control message or a step of the model takes; the router's limits are above.
DELAYS_S = (0.0, 0.0, 0.0, 0.001, 0.02, 0.3)


async def some_time(chance: random.Random) -> None:
    await asyncio.sleep(chance.choice(DELAYS_S))


async def disturb(
    made: Cluster, chance: random.Random, clients: list[asyncio.Task[list[int]]]
) -> None:
    name = chance.choice(sorted(made.engines))
    engine = made.engines[name]
    match chance.choice(
        ["restart", "lose", "goodbye", "leave", "fail", "short", "malformed", "reset"]
    ):
        case "restart":
            await engine.kill()
            if chance.random() < 0.5:
                made.lose(name)
                await some_time(chance)
            await made.revive(name)
        case "lose":
            made.lose(name)
            await some_time(chance)
            engine.report()
        case "reset":
            engine.connection.reset()
        case "goodbye" if engine.session.joined:
            engine.send(control.Deregister(reason="chaos"))
            await made.service.saw_loss(name)
            await engine.kill()
            await made.revive(name)
        case "leave":
            chance.choice(clients).cancel()
        case "fail":
            if engine.tenants:
                request_id = chance.choice(sorted(engine.tenants))
                engine.send(request_messages.Failed(request_id=request_id, reason="chaos"))
        case "short":
            engine.read_limit = lambda read: (
                chance.randrange(read.run.blocks.count + 1),
                "chaos: short",
            )
        case "malformed":
            engine.send_raw(chance.randbytes(8))


async def run_seed(seed: int) -> list[Message]:
    """Run a seed; return all messages that the router got from its engines."""
    chance = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    network = ControlNetwork(delay=lambda: chance.choice(DELAYS_S))
    async with cluster(
        chance.choice([1, 2]),
        chance.choice([1, 2]),
        mode=mode,
        # A prompt has at most 20 tokens; a later attempt adds at most 6 generated ones.
        buffer_blocks=chance.choice([7, 9, 30]),
        settings=SETTINGS,
        network=network,
    ) as made:
        made.calls.pause = lambda: some_time(chance)
        jobs = [
            job(f"r{i}", [7] * (4 * chance.randrange(4)) + [i] * chance.randrange(1, 9))
            for i in range(8)
        ]
        clients = [asyncio.create_task(made.run(j)) for j in jobs]
        for _ in range(DISTURBANCES):
            await some_time(chance)
            await disturb(made, chance, clients)
        async with asyncio.timeout(GUARD_S):
            for one, client in zip(jobs, clients, strict=True):
                with contextlib.suppress(asyncio.CancelledError):
                    assert await client == expected(one.prompt_token_ids, 6)
        await made.settled()
        status = made.service.status()
        assert (status["waiting"], status["running"]) == (0, 0)
        assert made.service.scheduler.releases.held == 0
        assert made.service.scheduler.dispatch.idle()
        return made.service.arrivals.messages


@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", range(100))
async def test_every_stream_is_right_and_nothing_leaks(seed):
    await run_seed(seed)


@pytest.mark.parametrize("seed", range(5))
def test_equal_seeds_give_equal_runs(seed):
    runs = []
    for _ in range(2):
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runs.append(runner.run(run_seed(seed)))
    assert runs[0] == runs[1]
