"""Two-level decode scheduling: groups by tokens, then engines by threshold Z (§6.1).

Phase 1 drains the global queue when any DE group fetches: each request joins the private queue of
the group with the fewest tokens.  Phase 2 serves the private queue of the fetching group from its
head: among the engines with enough HBM, low-token ones (tok + len ≤ Z) by fewest requests, else
high-token ones by fewest tokens; when no engine has the HBM the fetch ends.

Left open by the paper, decided here:

- A group's total counts its private queue as well; otherwise one drain would send everything to
  the same group.
- A group in which no engine could ever hold the request is passed over; if that is every group,
  the request stays in the global queue and delays no other.
- Blocks that an engine caches in DRAM weigh among groups and engines with room for the request
  (``policy.placement``).  Z needs no second check: an engine that weighs less than the usual one,
  cached tokens subtracted, is as far below Z as that one.
- Equal request counts go to the engine with fewer tokens, everything else equal to the lowest
  order (groups: the one that joined first).
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from dualpath.core.cluster import Role
from dualpath.policy.accounts import (
    FREE_HBM,
    SEQ,
    TOK,
    Column,
    GroupState,
    IntArray,
    Ledger,
    Table,
)
from dualpath.policy.events import DE_HIGH_TOKEN, DE_KEPT, DE_LOW_TOKEN, DE_REASONS
from dualpath.policy.placement import (
    DECODE_WORTH,
    LiveRequest,
    WaitQueues,
    cached_table,
    weighed_tokens,
)


def choose_group(totals: Column, largest_hbm: Column, length: int) -> int:
    """Phase 1: return the row of the group with the fewest tokens, -1 if none can hold it.

    This and the other kernels compile with numba as they stand.
    """
    best = -1
    for row in range(len(totals)):
        if largest_hbm[row] >= length and (best < 0 or totals[row] < totals[best]):
            best = row
    return best


def choose_caching_group(
    totals: Column, largest_hbm: Column, length: int, cached: Column, usual: int
) -> int:
    """Phase 1: return the group for a request with cached tokens.

    ``cached`` are the most tokens that any engine of a group caches; ``usual`` is the group of
    ``choose_group``.
    """
    best, least = usual, weighed_tokens(totals[usual], cached[usual], DECODE_WORTH)
    for row in range(len(totals)):
        weighed = weighed_tokens(totals[row], cached[row], DECODE_WORTH)
        if largest_hbm[row] >= length and weighed < least:
            best, least = row, weighed
    return best


def unfragmented_hbm(free_hbm: Column) -> int:
    """Phase 2: return what a group could hold if its free HBM were in one piece."""
    tokens = 0
    for row in range(len(free_hbm)):
        tokens += max(free_hbm[row], 0)
    return tokens


def upper_bound_set(free_hbm: Column, lengths: Iterable[int]) -> list[int]:
    """Phase 2: return the lengths at the queue's head that fit if HBM had no fragmentation (R)."""
    left = unfragmented_hbm(free_hbm)
    fitting: list[int] = []
    for length in lengths:
        left -= length
        if left < 0:
            break
        fitting.append(length)
    return fitting


def assign_decode(
    tok: Column,
    seq: Column,
    free_hbm: Column,
    lengths: Column,
    cached_rows: Column,
    cached: Table,
    threshold_factor: float,
) -> tuple[IntArray, IntArray]:
    """Phase 2: return the rows given to the first requests of R, and why (in ``DE_REASONS``).

    ``tok``, ``seq`` and ``free_hbm`` have one row per engine of the group in order, ``lengths``
    holds R, ``cached_rows`` and ``cached`` are as for ``assign_prefill``.  The result is as long as
    the number of requests placed.
    """
    tokens, requests, free = tok.copy(), seq.copy(), free_hbm.copy()
    threshold = threshold_factor * (sum(lengths) + sum(tokens)) / len(tokens)
    rows = np.empty(len(lengths), np.int64)
    why = np.empty(len(lengths), np.int64)
    for position in range(len(lengths)):
        length = lengths[position]
        low = high = -1
        for row in range(len(tokens)):
            if free[row] < length:
                continue
            if tokens[row] + length <= threshold:
                fewer = low < 0 or requests[row] < requests[low]
                if fewer or (requests[row] == requests[low] and tokens[row] < tokens[low]):
                    low = row
            elif high < 0 or tokens[row] < tokens[high]:
                high = row
        row = low if low >= 0 else high
        if row < 0:
            return rows[:position], why[:position]
        why[position] = DE_LOW_TOKEN if low >= 0 else DE_HIGH_TOKEN
        if cached_rows[position] >= 0:
            of_engine, usual = cached[cached_rows[position]], row
            least = weighed_tokens(tokens[row], of_engine[row], DECODE_WORTH)
            for other in range(len(tokens)):
                if free[other] < length:
                    continue
                weighed = weighed_tokens(tokens[other], of_engine[other], DECODE_WORTH)
                if of_engine[other] > of_engine[usual] and weighed < least:
                    row, least = other, weighed
                    why[position] = DE_KEPT
        rows[position] = row
        tokens[row] += length
        requests[row] += 1
        free[row] -= length
    return rows, why


