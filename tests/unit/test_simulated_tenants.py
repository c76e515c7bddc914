"""Simulated tenants: agents with cache salts that send the same prompts, and their quotas."""

from collections import Counter

import pytest
from tests.fault_stories import finds

from dualpath.core.blocks import tenant_tag
from dualpath.storage.maintenance import StorageMaintenance
from dualpath.storage.quotas import Refusal
from dualpath_lab.faults.simulation.run import run_seed
from dualpath_lab.faults.simulation.settings import drawn_settings
from dualpath_lab.faults.simulation.world import World

#: In every fifth cluster agents belong to several tenants.
TENANTS = range(3, 303, 5)
LIMITED = [s for s in TENANTS if drawn_settings(World(s), 0, 1.0).tenant_quota_blocks]


def test_only_the_tenant_with_most_blocks_is_refused_and_all_requests_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: Counter[str] = Counter()
    admitted = StorageMaintenance.admitted

    def counted(self, keys, origin, block_bytes):
        count, refusal = admitted(self, keys, origin, block_bytes)
        refused[origin.tenant] += refusal is Refusal.QUOTA
        return count, refusal

    monkeypatch.setattr(StorageMaintenance, "admitted", counted)
    for seed in LIMITED[:12]:
        outcome = run_seed(seed, kinds=())
        assert not outcome.problems, "\n".join(outcome.story)
        assert outcome.answered == outcome.requests
    assert refused[tenant_tag("red")] > 20
    assert refused[tenant_tag("blue")] < refused[tenant_tag("red")] / 5


def test_tenants_survive_faults_and_equal_seeds_give_equal_runs() -> None:
    for seed in TENANTS[:6]:
        outcome = run_seed(seed)
        assert not outcome.problems, "\n".join(outcome.story)
        assert run_seed(seed).digest == outcome.digest


@pytest.mark.parametrize(
    ("name", "seeds", "first"),
    [
        ("salt-ignored", TENANTS, None),
        ("hits-unsalted", TENANTS, None),
        ("quota-of-another", LIMITED, 278),
        ("charged-to-another", LIMITED, None),
        ("tenant-unlimited", LIMITED, None),
    ],
)
def test_planted_bugs_of_tenants_are_found(
    name: str, seeds: range | list[int], first: int | None
) -> None:
    assert finds(name, seeds, "slow storage", first=first)
