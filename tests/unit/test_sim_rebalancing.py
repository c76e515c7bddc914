"""Nodes change their role while the simulated cluster serves, and nothing is lost on the way."""

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulated import (
    RoundLengths,
    agents_of,
    decisions_of,
    growing_agent,
    small_model,
    small_setup,
)

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.policy.rebalance import RebalanceSettings
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.result import NS_PER_S, RoleMove, SimulationResult
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup

#: 1,000 tokens are 1 s of a PE.
LONG_PROMPT: RoundLengths = (1000, 0, 2)
#: 16 s of decoding; 37 fit a DE's HBM, of long prompts 11.
LONG_ANSWER: RoundLengths = (64, 0, 1600)
REBALANCING = RebalanceSettings(interval_s=5.0, switch_s=4.0, horizon_s=20.0, rest_s=5.0)


def setup_with(
    rebalancing: RebalanceSettings | None, mode: Mode = Mode.DUALPATH, **changes: object
) -> Setup:
    """Two prefill and three decode nodes of one engine each, unless changed."""
    cluster = {
        "prefill_nodes": 2,
        "decode_nodes": 3,
        "prefill_nodes_per_group": 0,
        "decode_nodes_per_group": 0,
        "decode_hbm_bytes": 12e6,
        "rebalancing": rebalancing,
        **changes,
    }
    return msgspec.structs.replace(
        small_setup(mode, **cluster), model=small_model(prefill_tokens_per_s=1000.0)
    )


def arriving(*phases: tuple[RoundLengths, float, float, float]) -> AgentTable:
    """Agents of one round each: (round, per second, from, until)."""
    rounds, start_s = [], []
    for lengths, per_s, from_s, until_s in phases:
        times = np.arange(from_s, until_s, 1 / per_s)
        rounds += [[lengths]] * times.size
        start_s += times.tolist()
    return agents_of(*rounds, start_s=start_s)


def run(
    rebalancing: RebalanceSettings | None,
    agents: AgentTable,
    mode: Mode = Mode.DUALPATH,
    **changes: object,
) -> SimulationResult:
    return simulate(setup_with(rebalancing, mode, **changes), agents, core="reference")


def shapes(result: SimulationResult, prefill: int, decode: int) -> Iterable[tuple[int, int]]:
    """(P, D) in service after every departure and arrival, in order of time."""
    changes = []
    for move in result.moves:
        sign = 1 if move.to_role is Role.PREFILL else -1
        changes.append((move.decided_ns, (0, -1) if sign > 0 else (-1, 0)))
        if move.joined_ns >= 0:
            changes.append((move.joined_ns, (1, 0) if sign > 0 else (0, 1)))
    for _, (more_prefill, more_decode) in sorted(changes):
        prefill, decode = prefill + more_prefill, decode + more_decode
        yield prefill, decode


def assert_everything_is_done(result: SimulationResult, agents: AgentTable) -> None:
    assert (np.array(result.turns) >= 0).all()
    missed = int((agents.prompt_tokens - agents.hit_tokens).sum())
    assert int(result.batches.tokens.sum()) == missed


def test_a_node_follows_the_work_from_prefill_to_decode():
    agents = arriving((LONG_PROMPT, 2.6, 0, 120), (LONG_ANSWER, 7, 150, 270))
    fixed, moving = run(None, agents), run(REBALANCING, agents)
    early = [move for move in moving.moves if move.decided_ns < 120 * NS_PER_S]
    late = [move for move in moving.moves if move.decided_ns > 150 * NS_PER_S]
    assert {(move.to_role, move.reason) for move in early} == {(Role.PREFILL, "prefill-bound")}
    assert {(move.to_role, move.reason) for move in late} == {(Role.DECODE, "decode-bound")}
    assert len(early) + len(late) == len(moving.moves)
    assert all(min(shape) >= 1 for shape in shapes(moving, 2, 3))
    assert_everything_is_done(moving, agents)
    prompts = agents.prompt_tokens == LONG_PROMPT[0]
    assert moving.ttft_s()[prompts].mean() < 0.5 * fixed.ttft_s()[prompts].mean()
    assert moving.ttft_s().mean() < fixed.ttft_s().mean()


def test_a_node_that_moves_finishes_what_it_has_and_then_gets_ready():
    agents = arriving((LONG_PROMPT, 2.6, 0, 60), (LONG_ANSWER, 1, 0, 60))
    setup = setup_with(REBALANCING)
    result = simulate(setup, agents, core="reference", record_decisions=True)
    move = result.moves[0]
    decisions, turns = decisions_of(result), result.turns
    there = decisions.round[decisions.decode_engine == move.node]
    assert turns.assigned_ns[there].max() < move.decided_ns
    assert move.drained_ns == turns.finished_ns[there].max()
    assert move.joined_ns == move.drained_ns + 4 * NS_PER_S
    prefilled = decisions.round[decisions.prefill_engine == move.node]
    assert prefilled.size
    assert turns.assigned_ns[prefilled].min() >= move.joined_ns
    assert_everything_is_done(result, agents)


