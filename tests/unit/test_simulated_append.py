"""Appends at decode engines in simulated clusters, most of which have them."""

from collections import Counter

import pytest
from tests.fault_stories import finds

from dualpath.router.scheduler.attempt import EngineAttempt
from dualpath_lab.faults.simulation.adversary import FAULT_KINDS
from dualpath_lab.faults.simulation.run import run_seed


def test_appends_are_computed_and_hits_that_they_need_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[str] = Counter()
    check = EngineAttempt._check_whole

    def checked(self: EngineAttempt, hit_blocks: int, short: str | None) -> None:
        seen["whole" if short is None else "lost"] += 1
        check(self, hit_blocks, short)

    monkeypatch.setattr(EngineAttempt, "_check_whole", checked)
    kinds = [kind for kind in FAULT_KINDS if kind.name == "rotting storage"]
    for seed in (4, 18, 49, 61, 69):
        outcome = run_seed(seed, kinds=kinds)
        assert not outcome.problems, "\n".join(outcome.story)
    assert seen["whole"] > 5
    assert seen["lost"] >= 1


@pytest.mark.parametrize(
    ("name", "fault", "seeds"),
    [
        ("append-over-lost-hit", "rotting storage", range(59, 70)),
        ("freed-before-copied", "slow storage", range(3)),
    ],
)
def test_planted_bugs_of_appends_are_found(name: str, fault: str, seeds: range) -> None:
    assert finds(name, seeds, fault)
