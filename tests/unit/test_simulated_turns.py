"""Simulated schedulers of which one stands by, and takes over by a lease."""

import re
from collections.abc import Sequence

import pytest

from dualpath.laboratory.chaos.simulation.adversary import KINDS, Kind
from dualpath.laboratory.chaos.simulation.drawn_cluster import drawn_settings
from dualpath.laboratory.chaos.simulation.lease_kinds import LEASE_KINDS
from dualpath.laboratory.chaos.simulation.plants import planted
from dualpath.laboratory.chaos.simulation.play import play
from dualpath.laboratory.chaos.simulation.turns import TurnKind
from dualpath.laboratory.chaos.simulation.world import World


def seeds_of(*turns: TurnKind, below: int = 160) -> list[int]:
    """Return seeds of clusters in which schedulers take turns so."""
    seeds = range(1, below, 4)
    return [seed for seed in seeds if drawn_settings(World(seed), 0, 1.0).standby in turns]


LEASED = seeds_of(TurnKind.ETCD, TurnKind.KUBERNETES)


#: When one that has served is dead, and when who stood by serves.
_PAUSE = re.compile(
    r"(router#[12]) +serves[^§]*?([\d.]+)  \1 +is dead[^§]*?([\d.]+)  router#[12] +serves"
)


def of(*names: str) -> list[Kind]:
    """Return these kinds of faults."""
    kinds = [kind for kind in (*KINDS, *LEASE_KINDS) if kind.name in names]
    assert len(kinds) == len(names)
    return kinds


def stories(*names: str, seeds: Sequence[int] = LEASED) -> list[list[str]]:
    """Return what runs with these faults tell, none of which has a problem."""
    told = []
    for seed in seeds:
        outcome = play(seed, story=True, kinds=of(*names))
        assert not outcome.problems, "\n".join(outcome.story)
        told.append(list(outcome.story))
    return told


def count(told: list[list[str]], *patterns: str) -> int:
    """Return in how many runs lines with these come one after the other."""
    whole = ("\n".join(lines) for lines in told)
    return sum(re.search("[^§]*".join(patterns), story) is not None for story in whole)


def pauses_of(told: list[list[str]]) -> list[float]:
    """Return for how many seconds nobody serves where one ends and another stands by."""
    ends = (_PAUSE.search("\n".join(lines)) for lines in told)
    return [float(end[3]) - float(end[2]) for end in ends if end is not None]


def test_by_a_lock_who_stands_by_serves_within_a_moment() -> None:
    pauses_s = pauses_of(stories("kill the router", seeds=seeds_of(TurnKind.LOCK)))
    assert len(pauses_s) > 3
    assert max(pauses_s) < 0.1


def test_a_holder_that_stands_still_is_followed_and_ends_when_it_wakes() -> None:
    told = stories("stop the router for longer than its lease")
    woke = r"router#1 +stands still", r"router#2 +serves", r"router#1 +goes on"
    assert count(told, *woke, "scheduler ends: the lease simulated", r"router#1 +is dead") > 3


def test_a_holder_that_is_cut_off_from_the_store_is_followed_while_it_lives() -> None:
    seeds = seeds_of(TurnKind.ETCD, TurnKind.KUBERNETES, below=320)
    told = stories("cut the router from the store of leases", seeds=seeds)
    ends = "scheduler ends: the lease simulated could not be renewed", r"router#2 +serves"
    assert count(told, r"router#1 +does not reach", *ends) > 3


def test_a_holder_that_is_killed_is_followed_once_its_lease_has_run_out() -> None:
    told = stories("kill the router")
    assert count(told, r"router#1 +is dead", r"router#2 +serves") > 3


def test_a_holder_that_is_asked_to_end_gives_its_lease_up() -> None:
    told = stories("terminate the router")
    pauses_s = pauses_of(told)
    assert len(pauses_s) > 10
    assert max(pauses_s) < 0.5  # of a lease of 1 s


def test_what_goes_wrong_with_the_store_is_survived() -> None:
    told = stories(*(kind.name for kind in LEASE_KINDS), "kill the router")
    assert count(told, "lease simulated could not be renewed: ") > 5
    assert count(told, "could not be renewed in time") > 3


def test_a_seed_with_leases_gives_the_same_run_again() -> None:
    for seed in LEASED[:4]:
        assert play(seed).digest == play(seed).digest


@pytest.mark.parametrize(
    ("name", "fault", "turn"),
    [
        ("turn-outlived", "stop the router for longer than its lease", TurnKind.ETCD),
        ("turn-outlived", "stop the router for longer than its lease", TurnKind.KUBERNETES),
        ("turn-stolen", "reset a call to an engine", TurnKind.KUBERNETES),
        # Found where clocks are not alike, by one of some hundred: by which one changes.
        ("turn-to-the-last", "unreachable store of leases", TurnKind.ETCD),
    ],
)
def test_planted_bugs_of_turns_are_found(name: str, fault: str, turn: TurnKind) -> None:
    with planted(name):
        assert any(play(seed, kinds=of(fault)).problems for seed in seeds_of(turn, below=1600))
