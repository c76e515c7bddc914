"""Role changes of engines: the router stores the request, the supervisor restarts the engine."""

import asyncio
from typing import Any

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import FakeEngine, expected, job

from dualpath.core.cluster import GroupRank, Role, UnitShape
from dualpath.core.errors import BadRequestError
from dualpath.launch.local_cluster import INTERVAL_S, RequestedRoles
from dualpath.router.scheduler.roles import TAKE_UP_S, Roles, Switch, SwitchState

TIMEOUT_S = 100.0


class Story:
    """The roles of a cluster, and time."""

    def __init__(self, made: Cluster) -> None:
        self.now_s = 0.0
        self.ended: list[Switch] = []
        registry = made.service.registry
        self.roles = Roles(registry, lambda: self.now_s, TIMEOUT_S, self.ended.append)

    def at(self, now_s: float) -> Switch | None:
        """Look at a time; return the switch under way."""
        self.now_s = now_s
        self.roles.poll()
        return self.roles.current


async def ends(made: Cluster, engine_id: str) -> None:
    """End an engine's process; the router has noticed."""
    await made.engines[engine_id].kill()
    made.lose(engine_id, certain=True)


async def starts(made: Cluster, engine_id: str, role: Role) -> None:
    """Start its next process in a role."""
    made.engines[engine_id].role = role
    await made.revive(engine_id)


async def test_an_engine_drains_and_is_back_in_its_other_role_and_the_time_is_known() -> None:
    async with cluster(prefill=2, decode=1) as made:
        story = Story(made)
        story.roles.request(Role.DECODE, "p1", "decode-bound")
        await ends(made, "p1")
        switch = story.at(5.0)
        assert switch is not None
        assert (switch.state, switch.drained_after_s) == (SwitchState.STARTING, 5.0)
        await starts(made, "p1", Role.DECODE)
        assert story.at(12.0) is None
        assert [(s.state, s.took_s, s.reason) for s in story.ended] == [
            (SwitchState.JOINED, 12.0, "decode-bound")
        ]
        assert story.roles.cost_s == 12.0
        report = story.roles.report()
        assert (report["prefill"], report["decode"], report["switch"]) == (1, 2, None)


async def test_the_last_engine_of_a_role_stays_and_one_changes_at_a_time() -> None:
    async with cluster(prefill=2, decode=1) as made:
        story = Story(made)
        with pytest.raises(BadRequestError, match="at least 1 has to stay"):
            story.roles.request(Role.PREFILL, "d0")
        with pytest.raises(BadRequestError, match="no prefill engine 'd0'"):
            story.roles.request(Role.DECODE, "d0")
        story.roles.request(Role.DECODE, None)
        with pytest.raises(BadRequestError, match="one engine or group at a time"):
            story.roles.request(Role.DECODE, "p0")


async def test_a_requested_switch_expires_unless_it_starts_and_the_role_has_others() -> None:
    async with cluster(prefill=2, decode=1) as made:
        story = Story(made)
        story.roles.request(Role.DECODE, "p1")
        assert story.at(TAKE_UP_S) is not None
        assert story.at(TAKE_UP_S + 1) is None
        assert "no supervisor took it up" in story.ended[0].note
        story.roles.request(Role.DECODE, "p1")
        await ends(made, "p0")
        assert story.at(TAKE_UP_S + 2) is None
        assert [s.state for s in story.ended] == [SwitchState.CANCELLED] * 2
        assert "the last prefill engine" in story.ended[1].note


async def test_a_switch_fails_if_the_engine_is_lost_or_returns_in_its_old_role() -> None:
    async with cluster(prefill=3, decode=1) as made:
        story = Story(made)
        story.roles.request(Role.DECODE, "p1")
        await ends(made, "p1")
        assert story.at(TIMEOUT_S) is not None
        assert story.at(TIMEOUT_S + 1) is None
        assert story.ended[0].state is SwitchState.LOST
        story.roles.request(Role.DECODE, "p2")
        await ends(made, "p2")
        await starts(made, "p2", Role.PREFILL)
        assert story.at(TIMEOUT_S + 2) is None
        assert story.ended[1].state is SwitchState.CANCELLED
        assert "started as prefill again" in story.ended[1].note
        assert story.roles.cost_s is None


