"""Blocks stay cached in engine buffers: later requests are served from there, with right bytes."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.emulated_cluster import GEOMETRY, Cluster, cluster
from tests.guard import GUARD_S

from dualpath.core.blocks import block_keys
from dualpath.core.cluster import Role
from dualpath.core.control import CACHE_UPDATE_KEY_BYTES, Registered
from dualpath.core.modes import Mode
from dualpath.core.session_hints import SessionHints
from dualpath.engine.counters import Counter
from dualpath.router.settings import RouterSettings
from dualpath_lab.emulated.settings import part_geometry

PROMPT = list(range(1, 38))
#: Of the second turn: 37 and 8 tokens of the first fill 11 blocks of 4.
HIT_BLOCKS = 11


def total(made: Cluster, counter: Counter) -> float:
    managers = [engine.plane.manager for engine in made.engines.values()]
    return sum(manager.report().counters[counter.value] for manager in managers)


async def updated(made: Cluster) -> None:
    """Wait until the router's index has all cached blocks: updates may still be in flight."""
    known = made.service.scheduler.cached._engines

    def taken() -> bool:
        pools = {name: e.plane.manager.buffer._pool for name, e in made.engines.items()}
        return all(
            set(known[name].buffer._keys)
            == {key[:CACHE_UPDATE_KEY_BYTES] for _, key in pool.cached.items()}
            for name, pool in pools.items()
        )

    await made.arrivals.until(taken, GUARD_S)


async def two_turns(made: Cluster, salt: str = "one") -> tuple[list[int], list[int], int]:
    first, _ = await made.ask(PROMPT, 9, cache_salt=salt)
    await made.stored()
    await updated(made)
    second, hits = await made.ask([*PROMPT, *first, 7, 8], 5, cache_salt=salt)
    await made.stored()
    await made.idle()
    return first, second, hits


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.SPLIT, Mode.ROUND_ROBIN])
async def test_a_turn_takes_all_of_its_hits_from_where_the_last_one_left_them(mode: Mode) -> None:
    async with cluster(
        f"memory://dram-off-{mode}", mode, router=RouterSettings(dram_tier=False)
    ) as made:
        plain = await two_turns(made)
        assert total(made, Counter.STORAGE_READ_BYTES) == HIT_BLOCKS * GEOMETRY.full_block_bytes
        assert total(made, Counter.DRAM_HIT_BLOCKS) == 0
    async with cluster(f"memory://dram-on-{mode}", mode) as made:
        assert await two_turns(made) == plain
        assert plain[2] == HIT_BLOCKS * GEOMETRY.block_tokens
        assert total(made, Counter.STORAGE_READ_BYTES) == 0
        assert total(made, Counter.DRAM_HIT_BLOCKS) == HIT_BLOCKS
        assert made.counts(1) == 0
        assert made.service.metrics.recomputed_tokens == 0


@pytest.mark.parametrize("mode", [Mode.BASIC, Mode.LAYERWISE])
async def test_where_a_de_reads_nothing_only_the_pe_serves_what_it_has_read(mode: Mode) -> None:
    async with cluster(f"memory://dram-pe-{mode}", mode) as made:
        first, second, _ = await two_turns(made)
        read_bytes = total(made, Counter.STORAGE_READ_BYTES)
        assert read_bytes == HIT_BLOCKS * GEOMETRY.full_block_bytes
        again, _ = await made.ask([*PROMPT, *first, 7, 8], 5, cache_salt="one")
        assert again == second
        assert total(made, Counter.STORAGE_READ_BYTES) == read_bytes
        assert total(made, Counter.DRAM_HIT_BLOCKS) == HIT_BLOCKS
        await made.idle()
        assert made.counts(1) == 0


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.SPLIT, Mode.LAYERWISE])
async def test_blocks_read_without_window_layers_are_not_cached_as_whole(mode: Mode) -> None:
    """Its third layer sees six tokens.  A shorter hit has other last blocks, needed in full."""
    geometry = part_geometry("16*2,16@6,16", GEOMETRY.block_tokens)
    folder = f"memory://dram-windows-{mode}"
    off = RouterSettings(dram_tier=False)
    async with cluster(folder, mode, router=off, geometry=geometry) as made:
        first, second, _ = await two_turns(made)
        assert total(made, Counter.STORAGE_READ_BYTES) < HIT_BLOCKS * geometry.full_block_bytes
    # Other engines, with empty buffers; only stored blocks remain.
    async with cluster(folder, mode, geometry=geometry) as made:
        for tokens in ([*PROMPT, *first, 7, 8, *second, 9], [*PROMPT, *first, 7, 8], PROMPT):
            await made.ask(tokens, 3, cache_salt="one")
            await made.stored()
            await made.idle()
        assert made.counts(1) == 0
        assert made.service.metrics.recomputed_tokens == 0


