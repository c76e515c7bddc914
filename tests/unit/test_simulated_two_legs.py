"""Simulated proxies of others, which send the legs of requests to engines."""

import pytest
from tests.fault_stories import count, of, stories

from dualpath_lab.faults.simulation.planted_bugs import planted
from dualpath_lab.faults.simulation.run import run_seed
from dualpath_lab.faults.simulation.settings import has_proxies

#: A fifth of all clusters.
PROXIES = [seed for seed in range(110) if has_proxies(seed)]
#: For bugs: which seeds find one changes with the code.
MORE_PROXIES = [seed for seed in range(1500) if has_proxies(seed)]


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
    assert count(lines, "leg 2 at .*: transferred; leg-.*; at de-") > 5, "some are passed on"
    assert count(lines, "leg 2 at .*: transferred; leg-") > 50
    assert count(lines, "leg 2 at .*: prefilled by pe-.* again") > 5
    assert count(lines, "its second leg did not come within 3 s") > 3
    assert count(lines, "a leg has failed") == 0


def test_an_engine_or_the_router_that_ends_between_the_legs_costs_no_answer() -> None:
    lines = stories(PROXIES, "kill an engine or the router between two legs")
    assert count(lines, "given up between its legs: engine de-.* is lost") > 3
    assert count(lines, r"router#\d+ +is dead") > 1
    assert count(lines, r"pe-\d#\d+ +is dead") > 1


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
