"""Simulated proxies of others, which send the legs of requests to engines."""

import pytest
from tests.fault_stories import Stories, finds

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
    runs = Stories(PROXIES)
    for way in (
        *("in turn$", "as leg 1 answers", "names the decode engine", "names the address"),
        *("at once$", "at once with an id", "at once in a room", "leg 2 comes first"),
        *("leg 1 is sent twice", "both legs are sent twice", "leg 2 is sent twice"),
        *("sent alone", "never sent", "KV of another request", "the proxy leaves"),
    ):
        assert runs.more_than(0, f"its legs: .*{way}"), way
    assert runs.more_than(3, "leg 2 at .*: transferred; leg-.*; at de-.*: move_kv is off")
    assert runs.more_than(50, "leg 2 at .*: transferred; leg-")
    assert runs.more_than(5, "leg 2 at .*: prefilled by pe-.* again")
    assert runs.more_than(3, "its second leg did not come within 3 s")
    assert runs.count("a leg has failed") == 0


def test_an_engine_or_the_router_that_ends_between_the_legs_costs_no_answer() -> None:
    runs = Stories(PROXIES, "kill an engine or the router between two legs")
    assert runs.more_than(3, "given up between its legs: engine de-.* is lost")
    assert runs.more_than(1, r"router#\d+ +is dead")
    assert runs.more_than(1, r"pe-\d#\d+ +is dead")


def test_kv_is_moved_to_the_decode_engine_that_gets_a_second_leg_or_the_leg_is_passed_on() -> None:
    runs = Stories(MOVES)
    assert runs.more_than(10, "leg 2 at .*: transferred; leg-.*; moved from de-")
    assert runs.more_than(0, "; at de-.*: engine 'de-.*' has no room now")
    assert runs.more_than(0, "its legs: in turn, leg 2 comes late")
    assert runs.count("a leg has failed") == 0


def test_engines_of_several_ranks_move_kv_however_they_are_cut() -> None:
    runs = Stories([seed for seed in MOVES if seed % 4 == 2][:12])
    assert runs.count("world .* engines of . and . ranks") == 12
    assert runs.more_than(3, "leg 2 at .*: transferred; leg-.*; moved from de-")


def test_decode_engines_that_are_killed_or_stopped_during_a_move_cost_no_answer() -> None:
    runs = Stories(MOVES, "kill or stop a decode engine of a move")
    assert runs.more_than(10, "leg 2 at .*: transferred; leg-.*; moved from de-")
    assert runs.more_than(3, "is given up between its legs: engine de-.* is lost")
    assert runs.more_than(3, r"de-\d#\d+ +is stopped")


def test_moves_with_messages_that_are_late_or_come_twice_and_transfers_that_fail() -> None:
    runs = Stories(
        MOVES[12:],
        *("stalling transfers", "failing transfers", "hanging transfers"),
        *("duplicate control messages", "stall a control connection", "reset a control connection"),
    )
    assert runs.more_than(10, "leg 2 at .*: transferred; leg-.*; moved from de-")


def test_a_proxy_that_is_killed_between_the_legs_leaves_nothing_behind() -> None:
    runs = Stories(PROXIES, "kill a proxy", "let a client leave")
    assert runs.more_than(5, r"proxy-\d#\d+ +is dead")


def test_a_leg_at_an_engine_that_hangs_is_answered_by_another_one() -> None:
    runs = Stories(PROXIES, "hang a core")
    assert runs.more_than(1, "its core has made no step for .* while a call waits for it")


def test_equal_seeds_with_proxies_give_equal_runs() -> None:
    for seed in PROXIES[:4]:
        assert run_seed(seed).digest == run_seed(seed).digest


@pytest.mark.parametrize(
    ("name", "fault", "first"),
    [
        ("late-leg-freed", "stalling transfers", None),
        ("leg-of-another", "let a client leave", 279),
        ("offer-unending", "let a client leave", None),
        ("leg-unwatched", "hang a core", 4),
        ("own-call-unwatched", "hang a core", 294),
        ("first-leg-unended", "let a client leave", None),
    ],
)
def test_planted_bugs_of_legs_are_found(name: str, fault: str, first: int | None) -> None:
    assert finds(name, MORE_PROXIES, fault, first=first)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("move-unawaited", "let a client leave"),
        ("moved-from-freed", "stalling transfers"),
        ("moved-from-restarted", "kill an engine or the router between two legs"),
    ],
)
def test_planted_bugs_of_moves_are_found(name: str, fault: str) -> None:
    assert finds(name, MOVES, fault)