#: Bytes of DRAM that a node's engines share: so many blocks, with their file headers.
SHARED_BYTES = 64 * (4096 + 4096)


@pytest.mark.parametrize("mode", [Mode.BASIC, Mode.LAYERWISE, Mode.DUALPATH, Mode.SPLIT])
async def test_an_engine_reads_nothing_from_storage_that_another_of_its_node_has(
    mode: Mode, tmp_path: Path
) -> None:
    shared: dict[str, Any] = {"dram_dir": str(tmp_path / "dram"), "dram_bytes": SHARED_BYTES}
    async with cluster(tmp_path / "kv", mode, **shared) as made:
        first, second, hits = await two_turns(made)
        assert hits == HIT_BLOCKS * GEOMETRY.block_tokens
        assert total(made, Counter.STORAGE_READ_BYTES) == 0
        assert total(made, Counter.DRAM_HIT_BLOCKS) == HIT_BLOCKS
        assert total(made, Counter.DRAM_HIT_BYTES) == HIT_BLOCKS * GEOMETRY.full_block_bytes
        if not mode.dual_path:  # The PE has what the DE wrote; the DE's cache does not help it.
            shared_bytes = total(made, Counter.NODE_DRAM_READ_BYTES)
            assert shared_bytes == HIT_BLOCKS * GEOMETRY.full_block_bytes
        assert made.counts(1) == 0
    # Other engines, started on the same node, with empty buffers.
    async with cluster(tmp_path / "kv", mode, **shared) as made:
        again, found = await made.ask([*PROMPT, *first, 7, 8], 5, cache_salt="one")
        assert (again, found) == (second, HIT_BLOCKS * GEOMETRY.block_tokens)
        assert total(made, Counter.STORAGE_READ_BYTES) == 0
        shared_bytes = total(made, Counter.NODE_DRAM_READ_BYTES)
        assert shared_bytes == HIT_BLOCKS * GEOMETRY.full_block_bytes
        await made.idle()
        assert made.counts(1) == 0
        assert made.service.metrics.recomputed_tokens == 0


