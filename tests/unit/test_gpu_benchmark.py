"""The GPU benchmark on a CPU: streamed and unstreamed results are equal; times are not checked."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dualpath.core.errors import ConfigError
from dualpath_lab.benchmarks.gpu.experiments import (
    GPU_COPIES,
    GPU_PREFILL,
    CopiesSettings,
    PrefillSettings,
    fit_layer_times,
)
from dualpath_lab.benchmarks.gpu.geometry import DEEPSEEK, QWEN, TINY_GQA, TINY_MLA
from dualpath_lab.benchmarks.gpu.machine import open_machine
from dualpath_lab.benchmarks.gpu.prefill import (
    Prefill,
    PrefillCase,
    Stack,
    measure_prefill,
)
from dualpath_sim.harness.run import measure

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"device": "cpu", "tiny": True, "warm_up": 0, "repeats": 1}
WAYS = ["alone", "load, then compute"] + [f"streamed, {n} buffers" for n in (1, 2, 3)]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def case(geometry, cached=8, append=4):
    return PrefillCase(
        geometry=geometry, layers=5, cached=cached, append=append, feed_forward=True,
        dtype="float32", seed=3,
    )  # fmt: skip


def test_streamed_prefill_computes_and_sends_the_same_as_unstreamed():
    raw = measure(GPU_PREFILL, PrefillSettings(feed_forward=True, **QUICK))
    assert len(raw.results) == 2 * 2 * 3 * 2  # models, feed-forward, cached, append
    for result in raw.results:
        assert list(result["times"]) == WAYS
        assert result["largest_difference"] == 0.0
    page = GPU_PREFILL.page(raw, "gpu-prefill", "command")
    assert page.settings[0].startswith("On a CPU: this only shows that the program works")
    assert {row[0] for row in page.tables[1].rows} == {"tiny-mla", "tiny-gqa"}


@pytest.mark.parametrize("geometry", [TINY_MLA, TINY_GQA], ids=lambda g: g.name)
def test_a_layer_that_is_not_loaded_is_noticed(geometry, monkeypatch):
    load = Prefill._load

    def forget_layer_3(self, layer, region, after):
        return after if layer == 3 and region != 3 else load(self, layer, region, after)

    monkeypatch.setattr(Prefill, "_load", forget_layer_3)
    with pytest.raises(ConfigError, match="KV was wrong"):
        measure_prefill(case(geometry), [2], open_machine(CPU), CPU, 0, 1)


@pytest.mark.parametrize("geometry", [TINY_MLA, TINY_GQA], ids=lambda g: g.name)
def test_a_prompt_in_two_parts_is_computed_like_one(geometry):
    """Cached KV gives the same result as recomputing its tokens."""
    stack = Stack(geometry, CPU, torch.float64, 1, feed_forward=True)
    hidden = torch.randn(12, geometry.hidden, dtype=torch.float64)
    kv = stack.new_kv(hidden)
    whole = stack.layer(hidden, kv)
    torch.testing.assert_close(stack.layer(hidden[8:], kv), whole[8:])
    torch.testing.assert_close(stack.layer(hidden[:8], kv[:8]), whole[:8])


def test_every_copy_method_copies_the_right_bytes():
    raw = measure(GPU_COPIES, CopiesSettings(**QUICK))
    for result in raw.results:
        assert {way: row["right"] for way, row in result["ways"].items()} == {
            "torch, one by one": True,
            "one copy and a kernel": True,
            "one copy": True,
        }
    assert GPU_COPIES.page(raw, "gpu-copies", "command").results


def test_the_estimate_recovers_a_known_rate():
    results = [
        {
            "model": "m",
            "feed_forward": False,
            "attention_flops": flops,
            "times": {"alone": {"median_s": 0.001 + flops / 4e14}},
        }
        for flops in (1e11, 1e12, 7e12)
    ]
    fitted: dict[str, Any] = fit_layer_times(results)[0]
    assert fitted["overhead_s"] == pytest.approx(0.001)
    assert fitted["flops_per_s"] == pytest.approx(4e14)
    assert max(map(abs, fitted["errors"])) < 1e-9


def test_layer_blocks_have_the_sizes_of_the_models():
    assert DEEPSEEK.block_bytes(2) == 64 * 576 * 2
    assert QWEN.block_bytes(2) == 64 * 2 * 8 * 128 * 2
    with pytest.raises(ConfigError, match="multiples of 4"):
        measure_prefill(case(TINY_GQA, cached=5), [1], open_machine(CPU), CPU, 0, 1)
