"""Who is admitted next, and how many: shares, order and bounds hold for any arrivals."""

import math
from collections import Counter, defaultdict, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.policy.admission import (
    LARGEST_LAG_S,
    MOST_REMEMBERED,
    PLACEMENT_TARGET_S,
    DrainRate,
    FairQueue,
    Place,
    PlacementWindow,
    retry_after_s,
)

TENANTS = ("a", "b", "c", "d")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
MOST_COST = 8

#: The name of an operation, and its arguments.
Step = tuple[Any, ...]
arrival = st.tuples(
    st.just("add"), st.sampled_from(TENANTS), st.integers(-2, 2), st.integers(1, MOST_COST)
)
operations = st.lists(
    st.one_of(arrival, st.tuples(st.just("pop")), st.tuples(st.just("leave"), st.integers(0, 99))),
    max_size=120,
)


class Played:
    """A queue, and the plain list of what waits in it."""

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self.queue: FairQueue[int] = FairQueue(weights)
        self.waiting: list[Place[int]] = []

    def play(self, operation: Step) -> Place[int] | None:
        """Carry out an operation; return the request that was admitted, if one was."""
        match operation:
            case ("add", tenant, priority, cost):
                self.waiting.append(self.queue.add(len(self.waiting), tenant, priority, cost))
            case ("pop",) if self.waiting:
                place = self.queue.pop()
                self.waiting.remove(place)
                return place
            case ("leave", number) if self.waiting:
                self.queue.remove(self.waiting.pop(number % len(self.waiting)))
        return None


@given(operations)
def test_each_request_leaves_once_and_a_tenants_own_in_the_order_of_priority(
    steps: list[Step],
) -> None:
    played = Played(WEIGHTS)
    for step in steps:
        before = list(played.waiting)
        admitted = played.play(step)
        if admitted is not None:
            own = [place for place in before if place.tenant == admitted.tenant]
            assert admitted is min(own, key=lambda place: place.order)
        lengths = Counter(place.tenant for place in played.waiting)
        assert len(played.queue) == len(played.waiting)
        assert played.queue.lengths() == dict(lengths)
        kinds = {(place.tenant, place.priority) for place in played.waiting}
        assert played.queue.uniform == (len(kinds) < 2)


@given(operations)
def test_the_same_arrivals_are_admitted_in_the_same_order(steps: list[Step]) -> None:
    first, second = Played(WEIGHTS), Played(WEIGHTS)
    for step in steps:
        one, other = first.play(step), second.play(step)
        assert (one and one.number) == (other and other.number)


@given(operations, st.lists(st.integers(1, MOST_COST), min_size=1, max_size=30))
def test_tenants_that_wait_all_the_time_share_by_weight(
    before: list[Step], costs: list[int]
) -> None:
    """From any state on, shares differ by the two largest requests at most."""
    played = Played(WEIGHTS)
    for step in before:
        played.play(step)
    for tenant in TENANTS:
        for cost in costs * 4:
            played.play(("add", tenant, 0, cost))
    served: dict[str, float] = defaultdict(float)
    while len(played.queue.lengths()) == len(TENANTS):
        admitted = played.play(("pop",))
        assert admitted is not None
        served[admitted.tenant] += admitted.cost / WEIGHTS.get(admitted.tenant, 1.0)
        for one in TENANTS:
            for other in TENANTS:
                bound = sum(MOST_COST / WEIGHTS.get(name, 1.0) for name in (one, other))
                assert abs(served[one] - served[other]) <= bound + 1e-6


