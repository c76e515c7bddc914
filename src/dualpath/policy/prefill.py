"""Algorithm 1: which prefill engine gets the head of the waiting queue (§6.1).

Engines fall into three categories: overloaded (C1, tok > β), short reading queue (C2, read_q ≤ α)
and long reading queue (C3, read_q > α).  The head goes to the engine of C2 with the fewest tokens,
else to that of C3, else the fetch ends.

Left open by the paper, decided here:

- *Categories are re-evaluated after every assignment.*  The pseudo-code classifies once per fetch,
  which would let one fetch with a long waiting queue pile any number of tokens on an engine
  that started below β.  Re-evaluating bounds every engine's load by β plus one request.
- Reading queues stand still within a fetch: a read is queued only when the DE is known too.
- Ties go to the lowest order.
- Blocks that an engine caches in DRAM weigh within its category (``policy.placement``).
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import numpy as np

from dualpath.core.cluster import Role
from dualpath.policy.accounts import NODE, TOK, Column, IntArray, Ledger, Table
from dualpath.policy.events import PE_KEPT, PE_LONG_QUEUE, PE_REASONS, PE_SHORT_QUEUE
from dualpath.policy.placement import LiveRequest, cached_table, prefill_worth, weighed_tokens

#: Waiting requests given to the first kernel call of a fetch; while all of them are placed, the
#: next call gets twice as many.
WINDOW_REQUESTS = 4


def assign_prefill(
    tok: Column,
    node: Column,
    read_q: Column,
    lengths: Column,
    cached_rows: Column,
    cached: Table,
    worth: float,
    alpha_tokens: int,
    beta_tokens: int,
) -> tuple[IntArray, IntArray]:
    """Return the rows given to the first requests of a queue, and why (places in ``PE_REASONS``).

    ``tok`` and ``node`` have one row per engine of the group in order, ``read_q`` one per node,
    ``lengths`` the tokens of the waiting requests, head first.  ``cached[cached_rows[i]]`` are the
    tokens each engine caches of request i (none if that is ``NOTHING_CACHED``), ``worth`` of them
    is as ``prefill_worth`` says.  The result is as long as the number of requests placed.  Compiles
    with numba as it stands.
    """
    load = tok.copy()
    rows = np.empty(len(lengths), np.int64)
    why = np.empty(len(lengths), np.int64)
    for position in range(len(lengths)):
        second = third = -1
        for row in range(len(load)):
            if load[row] > beta_tokens:
                continue
            if read_q[node[row]] <= alpha_tokens:
                if second < 0 or load[row] < load[second]:
                    second = row
            elif third < 0 or load[row] < load[third]:
                third = row
        row = second if second >= 0 else third
        if row < 0:
            return rows[:position], why[:position]
        why[position] = PE_SHORT_QUEUE if second >= 0 else PE_LONG_QUEUE
        if cached_rows[position] >= 0:
            of_engine = cached[cached_rows[position]]
            least = weighed_tokens(load[row], of_engine[row], worth)
            for other in range(len(load)):
                if load[other] > beta_tokens or (
                    second >= 0 and read_q[node[other]] > alpha_tokens
                ):
                    continue
                weighed = weighed_tokens(load[other], of_engine[other], worth)
                if weighed < least:
                    row, least = other, weighed
                    why[position] = PE_KEPT
        rows[position] = row
        load[row] += lengths[position]
    return rows, why


class FifoPrefillPlacer:
    """The waiting queue of Algorithm 1: any group's fetch takes from its head."""

    def __init__(self, ledger: Ledger, alpha_tokens: int, beta_tokens: int) -> None:
        self._ledger = ledger
        self.set_thresholds(alpha_tokens, beta_tokens)
        self._queue: OrderedDict[str, LiveRequest] = OrderedDict()

    def set_thresholds(self, alpha_tokens: int, beta_tokens: int) -> None:
        """Use another α and β from now on."""
        self._alpha_tokens, self._beta_tokens = alpha_tokens, beta_tokens
        self._worth = prefill_worth(alpha_tokens, beta_tokens)

    def add(self, live: LiveRequest) -> None:
        """Append a request to the queue."""
        self._queue[live.request_id] = live

    def discard(self, request_id: str) -> None:
        """Remove a waiting request; does nothing if it does not wait here."""
        self._queue.pop(request_id, None)

    def waiting(self) -> int:
        """Return how many requests wait."""
        return len(self._queue)

    def requeue(self, requests: Iterable[LiveRequest] = ()) -> None:
        """Merge ``requests`` into the queue in order of number."""
        merged = sorted([*self._queue.values(), *requests], key=lambda live: live.number)
        self._queue = OrderedDict((live.request_id, live) for live in merged)

    def may_place(self, group: str) -> bool:
        """Whether a request waits; any group may take it."""
        return bool(self._queue)

    def waits_for_kv(self, group: str) -> bool:
        """Return False: no request waits for a certain engine."""
        return False

    def fetch(self, group: str, now_s: float) -> list[LiveRequest]:
        """Run Algorithm 1 for one group."""
        placed: list[LiveRequest] = []
        while self._queue:
            window = list(islice(self._queue.values(), WINDOW_REQUESTS))
            of_window = self._place(group, window)
            placed += of_window
            if len(of_window) < len(window):
                break
        return placed

    def _place(self, group: str, window: list[LiveRequest]) -> list[LiveRequest]:
        taking = self._ledger.groups[group].taking()
        rows, why = assign_prefill(
            taking.columns[TOK],
            taking.columns[NODE],
            self._ledger.node_read_q,
            [live.prefill_tokens for live in window],
            *cached_table(window, taking),
            self._worth,
            self._alpha_tokens,
            self._beta_tokens,
        )
        placed = window[: len(rows)]
        for live, row, reason in zip(placed, rows.tolist(), why.tolist(), strict=True):
            engine_id = taking.engines[row].spec.engine_id
            del self._queue[live.request_id]
            self._ledger.hold(engine_id, live.request_id, live.prefill_tokens)
            live.place(Role.PREFILL, engine_id, PE_REASONS[reason])
        return placed
