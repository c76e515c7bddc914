"""Requests that wait for engines: their queues, and what a placement rule is.

*What cached blocks are worth* (beyond the paper).  A block that an engine still caches from an
earlier request needs no storage NIC.  The categories of §6.1 stay as they are: which engines are
overloaded, which have a long reading queue, which have room.  Within a category, an engine other
than the usual one is taken if it caches more of the prompt and its load is larger by less than that
is worth: no engine is chosen for its cache alone where its queue makes it slower, and without any
cached block the rules are the paper's.

- *At a PE* tokens are time to compute, so a cached token counts as the tokens that the PE computes
  while one token is read: the PE with the least (tok + own) / computing rate + (hit - cached) /
  reading rate.  Reading and computing may overlap; they are added because the storage NIC that one
  request does not need is available to another.  The rates are those behind α and β, 3 s of reading
  and 5 s of computing.
- *At a DE* tokens are KV in its HBM, and there is no queue for time.  A token more than another DE
  has is read from HBM in every step, some hundred times in a turn; a cached token that is not used
  is read once through a storage NIC, which is some hundred times slower than HBM, and is sent
  besides.  For a few hundred generated tokens the former costs about half of the latter, so a
  cached token counts as two tokens less.  That holds for the threshold Z as well, which is a few
  percent above the mean: with few engines a conversation's own DE is above it half the time.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from dualpath.core.cluster import Role
from dualpath.core.request import Request
from dualpath.policy.accounts import Taking
from dualpath.policy.events import ALPHA_S, BETA_S, UNLIMITED_TOKENS, Assignment

#: Most tokens computed in the time of reading one; a threshold that gives more is no measurement.
LARGEST_WORTH = 1e6
#: Where neither rate is known, reading a token is assumed to take as long as computing one.
UNKNOWN_WORTH = 1.0
#: What a cached token is worth at a DE.  HBM of 3.35 TB/s beside an eighth of a storage NIC of
#: 50 GB/s is 540 times as fast; a turn has about 270 steps.
DECODE_WORTH = 2.0
#: In a column of rows: no engine caches blocks of this request.
NOTHING_CACHED = -1


def prefill_worth(alpha_tokens: int, beta_tokens: int) -> float:
    """Return how many tokens a PE computes in the time in which its node reads one."""
    if max(alpha_tokens, beta_tokens) >= UNLIMITED_TOKENS:
        return UNKNOWN_WORTH
    computed_per_s, read_per_s = beta_tokens / BETA_S, max(alpha_tokens, 1) / ALPHA_S
    return min(computed_per_s / read_per_s, LARGEST_WORTH)


def weighed_tokens(load_tokens: int, cached_tokens: int, worth: float) -> int:
    """Return an engine's load less the worth of what it caches of a prompt."""
    return load_tokens - int(cached_tokens * worth)


class KvWait(NamedTuple):
    """A request waits for HBM of the DE that caches its hit, ``limit_s`` long from ``since_s``."""

    engine_id: str
    since_s: float
    limit_s: float


class LiveRequest:
    """A request from ``Submitted`` to ``Finished``; ``number`` is its place in submission order.

    ``prefill_tokens`` is tokens(r) of Algorithm 1, ``decode_tokens`` len_r of §6.1,
    ``cached_tokens`` the part of its hit in each engine's DRAM.  ``engines`` are those that it is
    placed on, charged to the ledger, ``reasons`` why these; ``assignment`` is set once the driver
    knows both.  ``reading`` are the engines that the ledger has charged for reading its hit,
    ``computing_tokens`` the tokens charged to its PE's computation.  ``wait`` is set once it has
    waited for the DE that caches its hit, ``decode_since_s`` is when it was placed on its DE.
    While it ``waits_for_slots`` of its DE, nodes cannot read the tokens of ``waiting_reads``;
    ``read_for`` is its PE from then until its reads are over, else empty.
    ``moving_to`` is the DE that fetches its KV, empty if none does.
    """

    __slots__ = (
        *("assignment", "cached_tokens", "computing_tokens", "decode_since_s", "decode_tokens"),
        *("moving_to", "read_for", "waiting_reads", "waits_for_slots"),
        *("engines", "number", "prefill_tokens", "prefilled", "reading", "reasons", "request"),
        *("request_id", "wait"),
    )

    def __init__(
        self,
        request: Request,
        number: int,
        prefill_tokens: int,
        decode_tokens: int,
        cached_tokens: Mapping[str, int],
    ) -> None:
        self.request_id = request.request_id
        self.request = request
        self.number = number
        self.prefill_tokens = prefill_tokens
        self.decode_tokens = decode_tokens
        self.cached_tokens = cached_tokens
        self.engines: dict[Role, str] = {}
        self.reasons: dict[Role, str] = {}
        self.assignment: Assignment | None = None
        self.prefilled = False
        self.reading: tuple[str, ...] = ()
        self.computing_tokens = 0
        self.decode_since_s: float | None = None
        self.wait: KvWait | None = None
        self.waiting_reads: dict[int, int] = {}
        self.read_for = ""
        self.waits_for_slots = False
        self.moving_to = ""

    def place(self, role: Role, engine_id: str, reason: str) -> None:
        """Note the engine of a role; the caller charges the ledger."""
        assert role not in self.engines, f"{self.request_id} has its {role} engine already"
        self.engines[role], self.reasons[role] = engine_id, reason


