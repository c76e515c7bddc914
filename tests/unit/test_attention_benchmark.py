"""Attention times of passes: read from traces, their error, and their balance in a group."""

import json
from pathlib import Path

import pytest

from dualpath.engine.passes.attention_times import AttentionTimes
from dualpath.engine.trace import TraceRecorder
from dualpath_lab.benchmarks.attention_times import (
    AttentionSettings,
    TracedPass,
    agents_of,
    balance_numbers,
    error_numbers,
    modelled_sparse,
    steps_of,
    traced_passes,
)


def traced(end_s: float, measured_s: float, predicted_s: float = 0.0) -> TracedPass:
    """A pass of 1 s."""
    return TracedPass(end_s, 1.0, predicted_s, measured_s)


def test_passes_are_read_from_an_engines_trace_in_order(tmp_path: Path) -> None:
    trace = TraceRecorder(str(tmp_path / "pe-0.json"), "pe-0")
    times = AttentionTimes(trace)
    times.passed(0.3, 0.2, 5_000_000_000, 6_000_000_000)
    times.passed(0.1, 0.2, 1_000_000_000, 3_000_000_000)
    trace.record("begin", "pass", 0, 1)
    trace.write()
    assert len(json.loads((tmp_path / "pe-0.json").read_text())["traceEvents"]) == 3
    assert traced_passes(tmp_path / "pe-0.json") == [
        TracedPass(3.0, 2.0, 0.1, 0.2),
        TracedPass(6.0, 1.0, 0.3, 0.2),
    ]


def test_the_error_is_the_mean_and_a_percentile_over_passes() -> None:
    passes = [traced(0.0, 1.0, 1.1)] * 99 + [traced(0.0, 1.0, 0.5)]
    numbers = error_numbers(passes)
    assert numbers["error_mean"] == pytest.approx(0.104)
    assert numbers["error_p95"] == pytest.approx(0.1)
    assert numbers["predicted_share"] == pytest.approx((99 * 1.1 + 0.5) / 100)
    # The machine was twice as fast when passes were timed: the form of the prediction is right.
    faster = error_numbers([traced(0.0, 1.0, 0.5), traced(0.0, 3.0, 1.5)])
    assert (faster["error_mean"], faster["form_mean"]) == (0.5, 0.0)


def test_passes_of_ranks_that_end_together_are_one_pass_of_the_group() -> None:
    first = [traced(1.0, 0.2), traced(2.0, 0.4), traced(4.0, 0.3)]
    second = [traced(1.01, 0.4), traced(3.0, 0.5), traced(3.99, 0.3)]
    assert steps_of([first, second]) == [
        [first[0], second[0]],
        [first[1], None],
        [None, second[1]],
        [first[2], second[2]],
    ]
    numbers = balance_numbers([first, second])
    assert (numbers["steps"], numbers["full_steps"]) == (4, 2)
    assert numbers["ratio_mean"] == pytest.approx((0.4 / 0.3 + 1.0) / 2)
    assert balance_numbers([first, []]) == {"steps": 3, "full_steps": 0}


def test_one_throughput_for_attention_and_indexer_errs_little_on_the_papers_turns() -> None:
    passes = modelled_sparse()
    assert len(passes) > 1000
    assert 0.0 < error_numbers(passes)["error_mean"] < 0.1


def test_agents_are_the_same_for_equal_settings() -> None:
    settings = AttentionSettings(agents=3, turns=2, append=(10, 20))
    rounds = [agent.trajectory.rounds for agent in agents_of(settings)]
    assert rounds == [agent.trajectory.rounds for agent in agents_of(settings)]
    assert all(10 <= one.append_tokens <= 20 for each in rounds for one in each)