@pytest.mark.parametrize("emptied", [False, True])
async def test_the_router_plans_with_the_blocks_that_a_node_shares(
    emptied: bool, tmp_path: Path
) -> None:
    """Also if it was evicted meanwhile, which costs a read."""
    shared: dict[str, Any] = {"dram_dir": str(tmp_path / "dram"), "dram_bytes": SHARED_BYTES}
    async with cluster(tmp_path / "kv", Mode.SPLIT, **shared) as made:
        first, second, _ = await two_turns(made)
    prompt = [*PROMPT, *first, 7, 8]
    keys = block_keys(prompt, GEOMETRY.block_tokens, cache_salt="one")[:HIT_BLOCKS]
    # Other engines with empty buffers: they report the blocks they find in shared DRAM.
    async with cluster(tmp_path / "kv", Mode.SPLIT, decode=2, **shared) as made:

        def known() -> bool:
            prefixes = made.service.scheduler.cached.prefixes(keys, Mode.SPLIT)
            return {(p.engine_id, p.blocks) for p in prefixes} == {
                (name, HIT_BLOCKS) for name in made.engines
            }

        await made.arrivals.until(known, GUARD_S)
        if emptied:
            shutil.rmtree(tmp_path / "dram")
        assert await made.ask(prompt, 5, cache_salt="one") == (
            second,
            HIT_BLOCKS * GEOMETRY.block_tokens,
        )
        (note,) = made.service.status()["assignments"]
        sides = [run["side"] for run in note["reads"]]
        assert (note["read_reason"], sides) == ("kept", ["decode"])
        await made.idle()
        sources = Counter.STORAGE_READ_BYTES, Counter.NODE_DRAM_READ_BYTES
        read_bytes = {source: total(made, source) for source in sources}
        assert read_bytes.pop(sources[not emptied]) == HIT_BLOCKS * GEOMETRY.full_block_bytes
        assert list(read_bytes.values()) == [0]
        assert made.counts(1) == 0
        assert made.service.metrics.recomputed_tokens == 0


async def test_dram_that_is_shared_does_not_make_the_buffers_larger(tmp_path: Path) -> None:
    own = 4 * GEOMETRY.full_block_bytes
    async with cluster(tmp_path / "kv", Mode.DUALPATH, dram_bytes=own) as made:
        assert {e.plane.manager.buffer_tokens for e in made.engines.values()} == {132 * 4}
    async with cluster(
        tmp_path / "kv", Mode.DUALPATH, dram_bytes=SHARED_BYTES, dram_dir=str(tmp_path / "dram")
    ) as made:
        assert {e.plane.manager.buffer_tokens for e in made.engines.values()} == {128 * 4}


async def test_a_router_with_caching_disabled_reads_all_hits_from_storage(
    tmp_path: Path,
) -> None:
    async with cluster(
        tmp_path / "kv",
        Mode.DUALPATH,
        router=RouterSettings(dram_tier=False),
        dram_dir=str(tmp_path / "dram"),
        dram_bytes=SHARED_BYTES,
    ) as made:
        await two_turns(made)
        assert total(made, Counter.STORAGE_READ_BYTES) == HIT_BLOCKS * GEOMETRY.full_block_bytes
        assert list((tmp_path / "dram").rglob("*.kv")) == []


async def test_engines_evict_blocks_that_others_of_the_node_are_about_to_read(
    tmp_path: Path,
) -> None:
    async with cluster(
        tmp_path / "kv",
        Mode.DUALPATH,
        decode=2,
        dram_dir=str(tmp_path / "dram"),
        dram_bytes=10 * (4096 + 4096),
        buffer_bytes=30 * GEOMETRY.full_block_bytes,
    ) as made:
        prompts = [[agent, *PROMPT] for agent in range(1, 6)]
        for _ in range(3):
            answers = await asyncio.gather(*(made.ask(prompt, 9) for prompt in prompts))
            await made.stored()
            prompts = [[*p, *tokens] for p, (tokens, _) in zip(prompts, answers, strict=True)]
        await made.idle()
        assert total(made, Counter.NODE_DRAM_EVICTED_BLOCKS) > 0
        assert made.counts(1) == 0
        assert made.service.metrics.recomputed_tokens == 0
        assert made.service.metrics.retries == 0


async def test_tenants_share_nothing() -> None:
    async with cluster("memory://dram-tenants", Mode.DUALPATH) as made:
        one = await two_turns(made)
        hits = total(made, Counter.DRAM_HIT_BLOCKS)
        other, found = await made.ask(PROMPT, 9, cache_salt="other")
        assert (other, found) == (one[0], 0)
        assert total(made, Counter.DRAM_HIT_BLOCKS) == hits


