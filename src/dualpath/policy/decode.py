"""Two-level decode scheduling: groups by tokens, then engines by threshold Z (§6.1).

Phase 1 drains the global queue when any DE group fetches: each request joins the private queue of
the group with the fewest tokens.  Phase 2 serves the private queue of the fetching group from its
head: among the engines with enough HBM, low-token ones (tok + len ≤ Z) by fewest requests, else
high-token ones by fewest tokens; when no engine has the HBM the fetch ends.

Left open by the paper, decided here:

- A group's total counts its private queue as well; otherwise one drain would send everything to
  the same group.
- A group in which no engine could ever hold the request is passed over; without any such group
  the request stays in the global queue, behind which nobody waits.
- Equal request counts go to the engine with fewer tokens, everything else equal to the lowest
  order (groups: the one that joined first).
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.policy.accounts import FREE_HBM, SEQ, TOK, Column, IntArray
from dualpath.policy.load import GroupState, Ledger
from dualpath.policy.placement import Placement, Ticket, WaitQueues


def choose_group(totals: Column, largest_hbm: Column, length: int) -> int:
    """Phase 1: return the row of the group with the fewest tokens, -1 if none can hold it.

    This and the other kernels compile with numba as they stand.
    """
    best = -1
    for row in range(len(totals)):
        if largest_hbm[row] >= length and (best < 0 or totals[row] < totals[best]):
            best = row
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
    tok: Column, seq: Column, free_hbm: Column, lengths: Column, threshold_factor: float
) -> tuple[IntArray, NDArray[np.bool_]]:
    """Phase 2: return the rows given to the first requests of R, and which were low-token.

    ``tok``, ``seq`` and ``free_hbm`` have one row per engine of the group in order, ``lengths``
    holds R.  The result is as long as the number of requests placed.
    """
    tokens, requests, free = tok.copy(), seq.copy(), free_hbm.copy()
    threshold = threshold_factor * (sum(lengths) + sum(tokens)) / len(tokens)
    rows = np.empty(len(lengths), np.int64)
    low_token = np.empty(len(lengths), np.bool_)
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
            return rows[:position], low_token[:position]
        rows[position] = row
        low_token[position] = low >= 0
        tokens[row] += length
        requests[row] += 1
        free[row] -= length
    return rows, low_token


class TwoPhaseDecodePlacer:
    """The global queue and the private queue of every DE group."""

    def __init__(self, ledger: Ledger, threshold_factor: float) -> None:
        self._ledger = ledger
        self._threshold_factor = threshold_factor
        self._queues = WaitQueues()
        self._private_tokens: dict[str, int] = {}

    def add(self, ticket: Ticket) -> None:
        """Let a ticket wait at the end of the global queue."""
        self._queues.add(ticket)

    def discard(self, request_id: str) -> None:
        """Forget a waiting ticket."""
        self._take(request_id)

    def waiting(self) -> int:
        """How many tickets wait, private queues included."""
        return len(self._queues)

    def recall(self, tickets: Iterable[Ticket] = ()) -> None:
        """Bring everything back to the global queue in order of number."""
        self._queues.recall(tickets)
        self._private_tokens.clear()

    def fetch(self, group: str) -> list[Placement]:
        """Run both phases for one group."""
        if self._queues.common:
            self._drain_global_queue()
        return self._serve_private_queue(self._ledger.groups[group])

    def _drain_global_queue(self) -> None:
        groups = self._ledger.groups_of(Role.DECODE)
        private = self._private_tokens
        taking = [group.taking() for group in groups]
        totals = [
            sum(t.columns[TOK]) + private.get(g.name, 0)
            for g, t in zip(groups, taking, strict=True)
        ]
        largest = [t.largest_hbm_tokens for t in taking]
        for ticket in list(self._queues.common.values()):
            row = choose_group(totals, largest, ticket.decode_tokens)
            if row < 0:
                continue
            totals[row] += ticket.decode_tokens
            name = groups[row].name
            private[name] = private.get(name, 0) + ticket.decode_tokens
            self._queues.deal(ticket, name)

    def _serve_private_queue(self, group: GroupState) -> list[Placement]:
        queue = self._queues.private(group.name)
        taking = group.taking()
        lengths = upper_bound_set(
            taking.columns[FREE_HBM], (ticket.decode_tokens for ticket in queue)
        )
        if not lengths:
            return []
        rows, low_token = assign_decode(
            taking.columns[TOK],
            taking.columns[SEQ],
            taking.columns[FREE_HBM],
            lengths,
            self._threshold_factor,
        )
        tickets = [ticket for ticket, _ in zip(queue, rows, strict=False)]
        placements = []
        for ticket, row, low in zip(tickets, rows.tolist(), low_token.tolist(), strict=True):
            engine_id = taking.engines[row].spec.engine_id
            self._take(ticket.request_id)
            self._ledger.hold(engine_id, ticket.request_id, ticket.decode_tokens)
            reason = "low-token min-seq" if low else "high-token min-tok"
            placements.append(Placement(ticket, engine_id, reason))
        return placements

    def _take(self, request_id: str) -> None:
        queue = self._queues.queue_of(request_id)
        ticket = self._queues.take(request_id)
        if queue is not None and ticket is not None:
            self._private_tokens[queue] -= ticket.decode_tokens
