"""Simulated proxies of others, which send the legs of requests to engines."""

import pytest
from tests.fault_stories import count, of, stories

from dualpath_lab.faults.simulation.planted_bugs import planted
from dualpath_lab.faults.simulation.run import run_seed
from dualpath_lab.faults.simulation.settings import has_moves, has_proxies

#: A fifth of all clusters.
PROXIES = [seed for seed in range(110) if has_proxies(seed)]
#: For bugs: which seeds find one changes with the code.
MORE_PROXIES = [seed for seed in range(1500) if has_proxies(seed)]
#: Clusters in which KV is moved between decode engines.
MOVES = [seed for seed in range(2000) if has_moves(seed)]


def test_a_fifth_of_all_clusters_has_proxies_of_others() -> None:
    shares = sum(has_proxies(seed) for seed in range(3000)) / 3000
    assert 0.18 < shares < 0.22


def test_legs_in_every_order_twice_alone_or_crossed_are_answered_without_a_failure() -> None:
    lines = stories(PROXIES)
    for way in (
        *("in turn$", "as leg 1 answers", "names the decode engine", "names the address"),
        *("at once$", "at once with an id", "at once in a room", "leg 2 comes first"),
        *("leg 1 is sent twice", "both legs are sent twice", "leg 2 is sent twice"),
        *("sent alone", "never sent", "KV of another request", "the proxy leaves"),
    ):
        assert count(lines, f"its legs: .*{way}") > 0, way
    assert count(lines, "leg 2 at .*: transferred; leg-.*; at de-.*: move_kv is off") > 3
    assert count(lines, "leg 2 at .*: transferred; leg-") > 50
    assert count(lines, "leg 2 at .*: prefilled by pe-.* again") > 5
    assert count(lines, "its second leg did not come within 3 s") > 3
    assert count(lines, "a leg has failed") == 0


def test_an_engine_or_the_router_that_ends_between_the_legs_costs_no_answer() -> None:
    lines = stories(PROXIES, "kill an engine or the router between two legs")
    assert count(lines, "given up between its legs: engine de-.* is lost") > 3
    assert count(lines, r"router#\d+ +is dead") > 1
    assert count(lines, r"pe-\d#\d+ +is dead") > 1


def test_kv_is_moved_to_the_decode_engine_that_gets_a_second_leg_or_the_leg_is_passed_on() -> None:
    lines = stories(MOVES[:24])
    assert count(lines, "leg 2 at .*: transferred; leg-.*; moved from de-") > 10
    assert count(lines, "; at de-.*: engine 'de-.*' has no room now") > 0
    assert count(lines, "its legs: in turn, leg 2 comes late") > 0
    assert count(lines, "a leg has failed") == 0


def test_engines_of_several_ranks_move_kv_however_they_are_cut() -> None:
    lines = stories([seed for seed in MOVES if seed % 4 == 2][:12])
    assert count(lines, "world .* engines of . and . ranks") == 12
    assert count(lines, "leg 2 at .*: transferred; leg-.*; moved from de-") > 3


def test_decode_engines_that_are_killed_or_stopped_during_a_move_cost_no_answer() -> None:
    lines = stories(MOVES[:24], "kill or stop a decode engine of a move")
    assert count(lines, "leg 2 at .*: transferred; leg-.*; moved from de-") > 10
    assert count(lines, "is given up between its legs: engine de-.* is lost") > 3
    assert count(lines, r"de-\d#\d+ +is stopped") > 3


def test_moves_with_messages_that_are_late_or_come_twice_and_transfers_that_fail() -> None:
    lines = stories(
        MOVES[24:48],
        *("stalling transfers", "failing transfers", "hanging transfers"),
        *("duplicate control messages", "stall a control connection", "reset a control connection"),
    )
    assert count(lines, "leg 2 at .*: transferred; leg-.*; moved from de-") > 10


def test_a_proxy_that_is_killed_between_the_legs_leaves_nothing_behind() -> None:
    lines = stories(PROXIES, "kill a proxy", "let a client leave")
    assert count(lines, r"proxy-\d#\d+ +is dead") > 5


def test_a_leg_at_an_engine_that_hangs_is_answered_by_another_one() -> None:
    lines = stories(PROXIES, "hang a core")
    assert count(lines, "its core has made no step for .* while a call waits for it") > 1


def test_equal_seeds_with_proxies_give_equal_runs() -> None:
    for seed in PROXIES[:4]:
        assert run_seed(seed).digest == run_seed(seed).digest


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("late-leg-freed", "stalling transfers"),
        ("leg-of-another", "let a client leave"),
        ("offer-unending", "let a client leave"),
        ("leg-unwatched", "hang a core"),
        ("own-call-unwatched", "hang a core"),
        ("first-leg-unended", "let a client leave"),
    ],
)
def test_planted_bugs_of_legs_are_found(name: str, fault: str) -> None:
    with planted(name):
        assert any(run_seed(seed, kinds=of(fault)).problems for seed in MORE_PROXIES)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("move-unawaited", "let a client leave"),
        ("moved-from-freed", "stalling transfers"),
        ("moved-from-restarted", "kill an engine or the router between two legs"),
    ],
)
def test_planted_bugs_of_moves_are_found(name: str, fault: str) -> None:
    with planted(name):
        assert any(run_seed(seed, kinds=of(fault)).problems for seed in MOVES)
