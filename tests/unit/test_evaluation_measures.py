"""The termination rule of §7.4, capacity, and the measures of balance."""

from typing import Any

import numpy as np
import pytest
from tests.unit.evaluation_fakes import ROUNDS, SPEED_S, FakeInputs, FakeSimulator

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath_sim.evaluation.runs import (
    LOOKBACK_S,
    WINDOW_S,
    Balance,
    EndRule,
    Runs,
    agents_until,
    attention_balance,
    ending,
    measured,
    online_run,
    snic_balance,
    tail_begins_s,
    timeline,
)
from dualpath_sim.evaluation.serving import meets_slo, online_spec, sweep
from dualpath_sim.evaluation.settings import DS_660B, EvaluationSettings, RunSpec
from dualpath_sim.simulator.result import NS_PER_S, Batches, LinkUse, SimulationResult

every_second = np.arange(0.5, 7200.0, dtype=np.float64)


def simulated(**spec: Any) -> SimulationResult:
    run = RunSpec(system=DS_660B, mode=Mode.DUALPATH, **spec)
    inputs = FakeInputs()
    agents = inputs.agents(run, 1)
    return FakeSimulator()(inputs.setup(run), agents, until_s=run.until_s, window_s=1.0)


def test_a_steady_system_ends_as_soon_as_half_an_hour_can_be_looked_back() -> None:
    end = ending(every_second, np.full(every_second.size, 1.0), 7200.0)
    assert end.rule == "steady"
    assert end.at_s == WINDOW_S + LOOKBACK_S


def test_a_rule_with_other_times_ends_when_those_have_passed() -> None:
    rule = EndRule(ttft_limit_s=0.5, window_s=20.0, lookback_s=30.0)
    assert ending(every_second, np.full(every_second.size, 0.4), 900.0, rule).at_s == 50.0
    end = ending(every_second, np.full(every_second.size, 0.6), 900.0, rule)
    assert (end.rule, end.at_s) == ("TTFT above limit", 20.0)


def test_an_overloaded_system_ends_when_the_mean_of_the_window_passes_the_limit() -> None:
    ttft_s = every_second / 100
    end = ending(every_second, ttft_s, 7200.0)
    assert end.rule == "TTFT above limit"
    window = (every_second > end.at_s - WINDOW_S) & (every_second <= end.at_s)
    assert ttft_s[window].mean() > 4.0
    assert ttft_s[window].mean() - 1 / 100 <= 4.0


def test_a_slow_answer_before_the_first_full_window_does_not_end_the_experiment() -> None:
    ttft_s = np.where(every_second < 30, 10.0, 1.0)
    assert ending(every_second, ttft_s, 7200.0).rule == "steady"


def test_a_system_that_neither_fails_nor_settles_ends_at_the_horizon() -> None:
    end = ending(every_second, 0.1 * np.exp(every_second / 3000), 7200.0)
    assert (end.rule, end.at_s) == ("horizon", 7200.0)


def test_the_order_of_rounds_does_not_matter() -> None:
    ttft_s = every_second / 500
    shuffled = np.random.default_rng(0).permutation(every_second.size)
    assert ending(every_second, ttft_s, 7200.0) == ending(
        every_second[shuffled], ttft_s[shuffled], 7200.0
    )


def test_without_any_first_token_nothing_is_decided() -> None:
    nothing = np.zeros(0)
    assert ending(nothing, nothing, 3000.0).rule == "horizon"
    assert measured(nothing, nothing, 3000.0).mean is None


def test_what_happens_after_the_end_changes_nothing() -> None:
    long = ending(every_second, every_second / 1000, 7200.0)
    early = every_second[every_second <= long.at_s]
    assert ending(early, early / 1000, long.at_s) == long


def test_the_last_window_is_measured_with_its_fluctuation() -> None:
    at_s = np.arange(0.0, 300.0, dtype=np.float64)
    values = np.where(at_s < 150, 100.0, np.where(at_s < 200, 1.0, 2.0))
    last = measured(at_s, values, 299.0)
    assert (last.low, last.high) == (1.0, 2.0)
    assert last.mean == pytest.approx((50 * 1 + 100 * 2) / 150, rel=0.01)


def test_the_parts_of_ttft_add_up_to_it() -> None:
    run = online_run(
        simulated(agents=agents_until(0.2, 3000.0), agents_per_s=0.2, until_s=3000.0), 3000.0
    )
    assert run.ttft.mean is not None
    assert sum(run.ttft_parts) == pytest.approx(run.ttft.mean, rel=1e-6)
    assert run.meets_slo


def test_the_working_set_is_rate_times_completion_times_half_the_tokens() -> None:
    run = online_run(
        simulated(agents=agents_until(0.2, 3000.0), agents_per_s=0.2, until_s=3000.0), 3000.0
    )
    assert run.agent_jct is not None
    assert run.total_tokens_mean == ROUNDS * 400
    expected = 0.2 * run.agent_jct * ROUNDS * 400 / 2 * 40_000
    assert run.working_set_bytes(0.2) == pytest.approx(expected)