def cached_table(
    requests: Sequence[LiveRequest], taking: Taking
) -> tuple[list[int], list[list[int]]]:
    """Return, for a kernel, the row of each request in a table, and the table: tokens by engine."""
    rows: list[int] = []
    table: list[list[int]] = []
    for live in requests:
        cached = live.cached_tokens
        rows.append(len(table) if cached else NOTHING_CACHED)
        if cached:
            table.append([cached.get(engine.spec.engine_id, 0) for engine in taking.engines])
    return rows, table


class Placer(Protocol):
    """Places waiting requests on the engines of one role; FIFO in each queue."""

    def add(self, live: LiveRequest) -> None:
        """Append a request to the queue."""

    def discard(self, request_id: str) -> None:
        """Remove a waiting request; does nothing if it does not wait here."""

    def may_place(self, group: str) -> bool:
        """Whether ``fetch`` of a live group would do anything; False if nothing waits for it."""

    def fetch(self, group: str, now_s: float) -> list[LiveRequest]:
        """Place all that can be placed on the engines of ``group`` now, and charge the ledger."""

    def requeue(self, requests: Iterable[LiveRequest] = ()) -> None:
        """Start over after engines changed: queues and ``requests`` merge in order of number."""

    def waiting(self) -> int:
        """Return how many requests wait."""

    def waits_for_kv(self, group: str) -> bool:
        """Whether a request in a group's queue waits for the engine that caches its KV."""

    def set_thresholds(self, alpha_tokens: int, beta_tokens: int) -> None:
        """Use another α and β from now on."""


class WaitQueues:
    """A common queue from which requests are dealt to private queues, all of them FIFO."""

    def __init__(self) -> None:
        self.common: OrderedDict[str, LiveRequest] = OrderedDict()
        self._private: dict[str, OrderedDict[str, LiveRequest]] = {}
        self._queue_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.common) + len(self._queue_of)

    def add(self, live: LiveRequest) -> None:
        """Put a request at the end of the common queue."""
        self.common[live.request_id] = live

    def deal(self, live: LiveRequest, queue: str) -> None:
        """Move a request from the common queue to the end of a private one."""
        del self.common[live.request_id]
        self._private.setdefault(queue, OrderedDict())[live.request_id] = live
        self._queue_of[live.request_id] = queue

    def private(self, queue: str) -> Iterable[LiveRequest]:
        """Return the requests of a private queue, head first; it must not change meanwhile."""
        return self._private.get(queue, {}).values()

    def take(self, request_id: str) -> LiveRequest | None:
        """Remove a request from its queue and return it."""
        if request_id in self.common:
            return self.common.pop(request_id)
        queue = self._queue_of.pop(request_id, None)
        return None if queue is None else self._private[queue].pop(request_id)

    def queue_of(self, request_id: str) -> str | None:
        """Return the private queue in which a request waits, None if it does not."""
        return self._queue_of.get(request_id)

    def requeue(self, requests: Iterable[LiveRequest]) -> None:
        """Move all requests, and ``requests``, into the common queue in order of number."""
        merged = [*self.common.values(), *requests]
        for queue in self._private.values():
            merged.extend(queue.values())
        self._private.clear()
        self._queue_of.clear()
        merged.sort(key=lambda live: live.number)
        self.common = OrderedDict((live.request_id, live) for live in merged)
