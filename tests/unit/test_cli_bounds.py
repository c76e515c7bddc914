"""`dualpath table1`, `bounds` and `workingset`: what they print and what they refuse."""

import json
from typing import Any

import pytest

from dualpath.cli.main import main
from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import ClusterShape
from dualpath.plan.bounds import (
    closed_form_bytes_per_s,
    link_bounds,
    plan_bytes_per_s,
    ratio_bounds,
)
from dualpath.plan.movements import Link


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(printed(capsys, *arguments, "--json", "-"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def shape(prefill_nodes: int, decode_nodes: int, snic_ratio: float = 1.0) -> ClusterShape:
    return ClusterShape(
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        gpus_per_node=8,
        cnic_bytes_per_s=50e9,
        snic_ratio=snic_ratio,
        dram_bytes_per_s=500e9,
    )


def test_the_papers_default_is_free_of_bottlenecks(capsys):
    text = printed(capsys, "bounds")
    assert "2P4D, g = 8, B = 50 GB/s, s = 1" in text
    assert all(f"Eq. {number}" in text for number in range(1, 10))
    assert "0.143 to 3.5" in text
    assert "No bottleneck" in text
    assert "DE CNIC write (Eq. 7) and DE DRAM (Eq. 8) become the bottleneck at 3.5" in text
    assert "splits of 6 nodes: 1P5D to 4P2D" in text


def test_an_equation_and_its_solution_for_p_over_d_agree():
    loads = {bound.link: bound for bound in link_bounds(shape(1, 9))}
    p_over_d = 1 / 9
    for bound in ratio_bounds(shape(1, 9)):
        fits = p_over_d >= bound.ratio if bound.least else p_over_d <= bound.ratio
        assert fits == (loads[bound.link].margin >= 0), bound.equation
    assert loads[Link.PE_CNIC_WRITE].margin == pytest.approx(1 - 10 / 8)


def test_too_few_prefill_nodes_are_the_bottleneck_and_the_usable_share_is_printed(capsys):
    text = printed(capsys, "bounds", "--nodes", "1P9D")
    assert "Bottleneck: PE CNIC write (Eq. 2)" in text
    assert "limits the storage NICs to 80 % of their bandwidth" in text


def test_a_storage_nic_beyond_half_the_compute_nics_fits_no_ratio(capsys):
    text = printed(capsys, "bounds", "--nodes", "1P1D", "--snic-bytes-per-s", "250GB")
    assert "PE CNIC read does not depend on P/D; it requires an SNIC of at most" in text
    assert "200 GB/s" in text
    result = printed_json(capsys, "bounds", "--snic-bytes-per-s", "250GB")
    assert result["bottleneck_free_range"] is None


def test_two_storage_nics_narrow_the_range(capsys):
    result = printed_json(capsys, "bounds", "--nodes", "1P1D", "--snic-bytes-per-s", "100GB")
    assert result["bottleneck_free_range"] == pytest.approx([1 / 3, 1.0])


def test_misses_push_the_upper_edge_over_the_limit(capsys):
    edge = ("bounds", "--nodes", "7P2D")
    assert "No bottleneck" in printed(capsys, *edge)
    text = printed(capsys, *edge, "--model", "ds-v3.2", "--hit-rate", "0.987")
    assert "Over the limit with misses counted: DE CNIC write, DE DRAM." in text


def test_plan_loads_approach_the_equations_as_misses_vanish():
    geometry = BlockGeometry.uniform(layers=3, block_tokens=1, layer_block_bytes=100)
    machine = shape(2, 4)
    closed = closed_form_bytes_per_s(machine)
    few = plan_bytes_per_s(machine, geometry, 1_000_000, 1)
    many = plan_bytes_per_s(machine, geometry, 900, 100)
    for link, load in closed.items():
        assert few[link] == pytest.approx(load, rel=1e-5)
        assert many[link] >= load * (1 - 1e-12)
    # A tenth of the prompt is new: it is written once for nine parts read.
    read = many[Link.DE_SNIC_READ] * 4 + many[Link.PE_SNIC_READ] * 2
    assert many[Link.DE_SNIC_WRITE] * 4 == pytest.approx(read / 9)


def test_kv_that_every_gpu_of_an_engine_loads_is_counted_for_each(capsys):
    """Kimi-K2's latent on 2 of a node's 8 GPUs: r = 2; GLM-4.6 has heads for each of 8."""
    latent = ("bounds", "--model", "kimi-k2", "--prefill-tp", "2")
    text = printed(capsys, *latent)
    assert "r = 2 GPUs of a PE and q = 1 of a DE" in text
    assert "(1 + r) · Bs/g ≤ B" in text
    loads = {bound["link"]: bound for bound in printed_json(capsys, *latent)["link_bounds"]}
    assert loads["pe-cnic-read"]["load_bytes_per_s"] == pytest.approx(3 * 50e9 / 8)
    heads = ("bounds", "--model", "glm-4.6", "--prefill-tp", "8")
    assert (
        printed_json(capsys, *heads)["link_bounds"] == printed_json(capsys, "bounds")["link_bounds"]
    )
    own = printed_json(capsys, "bounds", "--decode-tp", "8")
    assert own["link_bounds"] == printed_json(capsys, "bounds")["link_bounds"]


def test_an_snic_too_fast_for_every_ratio_is_reported_with_replicas(capsys):
    text = printed(capsys, "bounds", "--model", "kimi-k2", "--prefill-tp", "8")
    assert "requires an SNIC of at most g/9 · B = 44.4 GB/s" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bounds", "--nodes", "0P4D"), "--nodes is '0P4D'"),
        (("bounds", "--nodes", "2x4"), "like 1P2D"),
        (("bounds", "--gpus-per-node", "0"), "--gpus-per-node is 0; it must be between 1"),
        (("bounds", "--snic-bytes-per-s", "-1"), "--snic-bytes-per-s is -1"),
        (("bounds", "--cluster", "mine"), "paper-660b"),
        (("bounds", "--decode-tp", "3"), "it must divide --gpus-per-node, 8"),
        (
            ("bounds", "--model", "smollm2-135m", "--decode-tp", "2"),
            "2 GPUs cannot divide the 9 heads and 3 KV heads",
        ),
        (("bounds", "--model", "ds-v3.2", "--kv-cache-dtype", "fp8"), "--kv-cache-dtype is fp8"),
        (("bounds", "--model", "ds-v3.2", "--hit-rate", "1.5"), "--hit-rate is 1.5"),
        (("bounds", "--model", "ds-v3.2", "--hit-rate", "1"), "must be 1 to 33149"),
        (("workingset", "--agents-per-s", "0.4"), "--agents-per-s is given without --jct-s"),
        (
            ("workingset", "--agents-per-s", "0", "--jct-s", "1"),
            "is 0.0; it must be above 0",
        ),
        (("workingset", "--gap-factor", "0.5"), "--gap-factor is 0.5; it must be between 1"),
        (("table1", "--model", "gpt-5"), "'gpt-5' is not among"),
    ],
)
def test_invalid_input_is_one_line_with_value_limit_and_remedy(capsys, arguments, message):
    error = refusal(capsys, *arguments)
    assert message in error
    assert error.count("\n") == 1


