"""Both cores give the same numbers to the last bit for every setup of the paper's system."""

import importlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulated import agents_of, growing_agent, small_model, small_setup

from dualpath.core.modes import Mode
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.result import SimulationResult
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import DecodeCosts, PrefillCosts, Setup, WindowLayers

pytest.importorskip("numba")

ample_or_tight = st.sampled_from([4e6, 1e9])


def with_engines(cluster: dict[str, Any]) -> dict[str, Any]:
    """Give the roles engines of one GPU or a whole node each, and groups that such nodes have."""
    fields = dict(cluster)
    for role in ("prefill", "decode"):
        gpus = fields["gpus_per_node"] if fields.pop(f"{role}_whole_node") else 1
        nodes = fields.pop(f"{role}_group")
        fields[f"{role}_tp"] = gpus
        fields[f"{role}_dp"] = nodes * fields["gpus_per_node"] // gpus
    return fields


clusters = st.fixed_dictionaries(
    {
        "prefill_nodes": st.integers(1, 3),
        "decode_nodes": st.integers(1, 3),
        "gpus_per_node": st.integers(1, 3),
        "prefill_nodes_per_group": st.integers(0, 2),
        "decode_nodes_per_group": st.integers(0, 2),
        "lockstep": st.booleans(),
        "snic_bytes_per_s": st.sampled_from([1e6, 3.3e6]),
        "snic_write_bytes_per_s": st.sampled_from([1e5, 1e9]),
        "cnic_bytes_per_s": st.sampled_from([1e6, 7e8]),
        "dram_bytes_per_s": st.sampled_from([2e6, 1e12]),
        "read_latency_s": st.sampled_from([0.0, 0.003]),
        "prefill_buffer_bytes": ample_or_tight,
        "decode_buffer_bytes": ample_or_tight,
        "baseline_buffer_bytes": st.sampled_from([None, 3.5e6, 1e9]),
        "prefill_hbm_bytes": ample_or_tight,
        "decode_hbm_bytes": ample_or_tight,
        "layer_buffers": st.integers(1, 2),
        "overlap_passes": st.booleans(),
        "alpha_s": st.sampled_from([0.1, 3.0]),
        "beta_tokens": st.sampled_from([500, 100_000]),
        "compute_quota_s": st.sampled_from([0.1, 10.0]),
        "batch_cap_tokens": st.sampled_from([100, 1000]),
        "fetch_interval_s": st.sampled_from([0.001, 0.05]),
        "generated_reserve_tokens": st.sampled_from([0, 8, 256]),
        "block_tokens": st.sampled_from([16, 64]),
        "request_overhead_s": st.sampled_from([0.0, 0.02]),
        "decode_admission_s": st.sampled_from([0.0, 0.04]),
        "prefill_whole_node": st.booleans(),
        "decode_whole_node": st.booleans(),
        "share_loads": st.booleans(),
        "prefill_group": st.sampled_from([0, 1, 2]),
        "decode_group": st.sampled_from([0, 1]),
    }
).map(with_engines)
models = st.builds(
    small_model,
    prefill_replicas=st.sampled_from([1.0, 2.0]),
    decode_replicas=st.sampled_from([1.0, 1.5]),
    window_layers=st.sampled_from(
        [
            (),
            (WindowLayers(window_tokens=100, kv_bytes_per_token=333.3),),
            (
                WindowLayers(window_tokens=300, kv_bytes_per_token=250.0),
                WindowLayers(window_tokens=64, kv_bytes_per_token=500.0),
            ),
        ]
    ),
    prefill=st.builds(
        PrefillCosts,
        batch_s=st.sampled_from([0.0, 0.002]),
        attention_batch_s=st.sampled_from([0.0, 0.001]),
        attention_token_s=st.sampled_from([1e-4, 1e-3]),
        pair_s=st.sampled_from([0.0, 1e-7]),
        index_pair_s=st.sampled_from([0.0, 3e-8]),
        window_tokens=st.sampled_from([0, 128]),
        feed_forward_token_s=st.sampled_from([0.0, 1e-5]),
        exchange_token_s=st.sampled_from([0.0, 2e-5]),
        interleaved=st.booleans(),
    ),
    decode=st.builds(
        DecodeCosts,
        step_s=st.sampled_from([0.0, 0.01]),
        request_s=st.sampled_from([0.0, 0.003]),
        pair_s=st.sampled_from([0.0, 1e-6]),
        index_pair_s=st.sampled_from([0.0, 2e-7]),
        window_tokens=st.sampled_from([0, 256]),
    ),
)


