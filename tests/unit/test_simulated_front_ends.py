"""Simulated front ends of a scheduler, and engines that change their role."""

import pytest
from tests.fault_stories import Stories, finds

from dualpath_lab.faults.simulation.run import run_seed
from dualpath_lab.faults.simulation.settings import has_trainer, units_of_seed

#: Every fourth cluster has front ends, half of these a standby router.
FRONT_ENDS = [seed for seed in range(160) if seed % 8 in (1, 3)]
#: Those of these with two units.
UNITS = [seed for seed in FRONT_ENDS if units_of_seed(seed) > 1]
#: For bugs: which seeds find one changes with the code.
MORE_FRONT_ENDS = [seed for seed in range(640) if seed % 8 in (1, 3)]
#: In every seventh cluster engines change their role.
ROLES = range(3, 213, 7)
#: For bugs that one in some twenty seeds finds; which seed does changes with the code.
MORE_ROLES = range(3, 1403, 7)


def test_a_killed_front_end_ends_only_its_own_streams_and_a_stopped_one_none() -> None:
    runs = Stories(FRONT_ENDS, "kill a front end", "stop a front end")
    assert runs.more_than(10, r"fe-\d#\d+ +is dead")
    assert runs.more_than(2, r"agent\S+ +ends: reset")
    assert runs.more_than(10, r"fe-\d#\d+ +is stopped")
    # A front end with its old name is recognized at once, others time out.
    assert runs.more_than(0, "front end fe-.* is lost: it has registered again")
    assert runs.more_than(0, "front end fe-.* is lost: silent for 2 s")


def test_when_the_scheduler_is_killed_decoding_streams_continue_and_others_are_placed_again() -> (
    None
):
    runs = Stories(FRONT_ENDS, "kill the router", "kill the router and a front end")
    assert runs.more_than(20, r"router#\d+ +is dead")
    assert runs.more_than(5, r"trying again: the scheduler at \S+ is lost")


def test_when_a_unit_is_killed_its_requests_are_answered_by_the_other_one() -> None:
    runs = Stories(UNITS, "kill a unit")
    assert runs.more_than(5, r"adversary +kill a unit$")
    assert runs.more_than(2, r"router-1#\d+ +is dead")
    assert runs.more_than(4, r"[pd]e-10#\d+ +is dead")
    assert runs.count("EngineLostError") == 0


def test_a_terminated_front_end_drains_its_requests() -> None:
    untrained = [seed for seed in FRONT_ENDS if not has_trainer(seed)]  # Updates end attempts.
    runs = Stories(untrained, "terminate a front end")
    assert runs.more_than(10, r"fe-\d#\d+ +has drained")
    assert runs.count("EngineLostError") == 0


def test_engines_change_their_role_and_no_request_fails() -> None:
    runs = Stories(ROLES)
    assert runs.more_than(3, r"to prefill: joined after")
    assert runs.more_than(3, r"to decode: joined after")
    assert runs.more_than(5, r"is to be \w+ with [23] ranks")
    assert runs.count("trying again") == 0


def test_roles_change_while_engines_and_routers_are_killed() -> None:
    runs = Stories(ROLES, "kill an engine", "kill the router", "stop an engine")
    assert runs.more_than(5, r"to (prefill|decode): joined after")


def test_a_group_that_changes_its_size_is_killed_meanwhile() -> None:
    runs = Stories(MORE_ROLES[:45], "kill an engine", "kill a rank", "stop an engine")
    assert runs.more_than(5, r"is to be \w+ with [23] ranks")
    assert runs.more_than(5, r"[pd]e-\d-dp\d#\d+ +is dead")
    assert runs.more_than(5, r"joined after")


def test_frames_that_are_lost_in_one_direction_of_a_connection_are_sent_again() -> None:
    runs = Stories(FRONT_ENDS[:20], "reset a control connection")
    assert runs.more_than(2, r"(fe|pe|de)-\S+ +its frames to the router are lost")
    assert runs.more_than(2, r"(fe|pe|de)-\S+ +its frames from the router are lost")


def test_equal_seeds_with_front_ends_or_role_changes_give_equal_runs() -> None:
    for seed in (*FRONT_ENDS[:4], *ROLES[:3]):
        assert run_seed(seed).digest == run_seed(seed).digest


@pytest.mark.parametrize(
    ("name", "fault", "first"),
    [
        ("epoch-ignored", "restart a decode engine unnoticed", None),
        ("front-end-unwatched", "kill a front end", None),
        ("front-end-attempts-stay", "kill a front end", None),
        ("calls-keep-waiting", "kill the router", None),
        ("decoding-ends", "kill the router", 1),
        ("unannounced", "kill the router", None),
        ("engines-unnumbered", "reset a control connection", 17),
    ],
)
def test_planted_bugs_of_front_ends_are_found(name: str, fault: str, first: int | None) -> None:
    assert finds(name, MORE_FRONT_ENDS, fault, first=first)


@pytest.mark.parametrize("name", ["unit-not-left", "unit-charged"])
def test_planted_bugs_of_units_are_found(name: str) -> None:
    assert finds(name, UNITS, "kill an engine")


@pytest.mark.parametrize("name", ["undrained", "last-of-role", "size-kept"])
def test_planted_bugs_of_role_changes_are_found(name: str) -> None:
    assert finds(name, MORE_ROLES)