def test_table_1_is_printed_with_the_papers_figures(capsys):
    text = printed(capsys, "table1")
    assert "with 245,760 FLOP per pair" in text
    result = printed_json(capsys, "table1", "--model", "smollm2-135m")
    rows = {(row["model"], row["latent_pair_flop"]): row for row in result["rows"][:7]}
    assert rows["qwen2.5-32b", None]["computed"] == pytest.approx([117.2, 267.2], abs=0.1)
    assert rows["qwen2.5-32b", None]["paper"] == [117, 267]
    assert rows["ds-v3", 245760]["error"] == pytest.approx([-0.0015, -0.0018], abs=1e-3)
    assert result["rows"][-1]["model"] == "smollm2-135m"


def test_the_papers_working_sets_imply_these_completion_times(capsys):
    quoted = printed_json(capsys, "workingset")["paper"]
    assert [row["implied_jct_s"] for row in quoted] == pytest.approx([616, 1352], abs=1)


def test_gaps_enlarge_the_working_set_with_their_square(capsys):
    arguments = ("workingset", "--agents-per-s", "0.45", "--jct-s", "1352", "--gap-factor", "3")
    (model,) = printed_json(capsys, *arguments)["models"]
    sizes = [case["working_set_bytes"] for case in model["cases"]]
    assert sizes[0] == pytest.approx(681e9, rel=0.001)
    assert sizes[1:] == pytest.approx([3 * sizes[0], 9 * sizes[0]])
    assert "grows 9-fold" in printed(capsys, *arguments)


def test_each_model_has_a_row_of_sizes_and_a_working_set(capsys):
    arguments = (
        "workingset",
        "--model",
        "glm-4.6,kimi-k2",
        "--agents-per-s",
        "1",
        "--jct-s",
        "100",
    )
    first, second = printed_json(capsys, *arguments)["models"]
    assert (first["model"], second["model"]) == ("glm-4.6", "kimi-k2")
    for model in (first, second):
        half_done = model["agent_bytes"] / 2
        assert model["cases"][0]["working_set_bytes"] == pytest.approx(100 * half_done)
    assert printed(capsys, *arguments).count("kimi-k2") == 2
