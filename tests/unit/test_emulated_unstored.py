"""Blocks that only DRAM has: storage was full when they were written, or has removed them since."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.emulated_cluster import GEOMETRY, Cluster, cluster
from tests.guard import GUARD_S
from tests.unit.test_emulated_dram import (
    HIT_BLOCKS,
    PROMPT,
    SHARED_BYTES,
    total,
    two_turns,
    updated,
)

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, block_keys
from dualpath.core.errors import StorageError
from dualpath.core.modes import Mode
from dualpath.engine.counters import Counter
from dualpath.policy.event_log import assignments, difference
from dualpath.router.hit_account import GONE
from dualpath.router.scheduler.event_recorder import read_event_log
from dualpath.router.settings import RouterSettings
from dualpath.storage.contract import BlockStorage, WriteOutcome
from dualpath.storage.wrapping import WrappingStorage
from dualpath_lab.emulated.settings import part_geometry

HIT_TOKENS = HIT_BLOCKS * GEOMETRY.block_tokens


class Disk:
    """A device that all engines of a cluster mount; while it is full every write fails."""

    def __init__(self) -> None:
        self.full = True

    def mount(self, opened: BlockStorage) -> BlockStorage:
        return _Mounted(opened, self)


class _Mounted(WrappingStorage):
    def __init__(self, inner: BlockStorage, disk: Disk) -> None:
        super().__init__(inner)
        self._disk = disk

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> WriteOutcome:
        if self._disk.full and keys:
            raise StorageError("no space left on device")
        return super().write(keys, sources, origin)


def missed(made: Cluster, reason: str) -> float:
    """Tokens that prompts missed for a reason."""
    registry = made.service.metrics.registry
    return registry.get_sample_value("dualpath:missed_tokens_total", {"reason": reason}) or 0


def stored_blocks(made: Cluster, keys: Sequence[BlockKey]) -> int:
    """Blocks of a chain that storage has, whatever engines remember of it."""
    manager = made.engines["decode-0"].plane.manager
    disk = manager._storage.inner
    return sum(disk.is_stored(key) for key in keys)


async def first_turn(made: Cluster) -> list[int]:
    """Return the prompt of the second turn, all full blocks of which decode-0 or a PE may cache."""
    answer, _ = await made.ask(PROMPT, 9, cache_salt="one")
    await made.stored()
    await made.idle()
    await updated(made)
    return [*PROMPT, *answer, 7, 8]


async def plain_turns(mode: Mode = Mode.DUALPATH) -> tuple[list[int], list[int]]:
    """Return the answers of two turns of a cluster that has never cached anything."""
    async with cluster(
        f"memory://unstored-{mode}", mode, router=RouterSettings(mode=mode, dram_tier=False)
    ) as made:
        first, second, _ = await two_turns(made)
        return first, second


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.SPLIT, Mode.ROUND_ROBIN])
async def test_with_a_full_disk_a_turn_hits_what_its_decode_engine_caches(
    mode: Mode, tmp_path: Path
) -> None:
    disk, log = Disk(), tmp_path / "events.jsonl"
    router = RouterSettings(mode=mode, event_log=str(log))
    expected = await plain_turns(mode)
    async with cluster(tmp_path / "kv", mode, router=router, wrap_storage=disk.mount) as made:
        prompt = await first_turn(made)
        second, hits = await made.ask(prompt, 5, cache_salt="one")
        assert (prompt[len(PROMPT) : -2], second) == expected
        assert hits == HIT_TOKENS
        assert total(made, Counter.STORAGE_READ_BYTES) == 0
        assert total(made, Counter.VERIFY_FAILURES) == 0
        assert made.counts(1) == 0
        assert made.service.metrics.recomputed_tokens == missed(made, GONE) == 0
        (_, note) = made.service.status()["assignments"]
        assert (note["hit_tokens"], note["reads"]) == (
            HIT_TOKENS,
            [{"side": "decode", "first_token": 0, "tokens": HIT_TOKENS}],
        )
        await made.stored()

        disk.full = False
        third_prompt = [*prompt, *second, 9]
        await made.ask(third_prompt, 3, cache_salt="one")
        await made.stored()
        keys = block_keys(third_prompt, GEOMETRY.block_tokens, cache_salt="one")
        assert stored_blocks(made, keys) == len(keys), "the chain has no gap"
        await made.idle()
    recorded = read_event_log(log)
    assert difference(recorded) is None
    assert [a.unstored_tokens for a in assignments(recorded)[:2]] == [0, HIT_TOKENS]


async def test_a_model_with_window_layers_hits_them_too(tmp_path: Path) -> None:
    """Its third layer sees six tokens: only whole blocks are cached, and written again."""
    geometry = part_geometry("16*2,16@6,16", GEOMETRY.block_tokens)
    disk = Disk()
    async with cluster(
        tmp_path / "kv", Mode.SPLIT, geometry=geometry, wrap_storage=disk.mount
    ) as made:
        prompt = await first_turn(made)
        second, hits = await made.ask(prompt, 5, cache_salt="one")
        assert hits == HIT_TOKENS
        await made.stored()
        disk.full = False
        await made.ask([*prompt, *second, 9], 3, cache_salt="one")
        await made.stored()
        await made.idle()
        keys = block_keys(prompt, GEOMETRY.block_tokens, cache_salt="one")
        assert stored_blocks(made, keys) == len(keys)
        assert made.counts(1) == 0


async def test_at_another_decode_engine_they_are_computed(tmp_path: Path) -> None:
    _, plain = await plain_turns()
    async with cluster(tmp_path / "kv", Mode.DUALPATH, decode=2, wrap_storage=Disk().mount) as made:
        prompt = await first_turn(made)
        (note,) = made.service.status()["assignments"]
        assert made.service.scheduler.pause_engine(note["decode_engine"], paused=True)
        assert await made.ask(prompt, 5, cache_salt="one") == (plain, 0)
        assert missed(made, GONE) == len(PROMPT) // GEOMETRY.block_tokens * GEOMETRY.block_tokens
        assert total(made, Counter.VERIFY_FAILURES) == made.counts(1) == 0
        await made.idle()


@pytest.mark.parametrize("left", [0, 4])
async def test_what_a_decode_engine_has_evicted_meanwhile_is_computed(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router still believes all of it to be cached when it places the request."""
    _, plain = await plain_turns()
    async with cluster(tmp_path / "kv", Mode.DUALPATH, wrap_storage=Disk().mount) as made:
        prompt = await first_turn(made)
        manager = made.engines["decode-0"].plane.manager
        monkeypatch.setattr(manager._tier, "send_changes", lambda: None)
        pool = manager.buffer._pool
        while len(pool.cached) > left:
            pool._free.append(pool.cached.evict())
        assert await made.ask(prompt, 5, cache_salt="one") == (plain, left * GEOMETRY.block_tokens)
        assert total(made, Counter.STORAGE_READ_BYTES) == total(made, Counter.VERIFY_FAILURES) == 0
        assert made.counts(1) == made.service.metrics.recomputed_tokens == 0
        assert made.service.metrics.retries == 0
        await made.idle()


