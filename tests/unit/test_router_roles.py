"""Engines that change their role: the router keeps the wish, who supervises them the switch."""

from typing import Any

import pytest
from tests.unit.router_cluster import Cluster, cluster

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.ops.launch.role_wishes import INTERVAL_S, RoleWishes
from dualpath.router.control.roles import TAKE_UP_S, Roles, Switch, SwitchState

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
        self.roles.look()
        return self.roles.under_way


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
        story.roles.ask(Role.DECODE, "p1", "decode-bound")
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
            story.roles.ask(Role.PREFILL, "d0")
        with pytest.raises(BadRequestError, match="no prefill engine 'd0'"):
            story.roles.ask(Role.DECODE, "d0")
        story.roles.ask(Role.DECODE, None)
        with pytest.raises(BadRequestError, match="one engine at a time"):
            story.roles.ask(Role.DECODE, "p0")


async def test_a_wish_that_nobody_takes_up_is_over_and_so_is_one_for_what_is_the_last_by_now() -> (
    None
):
    async with cluster(prefill=2, decode=1) as made:
        story = Story(made)
        story.roles.ask(Role.DECODE, "p1")
        assert story.at(TAKE_UP_S) is not None
        assert story.at(TAKE_UP_S + 1) is None
        assert "nobody took it up" in story.ended[0].note
        story.roles.ask(Role.DECODE, "p1")
        await ends(made, "p0")
        assert story.at(TAKE_UP_S + 2) is None
        assert [s.state for s in story.ended] == [SwitchState.CANCELLED] * 2
        assert "the last prefill engine" in story.ended[1].note


async def test_an_engine_that_does_not_come_back_is_lost_and_one_in_its_old_role_is_told_so() -> (
    None
):
    async with cluster(prefill=3, decode=1) as made:
        story = Story(made)
        story.roles.ask(Role.DECODE, "p1")
        await ends(made, "p1")
        assert story.at(TIMEOUT_S) is not None
        assert story.at(TIMEOUT_S + 1) is None
        assert story.ended[0].state is SwitchState.LOST
        story.roles.ask(Role.DECODE, "p2")
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
        self.roles = {"pe-0": Role.PREFILL, "pe-1": Role.PREFILL}
        self.begun: list[tuple[str, Role]] = []
        units = {"pe-0": "pe-0", "pe-1-dp0": "pe-1", "pe-1-dp1": "pe-1"}
        self.wishes = RoleWishes(lambda: self.answer, units, self.roles, self._change)

    def _change(self, unit: str, role: Role) -> None:
        self.roles[unit] = role
        self.begun.append((unit, role))


def wish(*engines: str, state: str = "asked") -> dict[str, Any]:
    return {"switch": {"engines": list(engines), "to_role": "decode", "state": state}}


def test_a_wish_is_carried_out_once_however_often_it_is_heard() -> None:
    made = Supervisor()
    made.wishes.turn(0.0)
    made.answer = wish("pe-1-dp0", "pe-1-dp1")
    made.wishes.turn(INTERVAL_S / 2)
    assert made.begun == []
    for number in range(1, 4):
        made.wishes.turn(number * INTERVAL_S)
    assert made.begun == [("pe-1", Role.DECODE)]


@pytest.mark.parametrize(
    "answer",
    [
        {"switch": None},
        wish("elsewhere"),
        wish("pe-0", state="draining"),
    ],
)
def test_what_is_not_asked_of_these_engines_is_left_alone(answer: dict[str, Any]) -> None:
    made = Supervisor()
    made.answer = answer
    made.wishes.turn(0.0)
    assert made.begun == []
