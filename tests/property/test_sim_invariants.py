"""What must hold in every simulated run, whatever the cluster, the mode and the agents."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulated import agents_of, decisions_of, growing_agent, small_model, small_setup

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.modes import Handover, Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.bounds import link_bytes
from dualpath.plan.movements import Link
from dualpath.plan.steps import PromptLayout, whole_plan
from dualpath_sim.simulator.derived import receives_in_hbm
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import WindowLayers

agent = st.builds(
    growing_agent,
    turns=st.integers(1, 5),
    first=st.integers(1, 900),
    append=st.integers(1, 300),
    generated=st.integers(1, 40),
)
tables = st.lists(agent, min_size=1, max_size=6).map(lambda rows: agents_of(*rows))
clusters = st.fixed_dictionaries(
    {
        "prefill_nodes": st.integers(1, 3),
        "decode_nodes": st.integers(1, 3),
        "gpus_per_node": st.integers(1, 2),
        "prefill_nodes_per_group": st.integers(0, 2),
        "decode_nodes_per_group": st.integers(0, 2),
        "lockstep": st.booleans(),
        "snic_sharing": st.sampled_from(["fifo", "equal"]),
        "fetch_interval_s": st.sampled_from([0.001, 0.05]),
        "compute_quota_s": st.sampled_from([0.1, 10.0]),
        "batch_cap_tokens": st.sampled_from([100, 1000]),
        "beta_tokens": st.sampled_from([500, 100_000]),
        "decode_hbm_bytes": st.sampled_from([4e6, 1e9]),
        "prefill_hbm_bytes": st.sampled_from([4e6, 1e9]),
        "decode_buffer_bytes": st.sampled_from([4e6, 1e9]),
        "prefill_buffer_bytes": st.sampled_from([4e6, 1e9]),
        "dram_tier_bytes": st.sampled_from([None, 0.0, 2e6]),
        "request_overhead_s": st.sampled_from([0.0, 0.02]),
        "read_latency_s": st.sampled_from([0.0, 0.003]),
        "handover": st.sampled_from(Handover),
        "third_engine_reads": st.sampled_from([0, 1, 2]),
    }
)
modes = st.sampled_from(list(Mode))


def with_windows(windows: tuple[int, ...]) -> BlockGeometry:
    """Return ten equal layers, three for each window and the others without."""
    whole = BlockGeometry.uniform(layers=10, block_tokens=64, layer_block_bytes=6400)
    layers = [window for window in windows for _ in range(3)]
    layer_windows = (*layers, *[0] * (10 - len(layers)))
    return msgspec.structs.replace(whole, layer_windows=layer_windows if windows else ())


@settings(max_examples=150)
@given(clusters, modes, tables, st.sampled_from([0, 50, 400]))
def test_every_round_passes_every_stage_in_order(cluster, mode, agents, append):
    setup = small_setup(mode, append_at_decode_tokens=append, **cluster)
    result = simulate(setup, agents, core="reference")
    stages = np.array(result.turns)
    assert (stages >= 0).all()
    # The second token may be due before other joins slow the step down, never before decoding.
    assert (np.diff(stages[:7], axis=0) >= 0).all()
    assert (result.turns.finished_ns >= result.turns.decoding_ns).all()
    assert (result.turns.second_token_ns >= result.turns.decoding_ns).all()


@settings(max_examples=100)
@given(clusters, modes, tables)
def test_tokens_computed_are_the_tokens_missed(cluster, mode, agents):
    result = simulate(small_setup(mode, **cluster), agents, core="reference")
    missed = int((agents.prompt_tokens - agents.hit_tokens).sum())
    assert int(result.batches.tokens.sum()) == missed


@settings(max_examples=100)
@given(clusters, modes, tables)
def test_a_unit_makes_one_pass_at_a_time(cluster, mode, agents):
    batches = simulate(small_setup(mode, **cluster), agents, core="reference").batches
    for unit in set(batches.unit.tolist()):
        mine = batches.unit == unit
        assert (batches.start_ns[mine][1:] >= batches.end_ns[mine][:-1]).all()


@settings(max_examples=100)
@given(clusters, modes.filter(lambda mode: mode.moves_bytes), tables)
def test_storage_nics_carry_the_hits_that_no_tier_holds_and_not_faster_than_they_can(
    cluster, mode, agents
):
    setup = small_setup(mode, **cluster)
    result = simulate(setup, agents, core="reference")
    read_bytes = result.links.snic_read_bytes
    hits = int(agents.hit_tokens.sum()) - result.dram_tier_hit_tokens
    np.testing.assert_allclose(read_bytes.sum(), hits * 1000.0, rtol=1e-6)
    window_s = result.links.window_ns / 1e9
    assert (read_bytes <= setup.cluster.snic_bytes_per_s * window_s * (1 + 1e-6)).all()


@settings(max_examples=100)
@given(
    clusters,
    modes.filter(lambda mode: mode.moves_bytes),
    tables,
    st.sampled_from([(), (64,), (200,), (64, 200)]),
)
def test_links_carry_exactly_the_bytes_of_the_plans_of_all_rounds(cluster, mode, agents, windows):
    """Prompts prefilled in one pass; ``whole_plan`` is their plan.

    Some of the ten layers may see the last tokens only, three for each of ``windows``.

    A DRAM tier has room for everything, so that no block of the index was evicted.  Third DEs are
    chosen after the recorded assignments.
    """
    cluster |= {"third_engine_reads": 0}
    cluster |= {"compute_quota_s": 1e6, "batch_cap_tokens": 1 << 20}
    if cluster["dram_tier_bytes"] is not None:
        cluster |= {"dram_tier_bytes": 1e12}
    cluster |= {"prefill_hbm_bytes": 1e12}
    window_layers = tuple(
        WindowLayers(window_tokens=window, kv_bytes_per_token=300.0) for window in windows
    )
    setup = msgspec.structs.replace(
        small_setup(mode, **cluster), model=small_model(window_layers=window_layers)
    )
    geometry = with_windows(windows)
    handover = Handover.HBM if receives_in_hbm(setup) else Handover.BUFFER
    result = simulate(setup, agents, core="reference", record_decisions=True)
    planned = dict.fromkeys(Link, 0)
    decisions = decisions_of(result)
    for row, r in enumerate(decisions.round.tolist()):
        runs, first = [], 0
        for side, tokens, cached in (
            (Role.DECODE, decisions.decode_cached_tokens[row], True),
            (Role.PREFILL, decisions.prefill_cached_tokens[row], True),
            (Role.PREFILL, decisions.prefill_read_tokens[row], False),
            (Role.DECODE, decisions.decode_read_tokens[row], False),
        ):
            runs.append(HitRun(side, BlockRun(first, int(tokens) // 64), cached=cached))
            first += int(tokens) // 64
        assert first * 64 == (agents.hit_tokens[r] if mode.moves_bytes else 0)
        whole_from = geometry.whole_from(first)
        layout = PromptLayout(
            geometry=geometry,
            prompt_tokens=int(agents.prompt_tokens[r]),
            hits=tuple(run.whole_behind(whole_from) for run in runs if run.blocks),
            handover=handover,
        )
        decoded = agents.generated_tokens[r] > 1
        for link, carried in link_bytes(
            step
            for step in whole_plan(layout, caches=cluster["dram_tier_bytes"] is not None)
            if decoded or step.label != "8-9" or handover is Handover.HBM
        ).items():
            planned[link] += carried
    cnic = sum(carried for link, carried in planned.items() if "cnic" in link)
    np.testing.assert_allclose(result.links.cnic_bytes.sum(), cnic, rtol=1e-9)
    snic = planned[Link.PE_SNIC_READ] + planned[Link.DE_SNIC_READ]
    np.testing.assert_allclose(result.links.snic_read_bytes.sum(), snic, rtol=1e-6)
    prefill_nodes = setup.cluster.prefill_nodes
    on_prefill = result.links.snic_read_bytes[:, :prefill_nodes].sum()
    np.testing.assert_allclose(on_prefill, planned[Link.PE_SNIC_READ], rtol=1e-6)


@settings(max_examples=60)
@given(clusters, modes, tables)
def test_equal_inputs_give_equal_outputs(cluster, mode, agents):
    setup = small_setup(mode, **cluster)
    first = simulate(setup, agents, core="reference", record_decisions=True)
    second = simulate(setup, agents, core="reference", record_decisions=True)
    for left, right in zip(
        (*first.turns, *decisions_of(first)),
        (*second.turns, *decisions_of(second)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


lone_rounds = st.lists(
    st.builds(
        lambda first, new: [(first, first * 2 // 3 // 64 * 64, new)],
        first=st.integers(1, 900),
        new=st.integers(1, 40),
    ),
    min_size=1,
    max_size=8,
).map(lambda rounds: agents_of(*rounds))


@settings(max_examples=100)
@given(clusters, modes.filter(lambda mode: mode.moves_bytes), lone_rounds)
def test_a_tier_that_finds_nothing_decides_as_if_there_were_none(cluster, mode, agents):
    """Contexts that come once: a tier is full of unused blocks, and nothing else changes.

    DEs that receive KV in HBM copy it for the tier; those with buffers have it there.
    """
    cluster |= {"handover": Handover.BUFFER}
    runs = [
        simulate(
            small_setup(mode, **cluster | {"dram_tier_bytes": tier_bytes}),
            agents,
            core="reference",
            record_decisions=True,
        )
        for tier_bytes in (None, 0.0)
    ]
    without, with_tier = runs
    assert with_tier.dram_tier_hit_tokens == 0
    for one, other in zip(decisions_of(without), decisions_of(with_tier), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(without.links.snic_read_bytes, with_tier.links.snic_read_bytes)
    np.testing.assert_array_equal(without.links.cnic_bytes, with_tier.links.cnic_bytes)