@pytest.mark.parametrize("left", [HIT_BLOCKS, 3])
async def test_a_prefill_engine_has_what_storage_has_lost(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode Layerwise a PE caches what it has read; it may have evicted some of it since."""
    async with cluster(tmp_path / "kv", Mode.LAYERWISE) as made:
        prompt = await first_turn(made)
        plain, hits = await made.ask(prompt, 5, cache_salt="one")
        assert hits == HIT_TOKENS
        await made.stored()
        await made.idle()
        await updated(made)
        read_bytes = total(made, Counter.STORAGE_READ_BYTES)
        for path in (tmp_path / "kv").rglob("*.kv"):
            path.unlink()
        for engine in made.engines.values():
            known = engine.plane.manager._storage._known
            for _ in range(2):  # minutes later: look-ups ask storage again
                known.age()
        made.service.scheduler.chains.clear()  # The scheduler has them ask.
        manager = made.engines["prefill-0"].plane.manager
        monkeypatch.setattr(manager._tier, "send_changes", lambda: None)
        pool = manager.buffer._pool
        while len(pool.cached) > left:
            pool._free.append(pool.cached.evict())
        assert await made.ask(prompt, 5, cache_salt="one") == (plain, left * GEOMETRY.block_tokens)
        assert total(made, Counter.STORAGE_READ_BYTES) == read_bytes
        assert total(made, Counter.VERIFY_FAILURES) == made.counts(1) == 0
        await made.stored()
        keys = block_keys(prompt, GEOMETRY.block_tokens, cache_salt="one")
        assert stored_blocks(made, keys) == len(keys), "they are written again"
        await made.idle()


async def test_a_node_has_what_storage_has_lost(tmp_path: Path) -> None:
    """Other engines, with empty buffers: only the DRAM that their node shares has the blocks."""
    shared: dict[str, Any] = {"dram_dir": str(tmp_path / "dram"), "dram_bytes": SHARED_BYTES}
    async with cluster(tmp_path / "kv", Mode.SPLIT, **shared) as made:
        first, second, _ = await two_turns(made)
    prompt = [*PROMPT, *first, 7, 8]
    keys = block_keys(prompt, GEOMETRY.block_tokens, cache_salt="one")[:HIT_BLOCKS]
    for path in (tmp_path / "kv").rglob("*.kv"):
        path.unlink()
    async with cluster(tmp_path / "kv", Mode.SPLIT, **shared) as made:
        shares = made.service.scheduler.cached
        await made.arrivals.until(lambda: shares.shared("decode-0", keys) == HIT_BLOCKS, GUARD_S)
        assert await made.ask(prompt, 5, cache_salt="one") == (second, HIT_TOKENS)
        shared_bytes = HIT_BLOCKS * GEOMETRY.full_block_bytes
        assert total(made, Counter.NODE_DRAM_READ_BYTES) == shared_bytes
        assert total(made, Counter.STORAGE_READ_BYTES) == made.counts(1) == 0
        await made.stored()
        assert stored_blocks(made, keys) == len(keys), "they are written again"
        await made.idle()
        shutil.rmtree(tmp_path / "dram")
