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
- What an engine's DRAM keeps of the prompt weighs among those that have room for the request,
  groups and engines (``policy.kept``).  Z needs no second look: who weighs less than the usual
  engine, what it keeps taken off, is as far below Z as that one.
- Equal request counts go to the engine with fewer tokens, everything else equal to the lowest
  order (groups: the one that joined first).
"""

from collections.abc import Iterable
from itertools import islice

import numpy as np

from dualpath.core.cluster import Role
from dualpath.policy.accounts import FREE_HBM, SEQ, TOK, Column, IntArray, Table
from dualpath.policy.events import DE_HIGH_TOKEN, DE_KEPT, DE_LOW_TOKEN, DE_REASONS
from dualpath.policy.kept import DECODE_WORTH, weighed_tokens
from dualpath.policy.load import GroupState, Ledger, Taking
from dualpath.policy.placement import Placement, Ticket, WaitQueues, kept_table


def choose_group(totals: Column, largest_hbm: Column, length: int) -> int:
    """Phase 1: return the row of the group with the fewest tokens, -1 if none can hold it.

    This and the other kernels compile with numba as they stand.
    """
    best = -1
    for row in range(len(totals)):
        if largest_hbm[row] >= length and (best < 0 or totals[row] < totals[best]):
            best = row
    return best


def choose_keeping_group(
    totals: Column, largest_hbm: Column, length: int, kept: Column, usual: int
) -> int:
    """Phase 1: return the group that takes a request of which something is kept.

    ``kept`` are the most tokens that any engine of a group keeps; ``usual`` is the group of
    ``choose_group``.
    """
    best, least = usual, weighed_tokens(totals[usual], kept[usual], DECODE_WORTH)
    for row in range(len(totals)):
        weighed = weighed_tokens(totals[row], kept[row], DECODE_WORTH)
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
    kept_rows: Column,
    kept: Table,
    threshold_factor: float,
) -> tuple[IntArray, IntArray]:
    """Phase 2: return the rows given to the first requests of R, and why (in ``DE_REASONS``).

    ``tok``, ``seq`` and ``free_hbm`` have one row per engine of the group in order, ``lengths``
    holds R, ``kept_rows`` and ``kept`` are as for ``assign_prefill``.  The result is as long as the
    number of requests placed.
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
        if kept_rows[position] >= 0:
            of_engine, usual = kept[kept_rows[position]], row
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
            if ticket.kept_tokens:
                kept = [_most_kept(ticket, group) for group in taking]
                row = choose_keeping_group(totals, largest, ticket.decode_tokens, kept, row)
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
        bound = list(islice(queue, len(lengths)))
        rows, why = assign_decode(
            taking.columns[TOK],
            taking.columns[SEQ],
            taking.columns[FREE_HBM],
            lengths,
            *kept_table(bound, taking),
            self._threshold_factor,
        )
        placements = []
        for ticket, row, reason in zip(bound, rows.tolist(), why.tolist(), strict=False):
            engine_id = taking.engines[row].spec.engine_id
            self._take(ticket.request_id)
            self._ledger.hold(engine_id, ticket.request_id, ticket.decode_tokens)
            placements.append(Placement(ticket, engine_id, DE_REASONS[reason]))
        return placements

    def _take(self, request_id: str) -> None:
        queue = self._queues.queue_of(request_id)
        ticket = self._queues.take(request_id)
        if queue is not None and ticket is not None:
            self._private_tokens[queue] -= ticket.decode_tokens


def _most_kept(ticket: Ticket, taking: Taking) -> int:
    kept = ticket.kept_tokens
    return max((kept.get(engine.spec.engine_id, 0) for engine in taking.engines), default=0)