def test_enough_agents_are_made_to_arrive_until_the_end() -> None:
    spec = RunSpec(
        system=DS_660B, mode=Mode.BASIC, agents=agents_until(0.1, 7200.0), agents_per_s=0.1
    )
    for seed in range(20):
        assert FakeInputs().agents(spec, seed).start_s[-1] > 7200.0


@pytest.mark.parametrize("capacity", [0.0, 0.03, 0.31, 0.35, 0.999])
def test_capacity_is_found_to_a_hundredth(capacity: float) -> None:
    tried: list[float] = []

    def meets_slo(rate: float) -> bool:
        tried.append(rate)
        return rate <= capacity + 1e-9

    found = sweep(meets_slo, 0.05, 2.0)
    assert found.capacity == pytest.approx(np.floor(capacity * 100 + 1e-9) / 100)
    assert found.grid_capacity <= found.capacity
    assert not found.capped
    assert len(set(tried)) == len(tried)


def test_a_cheaper_answer_is_taken_where_only_the_answer_counts() -> None:
    asked: list[float] = []

    def quickly(rate: float) -> bool:
        asked.append(rate)
        return rate <= 0.33

    found = sweep(lambda rate: rate <= 0.33, 0.1, 1.0, quickly)
    assert found.capacity == 0.33
    assert asked
    assert set(asked).isdisjoint(found.rates)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.4])
def test_looking_early_gives_the_answer_of_the_whole_experiment(rate: float) -> None:
    runs = Runs(EvaluationSettings(seed=1), FakeInputs(), FakeSimulator())
    for mode in (Mode.BASIC, Mode.DUALPATH):
        spec = online_spec(runs.settings, DS_660B, mode, rate)
        assert meets_slo(runs, spec) == runs.online(spec).meets_slo


def test_a_system_that_meets_the_highest_rate_is_reported_as_capped() -> None:
    found = sweep(lambda rate: True, 0.1, 0.5)
    assert (found.capacity, found.capped, len(found.rates)) == (0.5, True, 5)


def test_equal_traffic_is_perfect_balance_and_empty_windows_do_not_count() -> None:
    read = np.array([[1.0, 1, 1], [0, 0, 0], [3, 0, 0]])
    balance = snic_balance(LinkUse(NS_PER_S, read, np.zeros_like(read), read), 1.0)
    assert balance.ratio.tolist() == [1.0, 3.0]
    assert balance.time_s.tolist() == [0.0, 2.0]
    assert balance.mean(2.0) == 1.0
    assert balance.mean(0.0) is None


def test_half_of_all_reads_on_a_third_of_the_nodes_is_one_and_a_half() -> None:
    read = np.tile([2.0, 1.0, 1.0], (10, 1))
    balance = snic_balance(LinkUse(NS_PER_S, read, np.zeros_like(read), read), 5.0)
    assert balance.ratio.tolist() == [1.5, 1.5]


def test_a_window_that_was_not_recorded_is_refused() -> None:
    read = np.ones((4, 2))
    with pytest.raises(ConfigError, match=r"window of 1\.5 s.*multiple"):
        snic_balance(LinkUse(NS_PER_S, read, read, read), 1.5)


def test_attention_is_compared_per_pass_and_idle_passes_are_left_out() -> None:
    zeros = np.zeros(3, np.int64)
    start_ns = np.array([0, 1, 2]) * NS_PER_S
    most, mean = np.array([0.2, 0.0, 0.3]), np.array([0.1, 0.0, 0.3])
    balance = attention_balance(Batches(start_ns, start_ns, zeros, zeros, most, mean))
    assert balance.ratio.tolist() == [2.0, 1.0]


def test_a_curve_is_thinned_to_means() -> None:
    balance = Balance(np.array([0.0, 1.0, 9.0]), np.array([1.0, 3.0, 5.0]))
    middle, means = balance.binned(2, 10.0)
    assert middle == (2.5, 7.5)
    assert means == (2.0, 5.0)


def test_the_tail_begins_when_less_than_the_share_of_agents_is_left() -> None:
    result = simulated(agents=100)
    last = result.agents.first_round[1:] - 1
    finished = np.arange(1, 101) * NS_PER_S
    result.turns.finished_ns[last] = finished
    begins_s = tail_begins_s(result, 0.5)
    assert (finished > begins_s * NS_PER_S).sum() < 50
    assert (finished >= begins_s * NS_PER_S).sum() == 50


def test_the_timeline_conserves_tokens_and_ends_empty() -> None:
    result = simulated(agents=40)
    line = timeline(result, 60)
    width_s = line.time_s[1] - line.time_s[0]
    prompts = sum(line.prompt_tokens_per_s) * width_s
    assert prompts == pytest.approx(result.agents.prompt_tokens.sum())
    stages = (line.queued, line.reading, line.prefilling, line.decoding)
    assert all(min(stage) >= 0 and stage[-1] == 0 for stage in stages)


def test_a_round_takes_the_time_of_the_fake() -> None:
    result = simulated(agents=100)
    assert result.ttft_s() == pytest.approx(SPEED_S[Mode.DUALPATH] * 100 / 2)
