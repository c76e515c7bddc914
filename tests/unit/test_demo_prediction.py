"""The simulator with the demo's parameters predicts the demo's measurements."""

import statistics

import pytest

from dualpath.policy.batching import AttentionGeometry
from dualpath.workload.conversation.prompts import approximate_encode
from dualpath_lab.benchmarks import demo_prediction
from dualpath_lab.demo.settings import COMPUTE_QUOTA_S

#: Assumed speed of a CPU engine (``vllm.quota_scheduler``, which needs vLLM), SmolLM2-135M.
ASSUMED_FLOPS_PER_S = 4e10
ATTENTION = AttentionGeometry.from_heads(30, 9, 64, 64)

RUNS = demo_prediction.read_recorded()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.trace)
def test_ratio_of_the_demo_is_predicted_within_15_percent(run):
    cluster, model = demo_prediction.read_setting()
    predicted = demo_prediction.predict_run(cluster, model, run, orders=demo_prediction.FEW_ORDERS)
    assert predicted.ratio == pytest.approx(run.ratio, rel=0.15)
    for mode in demo_prediction.MODES:
        jct_s = statistics.median(predicted.values(mode, "jct_s"))
        assert jct_s == pytest.approx(run.measured[mode].jct_s, rel=0.15)


def test_quota_of_the_cluster_file_admits_the_pairs_that_the_demo_admits():
    cluster, model = demo_prediction.read_setting()
    pairs = COMPUTE_QUOTA_S * ASSUMED_FLOPS_PER_S / ATTENTION.pair_flops
    assert cluster.compute_quota_s / model.prefill.pair_s == pytest.approx(pairs, rel=0.01)


@pytest.mark.parametrize("pace", [0.25, 1.0, 4.0])
def test_the_demo_shows_a_clear_gain_on_fast_and_slow_machines(pace):
    pytest.importorskip("agentperf_local", reason="the demo's sessions are not installed")
    cluster, model = demo_prediction.read_setting()
    agents = demo_prediction.demo_agents(approximate_encode)
    assert agents.hit_tokens.sum() >= 0.9 * agents.prompt_tokens.sum()

    predicted = demo_prediction.predict_demo(cluster, model, agents, pace=pace, orders=8)

    assert predicted.ratio >= 1.7
    assert predicted.share >= 0.6
