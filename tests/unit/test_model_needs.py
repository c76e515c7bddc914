"""What a model asks of a cluster's GPUs, and `dualpath plan` with it."""

import json

import msgspec
import pytest

from dualpath.cli.main import main
from dualpath.core.cluster import Role
from dualpath_sim.catalog.costs import model_costs
from dualpath_sim.catalog.load import load_cluster, load_gpu, load_model
from dualpath_sim.evaluation.needs import ModelSizes, RoleNeeds, model_sizes, role_needs

HOPPER = load_gpu("hopper")
PAPER = load_cluster("paper-660b")
#: KV of the mean prompt of the 64K dataset.
HITS, MISSES = 32_721, 429


def needs(
    model: str, prefill: int = 1, decode: int = 1, **changes: object
) -> tuple[RoleNeeds, RoleNeeds]:
    cluster = msgspec.structs.replace(PAPER, prefill_tp=prefill, decode_tp=decode, **changes)
    return role_needs(cluster, load_model(model), HOPPER)


def test_a_gpu_carries_its_slice_of_a_prompt():
    """A third of the nodes prefill, so a third of the hits is read there."""
    per_token = load_model("glm-4.6").kv_bytes_per_token
    at_pe, at_de = HITS / 3, HITS * 2 / 3
    prefill, decode = needs("glm-4.6", prefill=4, decode=8)
    assert prefill.cnic_write_bytes == pytest.approx(HITS * per_token / 4)
    assert prefill.cnic_read_bytes == pytest.approx((2 * at_pe + MISSES) * per_token / 4)
    filled = (HITS + MISSES) * per_token
    assert decode.cnic_read_bytes == pytest.approx((at_de * per_token + filled) / 8)
    received = (at_pe + MISSES) * per_token
    assert decode.cnic_write_bytes == pytest.approx((received + filled) / 8)


def test_every_gpu_of_a_latent_engine_loads_the_whole_prompt():
    per_token = load_model("kimi-k2").kv_bytes_per_token
    prefill, decode = needs("kimi-k2", prefill=4, decode=8)
    assert (prefill.replicas, decode.replicas) == (4, 8)
    assert prefill.cnic_write_bytes == pytest.approx(HITS * per_token)
    sent = (HITS / 3 + MISSES) * per_token
    assert prefill.cnic_read_bytes == pytest.approx(HITS / 3 * per_token + sent / 4)
    assert decode.hbm_tokens == needs("kimi-k2")[1].hbm_tokens


def test_gpus_that_share_their_loads_load_a_part_each():
    per_token = load_model("kimi-k2").kv_bytes_per_token
    prefill, _ = needs("kimi-k2", prefill=4, decode=8, share_loads=True)
    assert prefill.replicas == 4
    assert prefill.cnic_write_bytes == pytest.approx(HITS * per_token / 4)


def test_hbm_and_buffers_are_per_gpu():
    prefill, decode = needs("minimax-m2", decode=8)
    assert decode.hbm_tokens == pytest.approx(8 * PAPER.decode_hbm_bytes / 253_952, rel=1e-4)
    assert (prefill.expert_gpus, decode.expert_gpus) == (16, 32)
    assert (prefill.group_engines, decode.group_engines) == (16, 4)
    assert prefill.buffer_bytes == 10e9
    assert prefill.buffer_prompts == pytest.approx(80e9 / (196_608 * 253_952))
    assert decode.left_hbm_bytes > prefill.left_hbm_bytes


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Plan a small workload of MiniMax-M2 on three nodes of the paper's kind."""
    machine = ("plan", "--total-nodes", "3", "--cluster", "paper-660b", "--model", "minimax-m2")
    workload = ("--trace", "64k", "--agents", "2", "--max-turns", "2", "--core", "reference")
    assert main([*machine, *workload, "--quiet", *more]) == 0
    return capsys.readouterr().out


