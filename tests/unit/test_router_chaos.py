"""Random interleavings: engines die, restart or hide, clients leave, reads fall short."""

import asyncio
import contextlib
import random

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import GUARD_S, expected, job

from dualpath.core import control
from dualpath.router.settings import RouterSettings

MODES = ["basic", "round-robin", "dualpath", "split", "oracle"]
SETTINGS = RouterSettings(
    engine_timeout_s=1000, suspect_timeout_s=0.02, lookup_timeout_s=0.2, max_attempts=1000
)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def disturb(
    made: Cluster, chance: random.Random, clients: list[asyncio.Task[list[int]]]
) -> None:
    name = chance.choice(sorted(made.engines))
    engine = made.engines[name]
    match chance.choice(["restart", "lose", "goodbye", "leave", "fail", "short", "malformed"]):
        case "restart":
            await engine.kill()
            if chance.random() < 0.5:
                made.lose(name)
                await turns(chance.randrange(20))
            await made.revive(name)
        case "lose":
            made.lose(name)
            await turns(chance.randrange(20))
            engine.report()
        case "goodbye":
            engine.send(control.Goodbye(reason="chaos"))
            await made.service.saw_loss(name)
            await engine.kill()
            await made.revive(name)
        case "leave":
            chance.choice(clients).cancel()
        case "fail":
            if engine.tenants:
                request_id = chance.choice(sorted(engine.tenants))
                engine.send(control.Failed(request_id=request_id, reason="chaos"))
        case "short":
            engine.read_limit = lambda read: (chance.randrange(len(read.keys) + 1), "chaos: short")
        case "malformed":
            engine.send_raw(chance.randbytes(8))


@pytest.mark.parametrize("seed", range(100))
async def test_every_stream_is_right_and_nothing_is_left_behind(seed):
    chance = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    async with cluster(
        chance.choice([1, 2]),
        chance.choice([1, 2]),
        mode=mode,
        # A prompt has 20 tokens at most; a later attempt also brings what was generated, 6 at most.
        buffer_blocks=chance.choice([7, 9, 30]),
        settings=SETTINGS,
    ) as made:
        made.calls.pause = lambda: turns(chance.randrange(8))
        jobs = [
            job(f"r{i}", [7] * (4 * chance.randrange(4)) + [i] * chance.randrange(1, 9))
            for i in range(8)
        ]
        clients = [asyncio.create_task(made.run(j)) for j in jobs]
        for _ in range(6):
            await turns(chance.randrange(60))
            await disturb(made, chance, clients)
        async with asyncio.timeout(GUARD_S):
            for one, client in zip(jobs, clients, strict=True):
                with contextlib.suppress(asyncio.CancelledError):
                    assert await client == expected(one.prompt_token_ids, 6)
        await made.settled()
        status = made.service.status()
        assert (status["waiting"], status["running"]) == (0, 0)
        assert made.service.context.releases.held == 0
        assert made.service.context.dispatch.idle()
