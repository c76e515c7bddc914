"""Which waiting request a front end admits next, and how many it lets wait at the scheduler.

*Order.*  Tenants share admissions in proportion to their weights, by start-time fair queueing: each
tenant has a virtual time at which its next request starts, the earliest is next, and an admission
moves it on by the request's cost over the tenant's weight.  Among the requests of one tenant a
lower ``priority`` is earlier, as in vLLM, then the order of arrival.  So a priority is a matter
within a tenant: no tenant can delay another one by it.

A tenant that begins to wait starts at the queue's virtual time, or where its last request ended if
that is later.  The queue's virtual time moves on with each admission by its cost over the weights
of all tenants that wait.  So new tenants, however many, start behind those that wait long enough.

*A full queue* has room for a tenant that uses less of it than another one: the last request of the
tenant with the most waiting requests for its weight gives way.

*How many* requests wait at the scheduler follows from how long they wait there
(``PlacementWindow``): what is admitted later can still be overtaken.

Everything here is pure: times are arguments.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Tenants without a waiting request of which the virtual end of the last one is remembered.
MOST_REMEMBERED = 1024


class Place(Generic[T]):
    """A waiting request; ``number`` is its place in the order of arrival."""

    __slots__ = ("cost", "item", "number", "priority", "tenant")

    def __init__(self, item: T, tenant: str, priority: int, cost: float, number: int) -> None:
        self.item, self.tenant, self.priority = item, tenant, priority
        self.cost, self.number = cost, number

    @property
    def order(self) -> tuple[int, int]:
        """What its tenant's requests are ordered by."""
        return self.priority, self.number


class _Tenant(Generic[T]):
    """A tenant with waiting requests, in their order."""

    __slots__ = ("name", "places", "since", "start", "weight")

    def __init__(self, name: str, weight: float, start: float, since: int) -> None:
        self.name, self.weight, self.start, self.since = name, weight, start, since
        self.places: list[Place[T]] = []

    @property
    def turn(self) -> tuple[float, int, str]:
        """What tenants are ordered by: the virtual start, then the number of the first request."""
        return self.start, self.since, self.name

    @property
    def length(self) -> tuple[float, str]:
        """What tenants are ordered by when a full queue looks for the longest one."""
        return len(self.places) / self.weight, self.name


def _order(place: Place[T]) -> tuple[int, int]:
    return place.order


