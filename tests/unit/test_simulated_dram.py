"""DRAM of simulated engines: blocks retained during tool calls, and blocks shared by engines."""

from collections import Counter

import msgspec
import pytest
from tests.fault_stories import finds

from dualpath.engine.io.read_queue import ReadQueue
from dualpath.policy.decode import TwoPhaseDecodePlacer
from dualpath.policy.placement import KvWait
from dualpath.storage.node_dram import NodeDram
from dualpath_lab.faults.simulation import run
from dualpath_lab.faults.simulation.adversary import FAULT_KINDS
from dualpath_lab.faults.simulation.run import run_seed
from dualpath_lab.faults.simulation.settings import ClusterSettings, drawn_settings
from dualpath_lab.faults.simulation.world import World

#: Two of five clusters have agents with tool calls, one of these also DRAM shared by engines.
PAUSING, SHARING = range(4, 305, 5), range(2, 303, 5)


@pytest.mark.long
def test_agents_kv_is_prefetched_and_engines_share_blocks_that_one_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[str] = Counter()
    fetch_one, read = ReadQueue._fetch_one, NodeDram.read

    def fetched(self: ReadQueue, *args: object) -> None:
        seen["prefetched"] += 1
        fetch_one(self, *args)  # type: ignore[arg-type]

    def shared(self: NodeDram, *args: object, **more: object) -> object:
        found = read(self, *args, **more)  # type: ignore[arg-type]
        seen["shared"] += found is not None
        return found

    monkeypatch.setattr(ReadQueue, "_fetch_one", fetched)
    monkeypatch.setattr(NodeDram, "read", shared)
    for seed in (*PAUSING[:10], *SHARING[:10]):
        outcome = run_seed(
            seed, kinds=[kind for kind in FAULT_KINDS if kind.name == "slow storage"]
        )
        assert not outcome.problems, "\n".join(outcome.story)
    assert seen["prefetched"] > 5
    assert seen["shared"] > 5


def test_requests_wait_for_the_engine_that_caches_them_whatever_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HBM for about one request, and storage so slow that a wait is better than a read."""
    waits: list[KvWait] = []
    drawn, worth_waiting = drawn_settings, TwoPhaseDecodePlacer._worth_waiting

    def little_hbm(world: World, faults: int, deadline_s: float) -> ClusterSettings:
        settings = drawn(world, faults, deadline_s)
        router = msgspec.structs.replace(
            settings.router, alpha_tokens=4, dram_tier=True, recompute_limit_s=0.0
        )
        return msgspec.structs.replace(settings, decode=2, hbm_blocks=18, router=router)

    def counted(self: TwoPhaseDecodePlacer, *args: object) -> KvWait | None:
        wait = worth_waiting(self, *args)  # type: ignore[arg-type]
        waits.extend([wait] if wait is not None else [])
        return wait

    monkeypatch.setattr(run, "drawn_settings", little_hbm)
    monkeypatch.setattr(TwoPhaseDecodePlacer, "_worth_waiting", counted)
    for seed in (111, 128, 137, 147, 154, 159, 175, 176, 191, 192, 198):
        outcome = run_seed(seed)
        assert not outcome.problems, "\n".join(outcome.story)
    assert len(waits) > 10


@pytest.mark.parametrize(
    ("name", "fault", "seeds"),
    [
        ("retention-unending", "slow storage", PAUSING),
        ("prefetched-over-cached", "slow storage", PAUSING),
        ("prefetched-unverified", "rotting storage", PAUSING),
        ("shared-unverified", "slow storage", SHARING),
        ("shared-in-part", "slow storage", SHARING),
        ("shared-unbounded", "slow storage", SHARING),
    ],
)
def test_planted_bugs_of_dram_are_found(name: str, fault: str, seeds: range) -> None:
    assert finds(name, seeds, fault)
