"""Re-balancing: a node moves when it pays, and only then."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.policy.rebalance import (
    ClusterObservation,
    Move,
    Rebalancer,
    RebalanceSettings,
    RoleLoad,
    Stay,
    weigh,
)

RATE = 1000.0
INTERVAL_S = 30.0
SETTINGS = RebalanceSettings(
    prefill_node_tokens_per_s=RATE, decode_node_tokens_per_s=RATE, patience=1, rest_s=0.0
)


def observed(
    prefill: tuple[int, float],
    decode: tuple[int, float],
    waiting_nodes: tuple[float, float] = (0.0, 0.0),
    latency_s: tuple[float | None, float | None] = (None, None),
) -> ClusterObservation:
    """(nodes, utilisation) per role; the backlog as nodes needed over the horizon."""
    tokens_per_node = RATE * SETTINGS.horizon_s
    loads = [
        RoleLoad(
            nodes=nodes,
            utilisation=used,
            waiting_tokens=int(waiting * tokens_per_node),
            latency_s=latency,
        )
        for (nodes, used), waiting, latency in zip(
            (prefill, decode), waiting_nodes, latency_s, strict=True
        )
    ]
    return ClusterObservation(interval_s=INTERVAL_S, prefill=loads[0], decode=loads[1])


def test_a_backlog_at_the_prefill_nodes_takes_an_idle_decode_node():
    decision = weigh(SETTINGS, observed((2, 1.0), (4, 0.3), waiting_nodes=(1.0, 0.0)))
    assert isinstance(decision, Move)
    assert (decision.from_role, decision.to_role) == (Role.DECODE, Role.PREFILL)
    assert decision.reason == "prefill-bound"
    # Demand of 3 nodes on 2 then 3: 1.5 times too slow before, and while the node switches.
    assert decision.gain_s == pytest.approx(300 * 0.5)
    assert decision.cost_s == pytest.approx(30 * (1 - 1 / 1.5))


def test_a_backlog_at_the_decode_nodes_takes_a_prefill_node():
    decision = weigh(SETTINGS, observed((4, 0.4), (2, 1.0), waiting_nodes=(0.0, 1.0)))
    assert isinstance(decision, Move)
    assert decision.reason == "decode-bound"


@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (observed((2, 0.9), (4, 0.2)), "balanced"),
        (observed((2, 1.0), (4, 1.0), waiting_nodes=(1.0, 2.0)), "balanced"),
        (observed((2, 1.0), (1, 0.1), waiting_nodes=(4.0, 0.0)), "last-node"),
        (observed((20, 1.0), (10, 0.5), waiting_nodes=(0.6, 0.0)), "small-improvement"),
    ],
)
def test_nothing_moves_without_need_or_help(observation, reason):
    assert weigh(SETTINGS, observation) == Stay(reason)


def test_a_move_that_costs_more_than_the_horizon_brings_is_not_made():
    slow = RebalanceSettings(
        prefill_node_tokens_per_s=RATE,
        decode_node_tokens_per_s=RATE,
        switch_s=500.0,
        horizon_s=300.0,
    )
    # The giver, one node short, would be the bottleneck for longer than the horizon.
    observation = observed((2, 1.0), (4, 0.7), waiting_nodes=(0.4, 0.0))
    assert weigh(slow, observation) == Stay("cost-exceeds-gain")
    assert isinstance(weigh(SETTINGS, observation), Move)


def test_a_missed_objective_requests_a_node_and_a_giver_meets_its_own():
    settings = RebalanceSettings(
        prefill_node_tokens_per_s=RATE,
        decode_node_tokens_per_s=RATE,
        ttft_slo_s=4.0,
        tpot_slo_s=0.05,
    )
    slow_start = observed((2, 0.9), (4, 0.3), latency_s=(6.0, 0.02))
    assert isinstance(weigh(settings, slow_start), Move)
    tight_decode = observed((2, 0.9), (4, 0.3), latency_s=(6.0, 0.045))
    assert weigh(settings, tight_decode) == Stay("giver-breaks-slo")


def test_a_move_needs_patience_and_is_followed_by_rest():
    settings = RebalanceSettings(
        prefill_node_tokens_per_s=RATE,
        decode_node_tokens_per_s=RATE,
        switch_s=20.0,
        patience=2,
        rest_s=40.0,
    )
    policy = Rebalancer(settings)
    busy = observed((2, 1.0), (4, 0.1), waiting_nodes=(2.0, 0.0))
    calm = observed((2, 0.5), (4, 0.1))
    assert policy.observe(busy) == Stay("patience")
    assert policy.observe(calm) == Stay("balanced")
    assert policy.observe(busy) == Stay("patience")
    assert isinstance(policy.observe(busy), Move)
    assert [policy.observe(busy) for _ in range(3)] == [
        Stay("rest"),
        Stay("rest"),
        Stay("patience"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_node_tokens_per_s": 0.0},
        {"switch_s": -1.0},
        {"margin": 0.5},
        {"patience": 0},
        {"least_improvement": 0.0},
        {"ttft_slo_s": math.nan},
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(change):
    values = {"prefill_node_tokens_per_s": RATE, "decode_node_tokens_per_s": RATE, **change}
    with pytest.raises(ConfigError, match=next(iter(change))):
        Rebalancer(RebalanceSettings(**values))


def test_an_observation_that_cannot_be_is_refused():
    policy = Rebalancer(SETTINGS)
    with pytest.raises(ConfigError, match="prefill has 0 nodes"):
        policy.observe(observed((0, 0.5), (4, 0.5)))
    with pytest.raises(ConfigError, match=r"utilisation of decode is 1\.5"):
        policy.observe(observed((1, 0.5), (4, 1.5)))


def play(demand: tuple[float, float], shape: list[int], steps: int, backlog: bool) -> list[Move]:
    """Run a constant demand (in nodes) against the policy; ``shape`` is left as it ends."""
    policy = Rebalancer(SETTINGS)
    moves = []
    waiting = [0.0, 0.0]
    for _ in range(steps):
        if backlog:
            for role in (0, 1):
                short = (demand[role] - shape[role]) * INTERVAL_S / SETTINGS.horizon_s
                waiting[role] = max(0.0, waiting[role] + short)
        else:
            waiting = [max(0.0, demand[role] - shape[role]) for role in (0, 1)]
        used = [min(1.0, demand[role] / shape[role]) for role in (0, 1)]
        decision = policy.observe(
            observed((shape[0], used[0]), (shape[1], used[1]), (waiting[0], waiting[1]))
        )
        if isinstance(decision, Move):
            moves.append(decision)
            step = 1 if decision.to_role is Role.PREFILL else -1
            shape[0] += step
            shape[1] -= step
    return moves


@given(
    st.floats(0.0, 40.0),
    st.floats(0.0, 40.0),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_under_constant_demand_nodes_only_move_one_way_and_every_role_has_one(
    prefill, decode, prefill_nodes, decode_nodes
):
    shape = [prefill_nodes, decode_nodes]
    moves = play((prefill, decode), shape, 2 * sum(shape) + 10, backlog=False)
    assert len({move.to_role for move in moves}) <= 1
    assert min(shape) >= 1
    assert sum(shape) == prefill_nodes + decode_nodes
    assert play((prefill, decode), shape, 30, backlog=False) == []


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 24),
    st.floats(0.3, 0.85),
    st.floats(0.3, 0.85),
)
def test_a_load_that_some_shape_serves_is_served_in_the_end_even_with_a_backlog(
    right_prefill, right_decode, start, prefill_use, decode_use
):
    nodes = right_prefill + right_decode
    start = min(start, nodes - 1)
    if nodes < 2:
        return
    demand = (right_prefill * prefill_use, right_decode * decode_use)
    shape = [start, nodes - start]
    play(demand, shape, 600, backlog=True)
    assert play(demand, shape, 50, backlog=True) == []
    assert demand[0] <= shape[0]
    assert demand[1] <= shape[1]


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 30),
    st.floats(0, 30),
)
def test_a_move_always_gains_more_than_it_costs_and_leaves_a_node(
    prefill_nodes, decode_nodes, prefill_used, decode_used, prefill_waiting, decode_waiting
):
    decision = weigh(
        SETTINGS,
        observed(
            (prefill_nodes, prefill_used),
            (decode_nodes, decode_used),
            (prefill_waiting, decode_waiting),
        ),
    )
    if isinstance(decision, Move):
        giver = prefill_nodes if decision.from_role is Role.PREFILL else decode_nodes
        assert giver > 1
        assert decision.gain_s > SETTINGS.margin * decision.cost_s >= 0
