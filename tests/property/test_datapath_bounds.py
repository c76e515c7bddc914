"""Summing the plans' bytes over all (PE, DE) pairs gives Eq. 1-9 of §4.2."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import ClusterShape, Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.bounds import (
    closed_form_bytes_per_s,
    de_pair_bytes_per_s,
    link_bytes,
    pe_pair_bytes_per_s,
    prefill_to_decode_range,
)
from dualpath.plan.movements import Link, Replicas
from dualpath.plan.steps import PromptLayout, Step, whole_plan

GEOMETRY = BlockGeometry.uniform(layers=4, block_tokens=64, layer_block_bytes=1 << 16)
HIT_BLOCKS = 50

shapes = st.builds(
    ClusterShape,
    prefill_nodes=st.integers(1, 64),
    decode_nodes=st.integers(1, 64),
    gpus_per_node=st.integers(1, 16),
    cnic_bytes_per_s=st.floats(1e9, 1e11),
    snic_ratio=st.floats(0.1, 8),
    dram_bytes_per_s=st.floats(1e10, 1e12),
    prefill_replicas=st.sampled_from([1, 1, 2, 8]),
    decode_replicas=st.sampled_from([1, 1, 2, 4]),
)


def hit_bytes_per_link(side: Role, replicas: Replicas) -> Counter[Link]:
    """Bytes per link that one byte read from storage causes on a path, hit KV only.

    As in the paper the KV of miss tokens is left out: the steps of the one block that is always
    computed are subtracted by planning the same prompt with that block alone.
    """
    hits = (HitRun(side, BlockRun(0, HIT_BLOCKS)),)
    tokens = GEOMETRY.block_tokens
    whole = PromptLayout(geometry=GEOMETRY, prompt_tokens=tokens * (HIT_BLOCKS + 1), hits=hits)
    alone = PromptLayout(geometry=GEOMETRY, prompt_tokens=tokens)
    per_link = link_bytes(whole_plan(whole), replicas)
    per_link.subtract(link_bytes(whole_plan(alone), replicas))
    return per_link


@given(shapes)
def test_plan_bytes_summed_over_all_pairs_are_the_papers_equations(shape: ClusterShape) -> None:
    read_bytes = HIT_BLOCKS * GEOMETRY.full_block_bytes
    pe_rate, de_rate = pe_pair_bytes_per_s(shape), de_pair_bytes_per_s(shape)
    replicas = Replicas(shape.prefill_replicas, shape.decode_replicas)
    pe_links = hit_bytes_per_link(Role.PREFILL, replicas)
    de_links = hit_bytes_per_link(Role.DECODE, replicas)
    p, d, g = shape.prefill_nodes, shape.decode_nodes, shape.gpus_per_node
    pairs_of = {  # pairs that share one device: a CNIC belongs to a GPU, DRAM and SNIC to a node
        Link.PE_CNIC_READ: d * g,
        Link.PE_CNIC_WRITE: d * g,
        Link.DE_CNIC_READ: p * g,
        Link.DE_CNIC_WRITE: p * g,
        Link.PE_DRAM: d * g * g,
        Link.DE_DRAM: p * g * g,
    }
    for link, expected in closed_form_bytes_per_s(shape).items():
        pair = (pe_links[link] * pe_rate + de_links[link] * de_rate) / read_bytes
        assert math.isclose(pair * pairs_of[link], expected, rel_tol=1e-9), link


@given(shapes)
def test_all_storage_nics_are_saturated(shape: ClusterShape) -> None:
    snic = shape.snic_ratio * shape.cnic_bytes_per_s
    g = shape.gpus_per_node
    assert math.isclose(pe_pair_bytes_per_s(shape) * shape.decode_nodes * g * g, snic)
    assert math.isclose(de_pair_bytes_per_s(shape) * shape.prefill_nodes * g * g, snic)


@given(shapes)
def test_the_range_of_eq_9_is_where_no_link_is_overloaded(shape: ClusterShape) -> None:
    low, high = prefill_to_decode_range(shape)
    ratio = shape.prefill_nodes / shape.decode_nodes
    loads = closed_form_bytes_per_s(shape)
    limit = {Link.PE_DRAM: shape.dram_bytes_per_s, Link.DE_DRAM: shape.dram_bytes_per_s}
    slack = [limit.get(link, shape.cnic_bytes_per_s) / load for link, load in loads.items()]
    # Eq. 9 leaves out Eq. 1 and the PE's DRAM, which hold "in practice".
    engine_fits = (1 + shape.prefill_replicas) * shape.snic_ratio <= shape.gpus_per_node
    if min(abs(x - 1) for x in slack) < 1e-6 or not engine_fits:
        return
    pe_dram_fits = loads[Link.PE_DRAM] <= shape.dram_bytes_per_s
    assert (low <= ratio <= high and pe_dram_fits) == all(x >= 1 for x in slack)


def test_the_papers_example_range() -> None:
    shape = ClusterShape(
        prefill_nodes=2,
        decode_nodes=4,
        gpus_per_node=8,
        cnic_bytes_per_s=50e9,
        snic_ratio=1,
        dram_bytes_per_s=500e9,
    )
    assert prefill_to_decode_range(shape) == pytest.approx((1 / 7, 7 / 2))


def test_miss_tokens_are_the_only_difference_between_plan_and_equations() -> None:
    steps: list[Step] = list(
        whole_plan(PromptLayout(geometry=GEOMETRY, prompt_tokens=GEOMETRY.block_tokens))
    )
    assert {step.label for step in steps} == {"miss", "8-9", "persist"}


def rank_bytes(verbs: dict[str, Link], gpus: tuple[int, int], kv_heads: int) -> dict[str, float]:
    """Bytes that a PE's or DE's GPU moves per kind of movement, of 3 hits at the PE, 5 at the DE.

    One block, whole model, is the unit; 2 blocks are computed.
    """
    prefill, decode = (n / min(n, kv_heads) for n in gpus)
    replicas = Replicas(prefill, decode)
    hits = (HitRun(Role.PREFILL, BlockRun(0, 3)), HitRun(Role.DECODE, BlockRun(3, 5)))
    layout = PromptLayout(geometry=GEOMETRY, prompt_tokens=10 * GEOMETRY.block_tokens, hits=hits)
    found = {}
    for verb, link in verbs.items():
        steps = [step for step in whole_plan(layout) if step.movement.verb == verb]
        ranks = gpus[0] if link.startswith("pe") else gpus[1]
        carried = link_bytes(steps, replicas)[link]
        found[f"{verb} {link}"] = carried / GEOMETRY.full_block_bytes / ranks
    return found


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("gpus", [(1, 1), (2, 1), (1, 4), (8, 8), (2, 8)])
def test_loads_of_a_rank_are_those_of_its_slice(gpus: tuple[int, int], kv_heads: int) -> None:
    """H hits at the PE, D at the DE, M misses, P all; latent attention is as one KV head."""
    a, b = gpus
    pe_slices, de_slices = min(a, kv_heads), min(b, kv_heads)
    h, d, m = 3, 5, 2
    links = {
        "load": Link.PE_CNIC_WRITE,
        "send": Link.PE_CNIC_READ,
        "h2d": Link.DE_CNIC_WRITE,
    }
    assert rank_bytes(links, gpus, kv_heads) == pytest.approx(
        {
            "load pe-cnic-write": (h + d) / pe_slices,
            "send pe-cnic-read": (h + m) / a,
            "h2d de-cnic-write": (h + d + m) / de_slices,
        }
    )
    at_de = {"load": Link.DE_CNIC_READ, "send": Link.DE_CNIC_WRITE}
    assert rank_bytes(at_de, gpus, kv_heads) == pytest.approx(
        {
            "load de-cnic-read": a / pe_slices * d / b,
            "send de-cnic-write": (h + m) / b,
        }
    )