def test_a_balanced_load_moves_nothing_and_being_watched_changes_nothing():
    agents = arriving((LONG_PROMPT, 1.5, 0, 120), (LONG_ANSWER, 2, 0, 120))
    fixed, watched = run(None, agents), run(REBALANCING, agents)
    assert watched.moves == ()
    for left, right in zip(fixed.turns, watched.turns, strict=True):
        np.testing.assert_array_equal(left, right)


def test_work_that_waits_for_storage_calls_for_no_prefill_node():
    agents = agents_of(*[[(1000, 960, 2)] * 4] * 100)
    result = run(REBALANCING, agents, snic_bytes_per_s=5e5)
    assert result.moves == ()


def test_no_role_ever_loses_its_last_node():
    agents = arriving((LONG_PROMPT, 20, 0, 60))
    result = run(REBALANCING, agents, prefill_nodes=1, decode_nodes=2)
    assert len(result.moves) == 1
    assert list(shapes(result, 1, 2)) == [(1, 1), (2, 1)]
    assert_everything_is_done(result, agents)


def test_what_is_left_of_a_lock_step_unit_does_its_work_alone():
    """Two engines share the feed-forward work of a pass; after the move one has all of it."""
    agents = arriving((LONG_ANSWER, 8, 0, 60), (LONG_PROMPT, 1, 150, 151))
    model = small_model(
        prefill_tokens_per_s=1000.0,
        prefill=msgspec.structs.replace(
            small_model().prefill, attention_token_s=0.0, feed_forward_token_s=1e-3
        ),
    )
    setup = msgspec.structs.replace(
        setup_with(REBALANCING, decode_nodes=2, prefill_nodes_per_group=2), model=model
    )
    result = simulate(setup, agents, core="reference")
    assert [move.to_role for move in result.moves] == [Role.DECODE]
    last = result.batches.end_ns[-1] - result.batches.start_ns[-1]
    assert last / NS_PER_S == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    "change", [{"interval_s": 0.0}, {"switch_s": -1.0}, {"decode_node_tokens_per_s": 0.0}]
)
def test_settings_that_cannot_be_are_refused_by_name(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        msgspec.structs.replace(REBALANCING, **change)


def test_a_cluster_file_switches_it_on():
    text = "prefill_nodes = 1\ndecode_nodes = 2\n[rebalancing]\nswitch_s = 5.0\n"
    cluster = msgspec.toml.decode(text, type=type(small_setup().cluster))
    assert cluster.rebalancing == RebalanceSettings(switch_s=5.0)


def test_a_run_that_ends_early_reports_the_progress_of_the_move():
    agents = arriving((LONG_PROMPT, 2.6, 0, 120))
    whole = run(REBALANCING, agents).moves[0]
    until_s = whole.decided_ns / NS_PER_S + 1
    cut = simulate(setup_with(REBALANCING), agents, core="reference", until_s=until_s)
    assert cut.moves[0] == RoleMove(*whole[:5], cut.moves[0].drained_ns, -1)


EAGER = RebalanceSettings(
    interval_s=0.2,
    switch_s=0.1,
    horizon_s=0.5,
    margin=1.0,
    least_improvement=0.01,
    patience=1,
    rest_s=0.0,
    prefill_node_tokens_per_s=500.0,
    decode_node_tokens_per_s=500.0,
)
agent = st.builds(
    growing_agent,
    turns=st.integers(1, 6),
    first=st.integers(1, 900),
    append=st.integers(1, 300),
    generated=st.integers(1, 200),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(agent, min_size=1, max_size=8),
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    mode=st.sampled_from(list(Mode)),
    lockstep=st.booleans(),
    gpus=st.integers(1, 2),
    nodes_per_group=st.integers(0, 2),
    hbm_bytes=st.sampled_from([4e6, 2e7]),
    beta=st.sampled_from([500, 100_000]),
)
def test_with_any_moves_every_round_is_done_and_every_role_has_a_node(
    rows, prefill, decode, mode, lockstep, gpus, nodes_per_group, hbm_bytes, beta
):
    agents = agents_of(*rows)
    setup = setup_with(
        EAGER,
        mode,
        prefill_nodes=prefill,
        decode_nodes=decode,
        gpus_per_node=gpus,
        lockstep=lockstep,
        prefill_nodes_per_group=nodes_per_group,
        decode_nodes_per_group=nodes_per_group,
        decode_hbm_bytes=hbm_bytes,
        beta_tokens=beta,
    )
    result = simulate(setup, agents, core="reference")
    assert_everything_is_done(result, agents)
    assert all(min(shape) >= 1 for shape in shapes(result, prefill, decode))
    if mode.moves_bytes:
        read_bytes = result.links.snic_read_bytes.sum()
        np.testing.assert_allclose(read_bytes, agents.hit_tokens.sum() * 1000.0, rtol=1e-6)