def test_a_plan_lists_what_the_model_needs_on_the_best_shape(capsys):
    engines = ("--prefill-tp", "4", "--decode-tp", "8")
    text = planned(capsys, *engines)
    assert "GB/PFLOP at 16K" in text
    assert "One GPU of" in text
    assert "all storage NICs saturated" in text
    assert "give --hbm-from-weights" not in text
    document = json.loads(planned(capsys, *engines, "--hbm-from-weights", "--json", "-"))
    found = {row["role"]: row for row in document["needs"]}
    assert found[Role.PREFILL]["gpus_per_engine"] == 4
    assert found[Role.DECODE]["set_hbm_bytes"] == found[Role.DECODE]["left_hbm_bytes"]


def test_hbm_that_weights_do_not_leave_is_named(capsys):
    text = " ".join(planned(capsys, "--decode-hbm-bytes", "200GB").split())
    assert "of a decode GPU, " in text
    assert "GB are set: give --hbm-from-weights" in text


def test_weights_that_do_not_fit_are_refused_with_a_remedy(capsys):
    arguments = ["plan", "--total-nodes", "3", "--cluster", "paper-qwen", "--model", "kimi-k2"]
    assert main([*arguments, "--trace", "64k", "--hbm-from-weights", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "leave no HBM for KV at the prefill engines" in error
    assert "--prefill-tp" in error


def test_of_window_layers_a_prefill_engine_loads_what_they_see():
    """GPT-OSS: 18 of 36 layers see 128 tokens, 127 of them hits; all are parts of every block."""
    model = load_model("gpt-oss-120b")
    geometry = model.block_geometry(1)
    assert geometry.full_block_bytes == 36 * 1024
    assert sum(geometry.is_window_layer(layer) for layer in range(36)) == 18
    assert set(geometry.layer_windows) == {0, 128}
    assert model_costs(model, HOPPER, PAPER).kv_bytes_per_token == 36 * 1024
    loaded = 18 * 1024 * (HITS + 127)
    assert needs("gpt-oss-120b")[0].cnic_write_bytes == pytest.approx(loaded)


def test_an_indexers_key_is_a_part_of_its_own_block():
    geometry = load_model("deepseek-v3.2", "fp8").block_geometry(64)
    assert geometry.layer_parts == ((41_984, 8_448),) * 61


def sizes(model: str, prompt_tokens: int) -> ModelSizes:
    return model_sizes(
        load_model(model),
        prompt_tokens=prompt_tokens,
        total_tokens=50_000,
        block_tokens=64,
        layer_buffers=2,
    )


def test_a_prompt_takes_whole_blocks_and_two_of_its_layers_lie_in_hbm():
    glm = sizes("glm-4.6", 1_000)
    per_token = 92 * 2 * 8 * 128 * 2
    assert glm.kv_bytes_per_token == per_token
    assert glm.full_block_bytes == 64 * per_token
    assert glm.prompt_bytes == 16 * 64 * per_token
    assert glm.pass_bytes * 92 == glm.prompt_bytes * 2
    assert glm.agent_bytes == 50_000 * per_token


def test_of_a_prompt_all_but_a_typical_append_is_read_and_leaves_the_pe_with_it():
    per_token = sizes("glm-4.6", 1_000).kv_bytes_per_token
    glm = sizes("glm-4.6", 1_000)
    assert glm.read_bytes == (1_000 - MISSES) * per_token
    # In by the PE's own NIC, which reads DRAM for it, and out with what was computed.
    assert glm.pe_cnic_bytes == glm.read_bytes + 1_000 * per_token
    assert sizes("glm-4.6", 2).read_bytes == per_token


def test_of_layers_with_a_window_what_it_sees_is_read_and_all_is_stored():
    gpt = sizes("gpt-oss-120b", 60_000)
    assert gpt.prompt_bytes == -(-60_000 // 64) * 64 * 36 * 1024
    assert gpt.read_bytes == 18 * 1024 * (60_000 - MISSES + 127)
