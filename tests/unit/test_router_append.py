"""A request without a PE: its DE has the hit and computes the tokens behind it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import WITHOUT_WINDOWS, expected, job, keys_of

from dualpath.core import control
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

#: Four full blocks and one token.
PROMPT = list(range(1, 18))


@contextlib.asynccontextmanager
async def appending(limit_tokens: int = 4, **options: Any) -> AsyncIterator[Cluster]:
    settings = RouterSettings(append_at_decode_tokens=limit_tokens)
    options = {"namespace": WITHOUT_WINDOWS, **options}
    async with cluster(settings=settings, **options) as made:
        yield made


def assignment(made: Cluster) -> dict[str, Any]:
    last: dict[str, Any] = made.service.status()["assignments"][-1]
    return last


async def test_the_decode_engine_serves_it_alone_with_slots_for_the_hit_only() -> None:
    async with appending() as made:
        await made.caches("d0", keys_of(PROMPT))
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert events[0].cached_tokens == 16
        assert (made.calls.prefills, made.calls.decodes) == ([], ["d0"])
        shown = assignment(made)
        assert (shown["prefill_engine"], shown["pe_reason"]) == (None, "append-at-decode")
        received = made.engines["d0"].received
        (assign,) = [m for m in received if isinstance(m, control.Assign)]
        assert (assign.reserve_blocks, assign.keys) == (4, keys_of(PROMPT))
        (persist,) = [m for m in received if isinstance(m, control.Persist)]
        assert (persist.first_block, persist.blocks) == (4, 4)
        await made.settled()
        assert made.service.scheduler.releases.held == 0
        assert made.service.scheduler.idle


@pytest.mark.parametrize("limit_tokens", [0, 1])
@pytest.mark.parametrize("append", [1, 3])
async def test_an_append_above_the_limit_is_computed_by_a_prefill_engine(
    limit_tokens: int, append: int
) -> None:
    prompt = [*PROMPT[:16], *range(100, 100 + append)]
    async with appending(limit_tokens) as made:
        await made.caches("d0", keys_of(prompt))
        assert await made.run(job("a", prompt)) == expected(prompt, 6)
        assert (made.calls.prefills == []) == (append <= limit_tokens)
        await made.settled()


async def test_a_model_with_window_layers_has_a_pe_for_each_request() -> None:
    async with cluster(settings=RouterSettings(append_at_decode_tokens=4)) as made:
        await made.caches("d0", keys_of(PROMPT))
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert made.calls.prefills == ["p0"]


async def test_a_hit_that_is_lost_leads_to_another_attempt_with_a_pe() -> None:
    async with appending() as made:
        await made.caches("d0", keys_of(PROMPT))
        made.engines["d0"].read_limit = lambda read: (2, "missing")
        made.engines["p0"].read_limit = lambda read: (2, "missing")
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert events[0].cached_tokens == 8
        assert made.calls.prefills == ["p0"]
        counters = made.service.status()["counters"]
        assert counters["retries"] == 0, "a block that was evicted is no fault"
        assert counters["recomputed_tokens"] == 8, "by the attempt that loaded the hit in part"
        await made.settled()


@pytest.mark.parametrize("tokens_before", [0, 3])
async def test_a_lost_decode_engine_leads_to_another_attempt_with_a_pe(tokens_before: int) -> None:
    async with appending(decode=2) as made:
        await made.caches("d1", keys_of(PROMPT))
        made.calls.gates["decode"] = asyncio.Event()
        made.calls.gate_after_tokens = tokens_before
        running = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("decode")
        assert made.calls.decodes == ["d1"]
        await made.engines["d1"].kill()
        made.lose("d1", certain=True)
        made.calls.gates.clear()
        assert await running == expected(PROMPT, 6)
        assert made.calls.prefills == ["p0"]
        await made.settled("p0", "d0")


async def test_losing_a_pe_does_not_matter_to_it() -> None:
    async with appending(prefill=2) as made:
        await made.caches("d0", keys_of(PROMPT))
        made.calls.gates["decode"] = asyncio.Event()
        running = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("decode")
        for name in ("p0", "p1"):
            made.lose(name, certain=True)
        made.calls.gates["decode"].set()
        assert await running == expected(PROMPT, 6)
        assert made.service.status()["counters"]["retries"] == 0


async def test_a_cancelled_append_leaves_nothing_behind() -> None:
    async with appending() as made:
        await made.caches("d0", keys_of(PROMPT))
        made.calls.gates["decode"] = asyncio.Event()
        running = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("decode")
        running.cancel()
        await asyncio.wait({running})
        await made.settled()
        assert made.service.scheduler.idle


async def test_requests_for_one_token_are_served_by_the_decode_engine_as_well() -> None:
    async with appending() as made:
        await made.caches("d0", keys_of(PROMPT))
        (event,) = await made.events(job("a", PROMPT, max_new_tokens=1))
        assert event.token_ids == tuple(expected(PROMPT, 1))
        assert made.calls.prefills == []
        await made.settled()
