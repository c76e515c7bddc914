"""Transfers that no step waits for are posted by the pump, a few bytes at a time."""

import functools
from collections.abc import Callable
from typing import cast

import pytest

from dualpath.engine.passes.hbm_copy import PacedPosts
from dualpath.engine.passes.pump import TransferPump
from dualpath.engine.threads import OsThreads

MAX_BYTES = 100
DEADLINE_S = 30.0


class Clock(OsThreads):
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now_ns(self) -> int:
        return int(self.now_s * 1e9)


class Pump:
    """The pump's thread: runs its callbacks when the test calls for it."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.each: list[Callable[[], None]] = []

    def each_poll(self, work: Callable[[], None]) -> None:
        self.each.append(work)

    def call(self, work: Callable[[], None]) -> None:
        self.calls.append(work)

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for work in (*calls, *self.each):
            work()


class Paced:
    """Posts by name, in order, and how to end them."""

    def __init__(self) -> None:
        self.pump, self.clock = Pump(), Clock()
        pump = cast(TransferPump, self.pump)
        self.posts = PacedPosts(pump, self.clock, DEADLINE_S, MAX_BYTES)
        self.posted: list[str] = []
        self.over: dict[str, Callable[[], None]] = {}

    def add(self, name: str, size_bytes: int) -> None:
        def post(over: Callable[[], None]) -> None:
            self.posted.append(name)
            self.over[name] = over

        self.posts.add(size_bytes, post)


@pytest.fixture
def paced() -> Paced:
    return Paced()


def test_transfers_are_posted_by_the_pump(paced: Paced) -> None:
    paced.add("a", 1)
    assert paced.posted == []
    paced.pump.turn()
    assert paced.posted == ["a"]


def test_bytes_under_way_are_limited_and_an_end_lets_the_next_follow(paced: Paced) -> None:
    for name in "abcd":
        paced.add(name, 50)
    paced.pump.turn()
    assert paced.posted == ["a", "b"]
    paced.over["b"]()
    assert paced.posted == ["a", "b", "c"]
    paced.over["a"]()
    paced.over["c"]()
    assert paced.posted == ["a", "b", "c", "d"]


def test_a_transfer_above_the_limit_is_posted_alone(paced: Paced) -> None:
    for name, size_bytes in (("small", 1), ("large", 1000), ("last", 1)):
        paced.add(name, size_bytes)
    paced.pump.turn()
    assert paced.posted == ["small"]
    paced.over["small"]()
    assert paced.posted == ["small", "large"]
    paced.over["large"]()
    assert paced.posted == ["small", "large", "last"]


def test_thousands_of_immediate_failures_follow_each_other(paced: Paced) -> None:
    posted: list[int] = []

    def post(number: int, over: Callable[[], None]) -> None:
        posted.append(number)
        over()

    paced.add("first", MAX_BYTES)
    for number in range(5000):
        paced.posts.add(60, functools.partial(post, number))
    paced.pump.turn()
    assert posted == []
    paced.over["first"]()
    assert posted == list(range(5000))


def test_a_transfer_that_hangs_delays_others_by_at_most_a_deadline(paced: Paced) -> None:
    paced.add("hangs", 100)
    paced.add("waits", 60)
    paced.pump.turn()
    paced.clock.now_s = DEADLINE_S
    paced.pump.turn()
    assert paced.posted == ["hangs", "waits"]
    paced.add("comes", 40)
    paced.pump.turn()
    assert paced.posted == ["hangs", "waits", "comes"]
    paced.over["hangs"]()  # after all
    paced.add("last", 1)
    paced.pump.turn()
    assert paced.posted == ["hangs", "waits", "comes"]
