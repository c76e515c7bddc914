"""What the policy measures while it watches, and when it is silent."""

import pytest

from dualpath.core.cluster import Role
from dualpath.policy.rebalance import (
    Decision,
    Move,
    RebalanceSettings,
    RoleNodes,
    RolePolicy,
    RoleQueue,
    Stay,
    switch_cost_s,
)

INTERVAL_S = 10.0
SETTINGS = RebalanceSettings(
    interval_s=INTERVAL_S, switch_s=30.0, horizon_s=60.0, patience=1, rest_s=20.0
)
#: Two nodes with HBM for 500 tokens each.
NODES = RoleNodes(prefill=1, decode=2, decode_hbm_tokens=1000)
PREFILL_TOKENS_PER_S = 100.0


class Story:
    """A policy, and what it is asked."""

    def __init__(self, settings: RebalanceSettings = SETTINGS) -> None:
        self.policy = RolePolicy(settings)
        self.took_s: list[float] = []
        self.switching = False

    def stayed(self, seconds: float) -> None:
        """Let a request be decoded for so long."""
        self.policy.loaded("short", 10)
        self.policy.prefilled("short", 10, 100.0)
        self.policy.over("short", 100.0 + seconds)

    def look(self, prefill_tokens: int, nodes: RoleNodes = NODES) -> Decision:
        """Look at a cluster in which so many tokens wait for prefill."""
        queues = {
            Role.PREFILL: RoleQueue(prefill_tokens, 0, 0),
            Role.DECODE: RoleQueue(0, 0, 0),
        }
        return self.policy.evaluate(
            nodes, queues, PREFILL_TOKENS_PER_S, self.took_s, switching=self.switching
        )


def test_nothing_is_decided_before_a_request_is_over_or_without_an_engine_of_a_role() -> None:
    story = Story()
    story.policy.loaded("large", 100_000)
    assert story.look(100_000) == Stay("unmeasured")
    story.stayed(5.0)
    assert story.look(100_000, RoleNodes(0, 2, 1000)) == Stay("unmeasured")
    assert isinstance(story.look(100_000), Move)


def test_prompts_of_intervals_that_were_not_looked_at_count_in_none() -> None:
    story = Story()
    for number in range(3):
        story.policy.loaded(f"r{number}", 2000)
        story.policy.prefilled(f"r{number}", 2000, 0.0)
        assert story.look(0) == Stay("unmeasured")
    story.policy.over("r0", 5.0)
    # 6,000 tokens would fill six intervals of the one prefill node, and call for another beside it.
    story.policy.loaded("small", 600)
    assert story.look(600) == Stay("balanced")


def test_a_switch_costs_what_switches_took_and_before_any_the_setting() -> None:
    story = Story()
    story.stayed(5.0)
    story.policy.loaded("large", 20_000)
    first = story.look(20_000)
    assert isinstance(first, Move)
    story.took_s = [4.0, 8.0, 6.0]
    for _ in range(2):
        assert story.look(20_000) == Stay("rest")
    second = story.look(20_000)
    assert isinstance(second, Move)
    assert second.cost_s == pytest.approx(first.cost_s * 6.0 / 30.0)
    assert switch_cost_s([]) is None
    # Old ones are removed.
    assert switch_cost_s([1000.0] * 20 + [1.0] * 16) == 1.0


def test_while_a_node_switches_nothing_is_decided_and_the_rest_begins_afterwards() -> None:
    story = Story()
    story.stayed(5.0)
    story.policy.loaded("large", 100_000)
    assert isinstance(story.look(100_000), Move)
    story.switching = True
    assert [story.look(100_000) for _ in range(5)] == [Stay("switching")] * 5
    story.switching = False
    seen = [story.look(100_000) for _ in range(3)]
    assert seen[:2] == [Stay("rest")] * 2
    assert isinstance(seen[2], Move)