@given(
    operations,
    st.integers(1, MOST_COST),
    st.lists(st.integers(1, MOST_COST), min_size=1, max_size=5),
    st.integers(1, 12),
)
def test_no_tenant_starves_however_many_new_ones_come(
    before: list[Step], cost: int, theirs: list[int], crowd: int
) -> None:
    """New tenants replace each admitted request; one that waits again gets its turn in time."""
    played = Played()
    for step in before:
        played.play(step)
    played.play(("add", "waits", 0, cost))
    for number in range(crowd):
        played.play(("add", f"new {number}", 0, theirs[number % len(theirs)]))
    while (admitted := played.play(("pop",))) is not None and admitted.tenant != "waits":
        pass
    played.play(("add", "waits", 0, 1))
    # At the latest when the virtual time has passed the end of any request, and those before are
    # admitted: each admission moves it on by 1 / tenants at least.
    played.play(("add", "another", 0, 1))
    present = len(played.waiting)
    bound = (MOST_COST + 2) * (present + 1)
    for number in range(bound):
        admitted = played.play(("pop",))
        assert admitted is not None
        if admitted.tenant == "waits":
            return
        played.play(("add", f"later {number}", 0, theirs[number % len(theirs)]))
    pytest.fail(f"not admitted after {bound} others")


@given(operations, st.sampled_from(TENANTS), st.integers(-2, 2))
def test_a_full_queue_makes_room_at_the_cost_of_the_longest_tenant(
    before: list[Step], tenant: str, priority: int
) -> None:
    played = Played(WEIGHTS)
    for step in before:
        played.play(step)
    last = played.queue.displaced_by(tenant, priority)
    lengths: Counter[str] = Counter(played.queue.lengths())
    lengths[tenant] += 1
    shares = {name: length / WEIGHTS.get(name, 1.0) for name, length in lengths.items()}
    if last is None:
        # The new request is the last one of a tenant that has as many as any.
        own = [place for place in played.waiting if place.tenant == tenant]
        assert shares[tenant] == max(shares.values())
        assert all(place.priority <= priority for place in own)
    else:
        assert shares[last.tenant] == max(shares.values())
        own = [place for place in played.waiting if place.tenant == last.tenant]
        assert last is max(own, key=lambda place: place.order)
        assert last.tenant != tenant or priority < last.priority


def test_a_tenant_that_waits_again_does_not_jump_ahead() -> None:
    """Its last request counts, although the tenant had none waiting meanwhile."""
    played = Played()
    for _ in range(100):
        played.play(("add", "steady", 0, 1))
    played.play(("add", "bursts", 0, 40))
    between = 0
    while (admitted := played.play(("pop",))) is not None and admitted.tenant == "steady":
        pass
    played.play(("add", "bursts", 0, 40))
    while (admitted := played.play(("pop",))) is not None and admitted.tenant == "steady":
        between += 1
    assert 39 <= between <= 41


def test_the_memory_of_past_tenants_is_bounded() -> None:
    played = Played()
    for _ in range(3 * MOST_REMEMBERED):
        played.play(("add", "steady", 0, 1))
    for number in range(2 * MOST_REMEMBERED):
        played.play(("add", f"passes {number}", 0, 10**6))
    for _ in range(2 * MOST_REMEMBERED):
        played.play(("pop",))
        assert len(played.queue._ends) <= MOST_REMEMBERED


# ------------------------------------------------------------------------ the window


class SteadyScheduler:
    """Places ``per_s`` requests a second, in order; its answers take ``lag_s`` in all."""

    def __init__(self, per_s: float, lag_s: float) -> None:
        self.per_s, self.lag_s = per_s, lag_s
        self.free_s = 0.0
        #: When each answer is here, its time in the queue, and the round of its request.
        self.pending: deque[tuple[float, float, int]] = deque()

    def ask(self, now_s: float, round_: int) -> None:
        self.free_s = max(self.free_s, now_s) + 1 / self.per_s
        self.pending.append((self.free_s + self.lag_s, self.free_s - now_s, round_))


def play_window(window: PlacementWindow, scheduler: SteadyScheduler, placements: int) -> list[int]:
    """Keep the window full for so many placements; return the limits."""
    now_s, limits = 0.0, []
    for _ in range(placements):
        while len(scheduler.pending) < window.limit(1):
            scheduler.ask(now_s, window.round)
        now_s, queue_s, round_ = scheduler.pending.popleft()
        used = len(scheduler.pending) + 1
        window.placed(round_, queue_s, scheduler.lag_s, used=used, short=True, least=1)
        limits.append(window.limit(1))
    return limits


