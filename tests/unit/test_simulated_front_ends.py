"""Simulated front ends before a scheduler, and engines that change their role."""

import re

import pytest

from dualpath.laboratory.chaos.simulation.adversary import KINDS, Kind
from dualpath.laboratory.chaos.simulation.plants import planted
from dualpath.laboratory.chaos.simulation.play import play

#: Every fourth cluster has front ends, every second of these a router that stands by.
FRONT_ENDS = [seed for seed in range(160) if seed % 8 in (1, 3)]
#: In every seventh engines change their role.
ROLES = range(3, 213, 7)
#: For what one of some twenty finds: which one does changes with all that is played.
MORE_ROLES = range(3, 1403, 7)


def of(*names: str) -> list[Kind]:
    """Return these kinds of faults."""
    return [kind for kind in KINDS if kind.name in names]


def stories(seeds: range | list[int], *names: str) -> list[str]:
    """Return the lines of runs with these faults, none of which has a problem."""
    lines: list[str] = []
    for seed in seeds:
        outcome = play(seed, story=True, kinds=of(*names))
        assert not outcome.problems, "\n".join(outcome.story)
        lines += outcome.story
    return lines


def count(lines: list[str], pattern: str) -> int:
    """Return how many lines have this."""
    return sum(re.search(pattern, line) is not None for line in lines)


def test_a_front_end_that_is_killed_costs_its_own_streams_and_stands_still_without_harm() -> None:
    told = stories(FRONT_ENDS, "kill a front end", "stop a front end")
    assert count(told, r"fe-\d#\d+ +is dead") > 10
    assert count(told, r"agent\S+ +ends: reset") > 2
    assert count(told, r"fe-\d#\d+ +stands still") > 10
    # One that keeps its name is known again at once, others are missed.
    assert count(told, "front end fe-.* is lost: it has begun anew") > 0
    assert count(told, "front end fe-.* is lost: silent for 2 s") > 0


def test_streams_that_decode_go_on_when_the_scheduler_is_killed_and_others_are_placed_again() -> (
    None
):
    told = stories(FRONT_ENDS, "kill the router", "kill the router and a front end")
    assert count(told, r"router#\d+ +is dead") > 20
    assert count(told, r"trying again: the scheduler at \S+ is lost") > 5


def test_a_front_end_that_is_asked_to_end_ends_what_it_has() -> None:
    told = stories(FRONT_ENDS, "terminate a front end")
    assert count(told, r"fe-\d#\d+ +has drained") > 10
    assert count(told, "EngineLostError") == 0


def test_engines_change_their_role_and_nothing_fails() -> None:
    told = stories(ROLES)
    assert count(told, r"to prefill: joined after") > 3
    assert count(told, r"to decode: joined after") > 3
    assert count(told, r"is to be \w+ with [23] ranks") > 5
    assert count(told, "trying again") == 0


def test_roles_change_while_engines_and_routers_are_killed() -> None:
    told = stories(ROLES, "kill an engine", "kill the router", "stop an engine")
    assert count(told, r"to (prefill|decode): joined after") > 5


def test_a_group_that_comes_back_with_another_size_is_killed_in_between() -> None:
    told = stories(ROLES, "kill an engine", "kill a rank", "stop an engine")
    assert count(told, r"is to be \w+ with [23] ranks") > 5
    assert count(told, r"[pd]e-\d-dp\d#\d+ +is dead") > 5
    assert count(told, r"joined after") > 5


def test_a_seed_with_front_ends_or_roles_that_change_gives_the_same_run_again() -> None:
    for seed in (*FRONT_ENDS[:4], *ROLES[:3]):
        assert play(seed).digest == play(seed).digest


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("front-end-unwatched", "kill a front end"),
        ("guest-stays", "kill a front end"),
        ("calls-wait-on", "kill the router"),
        ("decoding-ends", "kill the router"),
        ("unannounced", "kill the router"),
    ],
)
def test_planted_bugs_of_front_ends_are_found(name: str, fault: str) -> None:
    with planted(name):
        assert any(play(seed, kinds=of(fault)).problems for seed in FRONT_ENDS)


@pytest.mark.parametrize("name", ["undrained", "last-of-role", "size-kept"])
def test_planted_bugs_of_roles_that_change_are_found(name: str) -> None:
    with planted(name):
        assert any(play(seed, kinds=of()).problems for seed in MORE_ROLES)