class TwoPhaseDecodePlacer:
    """The global queue and the private queue of every DE group."""

    def __init__(self, ledger: Ledger, threshold_factor: float) -> None:
        self._ledger = ledger
        self._threshold_factor = threshold_factor
        self._queues = WaitQueues()
        self._private_tokens: dict[str, int] = {}

    def add(self, live: LiveRequest) -> None:
        """Append a request to the global queue."""
        self._queues.add(live)

    def discard(self, request_id: str) -> None:
        """Remove a waiting request; does nothing if it does not wait here."""
        self._take(request_id)

    def waiting(self) -> int:
        """Return how many requests wait, private queues included."""
        return len(self._queues)

    def requeue(self, requests: Iterable[LiveRequest] = ()) -> None:
        """Move all requests back to the global queue in order of number."""
        self._queues.requeue(requests)
        self._private_tokens.clear()

    def may_place(self, group: str) -> bool:
        """Whether a request waits for any group or for this one."""
        return bool(self._queues.common) or bool(self._queues.private(group))

    def fetch(self, group: str) -> list[LiveRequest]:
        """Run both phases for one group."""
        if self._queues.common:
            self._drain_global_queue()
        return self._serve_private_queue(self._ledger.groups[group])

    def _drain_global_queue(self) -> None:
        groups = self._ledger.groups_of(Role.DECODE)
        private = self._private_tokens
        totals = [group.taking_tokens() + private.get(group.name, 0) for group in groups]
        largest = [group.largest_taking_hbm_tokens for group in groups]
        for live in list(self._queues.common.values()):
            row = choose_group(totals, largest, live.decode_tokens)
            if row < 0:
                continue
            if live.cached_tokens:
                cached = self._most_cached(live, groups)
                row = choose_caching_group(totals, largest, live.decode_tokens, cached, row)
            totals[row] += live.decode_tokens
            name = groups[row].name
            private[name] = private.get(name, 0) + live.decode_tokens
            self._queues.deal(live, name)

    def _serve_private_queue(self, group: GroupState) -> list[LiveRequest]:
        queue = self._queues.private(group.name)
        taking = group.taking()
        lengths = upper_bound_set(taking.columns[FREE_HBM], (live.decode_tokens for live in queue))
        if not lengths:
            return []
        bound = list(islice(queue, len(lengths)))
        rows, why = assign_decode(
            taking.columns[TOK],
            taking.columns[SEQ],
            taking.columns[FREE_HBM],
            lengths,
            *cached_table(bound, taking),
            self._threshold_factor,
        )
        placed = bound[: len(rows)]
        for live, row, reason in zip(placed, rows.tolist(), why.tolist(), strict=True):
            engine_id = taking.engines[row].spec.engine_id
            self._take(live.request_id)
            self._ledger.hold(engine_id, live.request_id, live.decode_tokens)
            live.place(Role.DECODE, engine_id, DE_REASONS[reason])
        return placed

    def _most_cached(self, live: LiveRequest, groups: Sequence[GroupState]) -> list[int]:
        """Return the most tokens that an engine of each group caches and gets requests."""
        most = dict.fromkeys((group.name for group in groups), 0)
        for engine_id, tokens in live.cached_tokens.items():
            engine = self._ledger.engines.get(engine_id)
            if engine is not None and not engine.paused and engine.spec.group in most:
                most[engine.spec.group] = max(most[engine.spec.group], tokens)
        return list(most.values())

    def _take(self, request_id: str) -> None:
        queue = self._queues.queue_of(request_id)
        live = self._queues.take(request_id)
        if queue is not None and live is not None:
            self._private_tokens[queue] -= live.decode_tokens