async def test_agents_in_a_buffer_for_two_of_them_evict_each_other() -> None:
    blocks = 30
    async with cluster(
        "memory://dram-small",
        Mode.DUALPATH,
        buffer_bytes=blocks * GEOMETRY.full_block_bytes,
    ) as made:
        prompts = [[agent, *PROMPT] for agent in range(1, 6)]
        for _ in range(3):
            answers = await asyncio.gather(*(made.ask(prompt, 9) for prompt in prompts))
            await made.stored()
            prompts = [[*p, *tokens] for p, (tokens, _) in zip(prompts, answers, strict=True)]
        await made.idle()
        assert made.counts(1) == 0
        assert total(made, Counter.DRAM_EVICTED_BLOCKS) > 0
        assert made.service.metrics.retries == 0
        for engine in made.engines.values():
            report = engine.plane.manager.report()
            assert report.load.cached_buffer_tokens <= blocks * GEOMETRY.block_tokens


async def test_wrong_bytes_in_a_cached_slot_are_found() -> None:
    async with cluster("memory://dram-rot", Mode.DUALPATH) as made:
        first, _ = await made.ask(PROMPT, 9)
        await made.stored()
        await made.idle()
        buffer = made.engines["decode-0"].plane.manager.buffer
        for slot, _ in buffer._pool.cached.items():
            buffer.view(slot)[:8] = bytes(8)
        status, body = await made.post([*PROMPT, *first], 5)
        assert status != 200
        assert "is wrong in" in body["error"]["message"]


async def test_a_restarted_router_is_notified_of_all_cached_blocks(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        await two_turns(made)
        await updated(made)
        keys = made.service.scheduler.cached._engines["decode-0"].buffer._keys
        assert len(keys) > HIT_BLOCKS
        manager = made.engines["decode-0"].plane.manager
        manager.end_session("the router is gone")
        keys.clear()
        manager.handle(Registered())
        await updated(made)


async def test_a_router_with_caching_disabled_gets_an_empty_buffer(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        await two_turns(made)
        manager = made.engines["decode-0"].plane.manager
        assert manager.report().load.cached_buffer_tokens > 0
        manager.end_session("the router is gone")
        manager.handle(Registered(enable_caching=False))
        assert manager.report().load.cached_buffer_tokens == 0
        assert manager.buffer.free == manager.buffer.capacity
        assert manager.settings.role is Role.DECODE


async def test_blocks_evicted_in_a_pause_are_fetched_for_the_next_turn() -> None:
    async with cluster(
        "memory://dram-off-sessions", Mode.DUALPATH, router=RouterSettings(dram_tier=False)
    ) as made:
        plain_first, plain_second, _ = await two_turns(made)
    async with cluster(
        "memory://dram-sessions",
        Mode.DUALPATH,
        decode=1,
        buffer_bytes=30 * GEOMETRY.full_block_bytes,
    ) as made:
        manager = made.engines["decode-0"].plane.manager
        first, _ = await made.ask(PROMPT, 9, session_id="paused")
        assert first == plain_first
        await made.stored()
        for other in range(50, 53):
            await made.ask([other, *PROMPT], 9)
            await made.stored()
        await made.idle()
        assert total(made, Counter.DRAM_EVICTED_BLOCKS) > 0
        assert await made.service.hint_session("", "paused", SessionHints(next_turn_s=0.0))

        def back() -> bool:
            return manager.report().counters[Counter.DRAM_FETCHED_BLOCKS.value] == HIT_BLOCKS

        await made.arrivals.until(back, GUARD_S)
        await updated(made)
        hits, read_bytes = (
            total(made, Counter.DRAM_HIT_BLOCKS),
            total(made, Counter.STORAGE_READ_BYTES),
        )
        second, found = await made.ask([*PROMPT, *first, 7, 8], 5)
        assert (second, found) == (plain_second, HIT_BLOCKS * GEOMETRY.block_tokens)
        assert total(made, Counter.DRAM_HIT_BLOCKS) == hits + HIT_BLOCKS
        assert total(made, Counter.STORAGE_READ_BYTES) == read_bytes
        await made.idle()
        assert made.counts(1) == 0
