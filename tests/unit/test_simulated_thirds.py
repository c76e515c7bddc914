"""Third decode engines in simulated clusters, a quarter of which have them."""

from collections import Counter

import pytest

from dualpath.core.control import ReserveThird
from dualpath.engine.control.traffic_manager import TrafficManager
from dualpath.router.scheduler.attempt import EngineAttempt
from dualpath_lab.faults.simulation.adversary import FAULT_KINDS, Adversary
from dualpath_lab.faults.simulation.cluster import Cluster
from dualpath_lab.faults.simulation.planted_bugs import planted
from dualpath_lab.faults.simulation.run import run_seed

#: Clusters in which third engines grant, refuse and die.
SEEDS = (75, 76, 78, 84, 186, 188, 90, 95, 96, 97, 98)


def test_third_engines_grant_refuse_and_die_between_grant_read_and_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[str] = Counter()
    reserve, restart = TrafficManager._reserve_third, Cluster.restart_engine

    def reserved(self: TrafficManager, message: ReserveThird) -> None:
        reserve(self, message)
        granted = not self.active.is_released(message.request_id)
        if granted and message.cached_blocks:
            seen["cached"] += 1
        seen["granted" if granted else "refused"] += 1

    def killed(self: Cluster, engine_id: str, after_s: float) -> None:
        attempts = self.router.service.scheduler.exchange.all() if self.router.serves else ()
        for attempt in attempts:
            if isinstance(attempt, EngineAttempt) and engine_id in attempt.thirds:
                seen["in loads" if hasattr(attempt, "_done") else "before the PE"] += 1
        restart(self, engine_id, after_s)

    monkeypatch.setattr(TrafficManager, "_reserve_third", reserved)
    monkeypatch.setattr(Cluster, "restart_engine", killed)
    kinds = [kind for kind in FAULT_KINDS if kind.begin is Adversary.end_third]
    for seed in SEEDS:
        outcome = run_seed(seed, kinds=kinds)
        assert not outcome.problems, "\n".join(outcome.story)
    assert seen["granted"] > 40
    assert min(seen[what] for what in ("cached", "refused", "in loads", "before the PE")) > 0


@pytest.mark.parametrize("name", ["third-freed-early", "third-unconfirmed", "refused-third-holds"])
def test_planted_bugs_of_third_engines_are_found_without_faults(name: str) -> None:
    with planted(name):
        assert any(run_seed(seed, kinds=()).problems for seed in SEEDS)