@settings(max_examples=40)
@given(st.floats(1.0, 500.0), st.floats(0.0, 1.0))
def test_the_window_follows_what_the_scheduler_places(per_s: float, lag_s: float) -> None:
    """It settles at the placements of lag and target time, whatever their rate."""
    limits = play_window(PlacementWindow(), SteadyScheduler(per_s, lag_s), 6000)
    settled = limits[-1500:]
    assert min(settled) >= max(math.floor(0.95 * per_s * lag_s), 1)
    assert max(settled) <= 2.2 * per_s * (lag_s + PLACEMENT_TARGET_S) + 1


@pytest.mark.parametrize("lag_s", [0.002, 0.5, 2.0])
def test_a_burst_gets_through_in_few_round_trips_whatever_they_take(lag_s: float) -> None:
    """While engines take all at once, each placement lets two more go: the window doubles."""
    window, round_trips, left = PlacementWindow(), 0, 2000
    while left > 0:
        going, round_trips = min(window.limit(4), left), round_trips + 1
        left -= going
        for _ in range(going):
            short = left > 0
            window.placed(window.round, 0.0, lag_s, used=going, short=short, least=4)
    assert round_trips <= 10


def test_a_scheduler_that_has_too_much_to_do_gets_less() -> None:
    """Its lag grows with what waits there, although its queue is empty."""
    window, limits = PlacementWindow(), []
    for _ in range(5000):
        lag_s = window.limit(1) / 100  # It works off 100 requests a second.
        used = window.limit(1)
        window.placed(window.round, 0.0, lag_s, used=used, short=True, least=1)
        limits.append(window.limit(1))
    wanted = 100 * (LARGEST_LAG_S + PLACEMENT_TARGET_S)
    assert 0.5 * wanted <= min(limits[-500:]) <= max(limits[-500:]) <= 1.5 * wanted


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=200), st.integers(0, 50))
def test_the_window_is_never_below_the_least_and_grows_only_when_it_is_short(
    placements: list[tuple[float, bool]], least: int
) -> None:
    window = PlacementWindow()
    for wait_s, short in placements:
        before = window.limit(least)
        window.placed(window.round, wait_s, 0.0, used=before, short=short, least=least)
        assert window.limit(least) >= max(least, 1)
        assert window.limit(least) <= 2 * before
        if not any(short for _, short in placements):
            assert window.limit(least) <= max(least, 1)


def test_a_burst_of_long_ago_does_not_keep_the_window_large() -> None:
    window = PlacementWindow()
    play_window(window, SteadyScheduler(1000.0, 0.0), 4000)
    large = window.limit(1)
    for _ in range(6 * large):
        window.placed(window.round, 0.001, 0.001, used=3, short=False, least=1)
    assert window.limit(1) == 3


def test_after_a_loss_the_window_begins_with_the_least() -> None:
    window = PlacementWindow()
    play_window(window, SteadyScheduler(1000.0, 0.0), 4000)
    assert window.limit(3) > 100
    window.reset()
    assert window.limit(3) == 3


# ------------------------------------------------------------------------ when to try again


@pytest.mark.parametrize("per_s", [0.1, 3.0, 500.0])
def test_the_rate_is_that_of_steady_admissions(per_s: float) -> None:
    rate = DrainRate(100.0)
    assert rate.per_s(100.0) == 0.0
    for number in range(1, 2000):
        rate.admitted(100.0 + number / per_s)
    now_s = 100.0 + 1999 / per_s
    assert rate.per_s(now_s) == pytest.approx(per_s, rel=0.25)
    assert rate.per_s(now_s + 300) < per_s / 1000


def test_clients_are_asked_to_wait_until_the_queue_has_drained() -> None:
    assert retry_after_s(0, 5.0, 600.0) == 1
    assert retry_after_s(100, 8.0, 600.0) == 13
    assert retry_after_s(100, 0.01, 600.0) == 600
    assert retry_after_s(100, 0.0, 600.0) == 1