class Supervisor:
    """Units of a story, the answers of its router, and what was begun."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = None
        self.shapes = {name: UnitShape(Role.PREFILL) for name in ("pe-0", "pe-1")}
        self.begun: list[tuple[str, UnitShape]] = []
        units = {"pe-0": "pe-0", "pe-1-dp0": "pe-1", "pe-1-dp1": "pe-1"}
        self.requested = RequestedRoles(
            lambda: self.answer, units, self.shapes, lambda role: 1, self._change
        )

    def _change(self, unit: str, shape: UnitShape) -> None:
        self.shapes[unit] = shape
        self.begun.append((unit, shape))


def requested(*engines: str, state: str = "asked", ranks: int | None = None) -> dict[str, Any]:
    return {
        "switch": {
            "engines": list(engines),
            "to_role": "decode",
            "to_ranks": ranks,
            "state": state,
        }
    }


def test_a_requested_switch_is_executed_once_however_often_it_is_received() -> None:
    made = Supervisor()
    made.requested.poll(0.0)
    made.answer = requested("pe-1-dp0", "pe-1-dp1")
    made.requested.poll(INTERVAL_S / 2)
    assert made.begun == []
    for number in range(1, 4):
        made.requested.poll(number * INTERVAL_S)
    assert made.begun == [("pe-1", UnitShape(Role.DECODE))]


@pytest.mark.parametrize(
    "answer",
    [
        {"switch": None},
        requested("elsewhere"),
        requested("pe-0", state="draining"),
    ],
)
def test_what_is_not_asked_of_these_engines_is_left_alone(answer: dict[str, Any]) -> None:
    made = Supervisor()
    made.answer = answer
    made.requested.poll(0.0)
    assert made.begun == []


async def group(made: Cluster, name: str, start: int, size: int, role: Role) -> None:
    """Restart a group with so many ranks; they all join."""
    engines = []
    for rank in range(size):
        rank_id = f"{name}-dp{rank}" if size > 1 else name
        # A name that was here before is another process of the same engine.
        engine = made.engines.get(rank_id) or FakeEngine(rank_id, role, made.stored)
        engine.role = role
        engine.dp = GroupRank(name, f"start {start}", rank, size) if size > 1 else None
        made.engines[rank_id] = engine
        engines.append(engine)
    await asyncio.gather(*(engine.join(made.network) for engine in engines))


@pytest.mark.parametrize(("size", "next_size"), [(2, 3), (3, 1), (1, 2), (3, 2)])
async def test_a_group_comes_back_with_another_size_and_its_switch_is_over(
    size: int, next_size: int
) -> None:
    async with cluster(prefill=1, decode=1) as made:
        await group(made, "g", 1, size, Role.PREFILL)
        story = Story(made)
        switch = story.roles.request(None, "g", ranks=next_size)
        assert len(switch.engines) == size
        assert switch.to_role is Role.PREFILL
        for engine_id in switch.engines:
            await ends(made, engine_id)
        assert story.at(5.0) is switch
        await group(made, "g", 2, next_size, Role.PREFILL)
        assert story.at(9.0) is None
        assert [(s.state, s.to_ranks) for s in story.ended] == [(SwitchState.JOINED, next_size)]
        assert len(story.roles.nodes(Role.PREFILL)) == 2
        tokens = range(100)
        assert await made.run(job("a", tokens)) == expected(tokens, 6)


async def test_a_group_changes_role_and_size_in_one_switch() -> None:
    async with cluster(prefill=1, decode=1) as made:
        await group(made, "g", 1, 2, Role.PREFILL)
        story = Story(made)
        switch = story.roles.request(Role.DECODE, "g-dp1", ranks=3)
        for engine_id in switch.engines:
            await ends(made, engine_id)
        await group(made, "g", 2, 3, Role.DECODE)
        assert story.at(9.0) is None
        assert story.ended[0].state is SwitchState.JOINED


async def test_a_switch_fails_if_the_group_returns_unchanged() -> None:
    async with cluster(prefill=1, decode=1) as made:
        await group(made, "g", 1, 2, Role.PREFILL)
        story = Story(made)
        with pytest.raises(BadRequestError, match="g has 2 ranks already"):
            story.roles.request(None, "g", ranks=2)
        with pytest.raises(BadRequestError, match='give "role", "ranks" or both'):
            story.roles.request(None, "g")
        with pytest.raises(BadRequestError, match="no engine or group 'h'"):
            story.roles.request(None, "h", ranks=2)
        switch = story.roles.request(None, "g", ranks=4)
        for engine_id in switch.engines:
            await ends(made, engine_id)
        await group(made, "g", 2, 2, Role.PREFILL)
        assert story.at(9.0) is None
        assert story.ended[0].state is SwitchState.CANCELLED
        assert "started as prefill with 2 ranks again" in story.ended[0].note


def test_a_group_is_restarted_once_for_another_size_only() -> None:
    made = Supervisor()
    made.answer = {"switch": {**requested("pe-0")["switch"], "to_role": "prefill", "to_ranks": 3}}
    for number in range(1, 4):
        made.requested.poll(number * INTERVAL_S)
    assert made.begun == [("pe-0", UnitShape(Role.PREFILL, 3))]
