"""A prefill engine times its own passes at start: with vLLM's types, on a clock of the test."""

from types import SimpleNamespace

import msgspec
import pytest

# isort: split
pytest.importorskip("vllm")

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.engine.settings import EngineSettings
from dualpath.policy.batching import AttentionGeometry, LayerTimeEstimate
from dualpath.vllm import quota_scheduler, self_profile
from dualpath.vllm.metadata import StepMetadata
from dualpath.vllm.pass_costs import PassCosts
from dualpath.vllm.quota_scheduler import ASSUMED_FLOPS_PER_S

BLOCK_TOKENS = 16
SETTINGS = EngineSettings(
    role=Role.PREFILL, engine_id="pe-0", router="tcp://h:1", api_url="http://h:2", storage="s",
)  # fmt: skip


class Worker:
    """Steps through what a worker is given, on a clock that the test moves."""

    def __init__(self, clock, side):
        self.clock, self.side = clock, side
        self.steps, self.ended = [], []

    def execute_model(self, step):
        assert isinstance(step.kv_connector_metadata, StepMetadata)
        self.ended += step.finished_req_ids
        if not step.scheduled_new_reqs:
            return
        (new,) = step.scheduled_new_reqs
        cached, bsz = new.num_computed_tokens, step.num_scheduled_tokens[new.req_id]
        assert len(new.prompt_token_ids) == cached + bsz == len(new.block_ids[0]) * BLOCK_TOKENS
        assert 0 not in new.block_ids[0]
        self.steps.append((cached, bsz))
        for _ in range(2):  # layers
            self.side.begin()
            self.clock.now += 1e-4 * (cached + bsz)
            self.side.end()
        self.clock.now += 1e-3

    def sample_tokens(self, grammar_output):
        self.clock.now += 1e-3


@pytest.fixture
def timed(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(self_profile.time, "perf_counter", lambda: clock.now)
    stopwatch = self_profile.AttentionStopwatch(lambda: None)
    worker = Worker(clock, stopwatch)

    def run(*limits):
        return self_profile.time_passes(worker, stopwatch, self_profile.PassLimits(*limits))

    return SimpleNamespace(worker=worker, run=run)


def test_passes_are_timed_behind_ever_more_tokens_and_forgotten(timed):
    passes = timed.run(BLOCK_TOKENS, 100, 60, 10_000)
    assert [(p.cached, p.bsz) for p in passes] == [
        (cached, 48) for cached in (0, 48, 96, 192, 384, 768, 1536, 1552)
    ]
    for p in passes:
        assert p.attention_s == pytest.approx(2e-4 * (p.cached + p.bsz))
        assert p.pass_s == pytest.approx(p.attention_s + 2e-3)
    assert len(timed.worker.steps) == len(timed.worker.ended) == 1 + 2 * len(passes)


def test_passes_end_when_they_get_long(timed):
    passes = timed.run(BLOCK_TOKENS, 100_000, 2048, 1_000_000)
    assert passes[-1].cached < 100_000
    assert timed.worker.clock.now < 1.1 * self_profile.BUDGET_S


@pytest.mark.parametrize("limits", [(16, 1, 2048, 1000), (16, 100, 2048, 17), (16, 100, 15, 1000)])
def test_an_engine_too_small_for_two_passes_times_none(timed, limits):
    assert timed.run(*limits) == []


def test_a_worker_that_fails_keeps_its_engine_from_serving(timed, monkeypatch):
    monkeypatch.setattr(timed.worker, "sample_tokens", None)
    with pytest.raises(ConfigError, match=r"cannot compute 48 tokens behind 0.*profile.* to off"):
        timed.run(BLOCK_TOKENS, 100, 60, 10_000)


@pytest.mark.parametrize(
    ("set_flops", "costs", "flops_per_s"),
    [
        (0.0, None, ASSUMED_FLOPS_PER_S["cpu"]),
        (0.0, PassCosts(LayerTimeEstimate(0.1, 7.0), 1.0), 7.0),
        (5.0, PassCosts(LayerTimeEstimate(0.1, 7.0), 1.0), 5.0),
    ],
)
def test_the_quota_follows_what_is_set_then_what_is_measured(
    set_flops, costs, flops_per_s, monkeypatch
):
    settings = msgspec.structs.replace(SETTINGS, quota_flops_per_s=set_flops, compute_quota_s=0.3)
    monkeypatch.setattr(quota_scheduler, "settings_of", lambda config: settings)
    monkeypatch.setattr(
        quota_scheduler, "attention_geometry", lambda config: AttentionGeometry(pair_flops=1.0)
    )
    quota = quota_scheduler.quota_for(None, BLOCK_TOKENS, costs)
    assert quota.admit(0, BLOCK_TOKENS) == BLOCK_TOKENS
    overhead_s = 0.1 if flops_per_s == 7.0 else 0.0
    assert quota.predicted_s == pytest.approx(overhead_s + 136 / flops_per_s)