@st.composite
def tables(draw: Any) -> AgentTable:
    """Agents that grow by appends, some of them sub-agents, with starts and tool delays."""
    rows = draw(
        st.lists(
            st.builds(
                growing_agent,
                turns=st.integers(1, 5),
                first=st.integers(1, 900),
                append=st.integers(1, 300),
                generated=st.integers(1, 40),
            ),
            min_size=1,
            max_size=8,
        )
    )
    starts = st.sampled_from([0.0, 0.0, 0.5, 1.23])
    firsts = np.cumsum([0, *(len(row) for row in rows)]).tolist()
    parents = [
        draw(st.one_of(st.just(-1), st.integers(0, firsts[agent] - 1))) if agent else -1
        for agent in range(len(rows))
    ]
    return agents_of(
        *rows,
        start_s=[draw(starts) for _ in rows],
        start_after_round=parents,
        delay_s=draw(st.sampled_from([0.0, 0.3])),
    )


def assert_same(setup: Setup, agents: AgentTable, **options: Any) -> SimulationResult:
    """Run both cores and compare the whole results."""
    results = [
        simulate(setup, agents, core=core, record_decisions=True, **options)
        for core in ("reference", "compiled")
    ]
    reference, compiled = results
    for field in ("turns", "batches", "decisions", "links"):
        expected, found = getattr(reference, field), getattr(compiled, field)
        for name in expected._fields:
            left, right = np.asarray(getattr(expected, name)), np.asarray(getattr(found, name))
            assert left.dtype == right.dtype, f"{field}.{name}"
            np.testing.assert_array_equal(right, left, err_msg=f"{field}.{name}", strict=True)
    for name in ("end_ns", "stopped", "events", "dram_tier_hit_tokens", "moves"):
        assert getattr(compiled, name) == getattr(reference, name), name
    return compiled


@settings(max_examples=250)
@given(clusters, st.sampled_from(list(Mode)), models, tables())
def test_both_cores_agree(cluster, mode, model, agents):
    setup = msgspec.structs.replace(small_setup(mode, **cluster), model=model)
    assert_same(setup, agents)


@settings(max_examples=100)
@given(clusters, st.sampled_from(list(Mode)), tables(), st.sampled_from([0.0, 0.7, 2.0, 5.0]))
def test_both_cores_stop_at_the_same_event(cluster, mode, agents, until_s):
    assert_same(small_setup(mode, **cluster), agents, until_s=until_s, window_s=0.37)


@pytest.mark.parametrize("mode", list(Mode))
def test_both_cores_agree_when_many_agents_crowd_a_cluster(mode):
    """Long queues everywhere, thousands of events, more batches than one call of the loop takes."""
    rows = [growing_agent(6, 100 + 7 * agent, 40 + agent, 1 + agent % 90) for agent in range(120)]
    setup = small_setup(
        mode,
        prefill_nodes=2,
        decode_nodes=3,
        gpus_per_node=2,
        decode_hbm_bytes=6e6,
        decode_buffer_bytes=5e6,
        prefill_buffer_bytes=5e6,
        beta_tokens=3000,
        compute_quota_s=0.5,
    )
    windows = (WindowLayers(window_tokens=150, kv_bytes_per_token=600.0),)
    setup = msgspec.structs.replace(setup, model=small_model(window_layers=windows))
    result = assert_same(setup, agents_of(*rows, start_s=[0.01 * i for i in range(120)]))
    assert (result.turns.finished_ns > 0).all()


def test_one_compilation_serves_every_setup():
    core = importlib.import_module("dualpath_sim.simulator.compiled.core")
    one, many = agents_of([(64, 0, 2)]), agents_of(*[growing_agent(3, 100, 50, 5)] * 7)
    for mode in (Mode.BASIC, Mode.DUALPATH, Mode.ORACLE):
        for agents in (one, many):
            simulate(small_setup(mode), agents, core="compiled")
            setup = small_setup(mode, decode_nodes=3)
            simulate(setup, agents, core="compiled", record_decisions=True)
    assert len(core.run_events.signatures) == 1