class FairQueue(Generic[T]):
    """Waiting requests of all tenants; ``weights`` by tenant, 1 for all others.

    Adding, removing and popping take time in the logarithm of requests and tenants, but for moving
    list items.  Memory is bounded by the waiting requests and ``MOST_REMEMBERED``.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: dict[str, _Tenant[T]] = {}
        self._turns: list[tuple[float, int, str]] = []
        self._lengths: list[tuple[float, str]] = []
        #: Virtual time, and where tenants without a waiting request would go on.
        self._now = 0.0
        self._ends: dict[str, float] = {}
        self._weight = 0.0
        self._count = self._numbers = 0

    def __len__(self) -> int:
        """Return how many requests wait."""
        return self._count

    @property
    def uniform(self) -> bool:
        """Whether all waiting requests have one tenant and one priority: the last one is last."""
        if len(self._tenants) > 1:
            return False
        return all(
            tenant.places[0].priority == tenant.places[-1].priority
            for tenant in self._tenants.values()
        )

    def lengths(self) -> dict[str, int]:
        """Return the number of waiting requests by tenant."""
        return {name: len(tenant.places) for name, tenant in self._tenants.items()}

    def longest(self, most: int) -> dict[str, int]:
        """Return the numbers of at most ``most`` tenants, those with most for their weight."""
        names = [name for _, name in reversed(self._lengths[-most:])]
        return {name: len(self._tenants[name].places) for name in names}

    def add(self, item: T, tenant: str, priority: int = 0, cost: float = 1.0) -> Place[T]:
        """Let a request wait; ``cost`` > 0 in any unit, the same for all."""
        self._numbers += 1
        place = Place(item, tenant, priority, cost, self._numbers)
        queue = self._tenants.get(tenant)
        if queue is None:
            start = max(self._now, self._ends.pop(tenant, 0.0))
            weight = self._weights.get(tenant, 1.0)
            queue = self._tenants[tenant] = _Tenant(tenant, weight, start, self._numbers)
            self._weight += weight
            insort(self._turns, queue.turn)
        else:
            _discard(self._lengths, queue.length)
        insort(queue.places, place, key=_order)
        insort(self._lengths, queue.length)
        self._count += 1
        return place

    def pop(self) -> Place[T]:
        """Remove and return the next request; raises ``IndexError`` if none waits."""
        queue = self._tenants[self._turns[0][2]]
        place = queue.places[0]
        self._now += place.cost / self._weight
        _discard(self._turns, queue.turn)
        queue.start += place.cost / queue.weight
        insort(self._turns, queue.turn)
        self.remove(place)
        if self._turns:
            self._now = max(self._now, self._turns[0][0])
        return place

    def remove(self, place: Place[T]) -> None:
        """Remove a waiting request, which is not charged to its tenant."""
        queue = self._tenants[place.tenant]
        _discard(self._lengths, queue.length)
        del queue.places[bisect_left(queue.places, place.order, key=_order)]
        self._count -= 1
        if queue.places:
            insort(self._lengths, queue.length)
            return
        del self._tenants[place.tenant]
        _discard(self._turns, queue.turn)
        self._weight -= queue.weight
        if not self._tenants:  # Nothing is shared: all tenants begin again alike.
            self._now = self._weight = 0.0
            self._ends.clear()
        elif queue.start > self._now:
            self._ends[place.tenant] = queue.start
            self._drop_ends()

    def displaced_by(self, tenant: str, priority: int) -> Place[T] | None:
        """Return the request that gives way to one of ``tenant`` in a full queue, None if none.

        It is the last one of the tenant with most waiting requests for its weight, the new one
        included.  None: the new request would itself be the last one.
        """
        if not self._lengths:
            return None
        length, name = self._lengths[-1]
        own = self._tenants.get(tenant)
        if own is not None:
            mine = (len(own.places) + 1) / own.weight
            if mine >= length:
                last = own.places[-1]
                return last if priority < last.priority else None
        elif length <= 1 / self._weights.get(tenant, 1.0):
            return None
        return self._tenants[name].places[-1]

    def _drop_ends(self) -> None:
        """Remove ends that are past, and the earliest of too many."""
        if len(self._ends) <= MOST_REMEMBERED:
            return
        ahead = sorted((end, name) for name, end in self._ends.items() if end > self._now)
        self._ends = {name: end for end, name in ahead[-(MOST_REMEMBERED // 2) :]}


def _discard(values: list[Any], value: tuple[object, ...]) -> None:
    """Remove a value from a sorted list that has it."""
    del values[bisect_left(values, value)]


# ------------------------------------------------------------------------ how many at the scheduler


#: How long an admitted request should wait in the scheduler's queue.  Engines have seconds of work
#: when they take no more (β), so that a shorter queue leaves none of them idle, and a longer one
#: has no use: its order is fixed.
PLACEMENT_TARGET_S = 0.25
#: A shorter wait means that the scheduler's queue is empty: engines can take more at once.
_EMPTY_QUEUE_S = 0.1 * PLACEMENT_TARGET_S
#: The lag of links and event loops that the window allows for.  A longer one is taken for a
#: scheduler with too much to do; at 5 s engines and front ends would count as lost (the default of
#: ``engine_timeout_s``).
LARGEST_LAG_S = 2.5


class PlacementWindow:
    """How many admitted requests may wait at the scheduler: what it places in the target time.

    ``size`` placements of requests that were admitted at that size are a *round*.  Each reports two
    waits: in the scheduler's queue, until engines can take the request; and the *lag*, which is all
    else but the look-up in storage (links, the scheduler's event loop).  The means of a round move
    the size towards what gives the target in the queue, at most by half or to the double.  A lag of
    up to ``LARGEST_LAG_S`` is allowed for: a slow link or a slow machine does not shrink the
    window, a longer lag does.  While the scheduler's queue is empty, each placement adds one to the
    size, so that a burst waits few round trips here.  The size grows only while requests wait for
    it; else it falls, by half at most, to what is used of it, so that a burst of long ago does not
    let too many wait at the scheduler.  So the window follows whatever limits placement: engines,
    the scheduler's own load, other front ends.
    """

    def __init__(self) -> None:
        self.size = 1.0
        #: The number of the present round.
        self.round = 0
        # The placements of the round, the largest use of the window, and the sums of the waits.
        self._placed: int = 0
        self._used: int = 0
        self._queued_s: float = 0.0
        self._lagged_s: float = 0.0
        self._short: bool = False

    def limit(self, least: int) -> int:
        """Return how many may wait at the scheduler, at least ``least`` and 1."""
        return max(math.ceil(self.size), least, 1)

    def placed(
        self,
        admitted_in: int,
        queue_s: float,
        lag_s: float,
        *,
        used: int,
        short: bool,
        least: int,
    ) -> None:
        """A request that was admitted in round ``admitted_in`` has its engines after these waits.

        ``used`` requests were at the scheduler, this one included.  ``short``: requests wait for
        the window at present.
        """
        if short and queue_s <= _EMPTY_QUEUE_S and lag_s <= LARGEST_LAG_S:
            self.size = self.limit(least) + 1.0
            self._begin_sums()
            return
        if admitted_in != self.round:
            return
        self._placed += 1
        self._queued_s += queue_s
        self._lagged_s += lag_s
        self._short = self._short or short
        self._used = max(self._used, used)
        limit = self.limit(least)
        if self._placed < limit:
            return
        queue_s, lag_s = self._queued_s / self._placed, self._lagged_s / self._placed
        wanted_s = PLACEMENT_TARGET_S + min(lag_s, LARGEST_LAG_S)
        factor = min(max(wanted_s / max(queue_s + lag_s, 1e-9), 0.5), 2.0)
        if factor < 1 or self._short:
            self._begin_round(max(limit * factor, 1.0))
        else:
            self._begin_round(max(self.size / 2, min(self.size, self._used)))

    def reset(self) -> None:
        """The scheduler is lost: begin with the least at the next one."""
        self._begin_round(1.0)

    def _begin_round(self, size: float) -> None:
        self.size = size
        self.round += 1
        self._begin_sums()

    def _begin_sums(self) -> None:
        self._placed = self._used = 0
        self._queued_s = self._lagged_s = 0.0
        self._short = False


#: Time constant of ``DrainRate``.
_MEMORY_S = 30.0


class DrainRate:
    """Admissions per second, the recent ones weighted most (exponentially, over 30 s)."""

    def __init__(self, now_s: float) -> None:
        self._begun_s = self._at_s = now_s
        self._weighted = 0.0

    def admitted(self, now_s: float) -> None:
        """Count an admission of a request that had to wait."""
        self._decay(now_s)
        self._weighted += 1.0

    def per_s(self, now_s: float) -> float:
        """Return the rate; 0 before the first admission."""
        self._decay(now_s)
        seen = 1.0 - math.exp(-(self._at_s - self._begun_s) / _MEMORY_S)
        return self._weighted / (_MEMORY_S * seen) if seen > 0 else 0.0

    def _decay(self, now_s: float) -> None:
        passed_s = max(now_s - self._at_s, 0.0)
        self._weighted *= math.exp(-passed_s / _MEMORY_S)
        self._at_s += passed_s


def retry_after_s(waiting: int, per_s: float, most_s: float) -> int:
    """Return the whole seconds after which a refused client should try again, at least 1.

    It is the time in which ``waiting`` requests are admitted at the measured rate, at most
    ``most_s``, after which a waiting request fails; 1 while no rate is known.
    """
    if waiting <= 0 or per_s <= 0:
        return 1
    return max(math.ceil(min(waiting / per_s, most_s)), 1)
