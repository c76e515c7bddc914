"""Emulated engines serve from a storage with a quota and a janitor; every byte is compared."""

from pathlib import Path

import pytest
from tests.emulated_cluster import GEOMETRY, Cluster, cluster
from tests.guard import GUARD_S

from dualpath.core.modes import Mode
from dualpath.engine.counters import Counter
from dualpath.engine.io import storage_maintenance
from dualpath.router.settings import RouterSettings
from dualpath.storage.block_file import HEADER_BYTES

BLOCK_BYTES = HEADER_BYTES + GEOMETRY.full_block_bytes
QUOTA_BLOCKS = 24
#: 12 Full Blocks of 4 tokens, and a token, each.
PROMPTS = [[number, *range(1, 49)] for number in range(1, 5)]


@pytest.fixture(autouse=True)
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the janitors run continuously."""
    monkeypatch.setattr(storage_maintenance, "BEAT_S", 0.01)


def removed(made: Cluster) -> float:
    name = Counter.STORAGE_EVICTED_BLOCKS.value
    reports = [state.report for state in made.service.registry.all()]
    return sum(report.counters.get(name, 0) for report in reports if report is not None)


def lying(storage: Path) -> int:
    return len(list(storage.rglob("*.kv")))


async def test_answers_do_not_change_while_the_janitor_limits_storage(tmp_path: Path) -> None:
    storage = tmp_path / "kv"
    async with cluster(
        storage,
        Mode.DUALPATH,
        storage_quota=QUOTA_BLOCKS * BLOCK_BYTES,
        storage_protect_s=0.0,
    ) as made:
        first = []
        for prompt in PROMPTS:
            first.append(await made.ask(prompt, 8, cache_salt="tenant"))
            await made.stored()
        assert [hits for _, hits in first] == [0] * len(PROMPTS)
        await made.arrivals.until(lambda: removed(made) > 0, GUARD_S)
        again = [await made.ask(prompt, 8, cache_salt="tenant") for prompt in PROMPTS]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
        await made.stored()
        await made.idle()
        assert made.counts(1) == 0
        assert made.service.metrics.retries == 0
        assert lying(storage) <= QUOTA_BLOCKS


async def test_blocks_removed_after_placement_are_recomputed_and_counted(tmp_path: Path) -> None:
    storage = tmp_path / "kv"
    router = RouterSettings(mode=Mode.DUALPATH, dram_tier=False)
    async with cluster(storage, Mode.DUALPATH, router=router, storage_quota=1 << 30) as made:
        first, _ = await made.ask(PROMPTS[0], 8)
        await made.stored()
        known = await made.ask(PROMPTS[0], 8)
        assert known == (first, 48)
        for path in storage.rglob("*.kv"):
            path.unlink()
        promised, _ = await made.ask(PROMPTS[0], 8)
        assert promised == first
        assert made.service.metrics.recomputed_tokens == 48
        await made.stored()
        assert await made.ask(PROMPTS[0], 8) == (first, 48)
        await made.idle()
        assert made.counts(1) == 0


@pytest.mark.parametrize(
    "quota", ["storage_quota", "storage_namespace_quota", "storage_tenant_quota"]
)
async def test_a_full_quota_declines_new_blocks_and_serves(tmp_path: Path, quota: str) -> None:
    storage = tmp_path / "kv"
    async with cluster(
        storage,
        Mode.DUALPATH,
        prefill=1,
        decode=1,
        **{quota: QUOTA_BLOCKS * BLOCK_BYTES},  # type: ignore[arg-type]
    ) as made:
        name = Counter.STORAGE_REFUSED_BLOCKS.value

        def updated() -> bool:
            reports = [state.report for state in made.service.registry.all()]
            return all(report is not None and report.storage is not None for report in reports)

        await made.arrivals.until(updated, GUARD_S)
        for prompt in PROMPTS:  # all blocks are protected
            await made.ask(prompt, 8)
            await made.stored()
        assert lying(storage) == QUOTA_BLOCKS

        def refused() -> float:
            reports = [state.report for state in made.service.registry.all()]
            return sum(report.counters.get(name, 0) for report in reports if report is not None)

        await made.arrivals.until(lambda: refused() > 0, GUARD_S)
        assert removed(made) == 0
        dropped = [
            engine.plane.manager.counters.snapshot()[Counter.PERSIST_DROPPED_BLOCKS.value]
            for engine in made.engines.values()
        ]
        assert dropped == [0, 0]
        await made.idle()
        assert made.counts(1) == 0
