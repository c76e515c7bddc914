"""A trainer changes the weights of engines in simulated clusters, a twelfth of which have one."""

from collections import Counter

import pytest
from tests.fault_stories import of

from dualpath.router.scheduler.registry import Registry
from dualpath_lab.faults.simulation.engine import SimEngine
from dualpath_lab.faults.simulation.planted_bugs import planted
from dualpath_lab.faults.simulation.run import run_seed
from dualpath_lab.faults.simulation.settings import has_trainer

TRAINED = [seed for seed in range(160) if has_trainer(seed)]


def test_all_requests_are_answered_while_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    change, note = SimEngine._change_weights, Registry._note_outdated

    def changed(self: SimEngine, weights: str) -> None:
        seen["changes"] += 1
        change(self, weights)

    def noted(self: Registry, hello) -> None:
        seen["refused"] += 1
        note(self, hello)

    monkeypatch.setattr(SimEngine, "_change_weights", changed)
    monkeypatch.setattr(Registry, "_note_outdated", noted)
    for seed in TRAINED[:6]:
        outcome = run_seed(seed, kinds=())
        assert not outcome.problems, "\n".join(outcome.story)
        assert outcome.answered == outcome.requests > 0
    assert seen["changes"] > 10
    assert seen["refused"] > 10


@pytest.mark.parametrize(
    "fault", ["kill an engine", "stop an engine", "kill the router", "slow storage"]
)
def test_faults_during_an_update_mix_no_weights(fault: str) -> None:
    for seed in TRAINED[:4]:
        outcome = run_seed(seed, kinds=of(fault))
        assert not outcome.problems, "\n".join(outcome.story)


def test_a_seed_gives_the_same_run_again() -> None:
    assert run_seed(TRAINED[0]).digest == run_seed(TRAINED[0]).digest


@pytest.mark.parametrize("name", ["weights-unnamed", "weights-mixed", "chains-outlive-weights"])
def test_planted_bugs_of_weights_are_found(name: str) -> None:
    with planted(name):
        assert any(run_seed(seed).problems for seed in TRAINED)
