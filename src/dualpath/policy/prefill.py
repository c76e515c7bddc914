"""Algorithm 1: which prefill engine gets the head of the waiting queue (§6.1).

Engines fall into three categories: overloaded (C1, tok > β), short reading queue (C2, read_q ≤ α)
and long reading queue (C3, read_q > α).  The head goes to the engine of C2 with the fewest tokens,
else to that of C3, else the fetch ends.

Left open by the paper, decided here:

- *Categories are re-evaluated after every assignment.*  The pseudo-code classifies once per fetch,
  which would let one fetch with a long waiting queue pile any number of tokens on an engine
  that started below β.  Re-evaluating keeps every engine at β plus one request.
- Reading queues stand still within a fetch: a read is queued only when the DE is known too.
- Ties go to the lowest order.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dualpath.policy.accounts import NODE, TOK, Column, IntArray
from dualpath.policy.load import Ledger
from dualpath.policy.placement import Placement, Ticket

#: Waiting requests looked at in one kernel call; the fetch goes on while all of them are placed.
WINDOW_REQUESTS = 64


def assign_prefill(
    tok: Column,
    node: Column,
    read_q: Column,
    lengths: Column,
    alpha_tokens: int,
    beta_tokens: int,
) -> tuple[IntArray, NDArray[np.bool_]]:
    """Return the rows given to the first requests of a queue, and which were in C2.

    ``tok`` and ``node`` have one row per engine of the group in order, ``read_q`` one per node,
    ``lengths`` the tokens of the waiting requests, head first.  The result is as long as the
    number of requests placed.  Compiles with numba as it stands.
    """
    load = tok.copy()
    rows = np.empty(len(lengths), np.int64)
    short = np.empty(len(lengths), np.bool_)
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
            return rows[:position], short[:position]
        rows[position] = row
        short[position] = second >= 0
        load[row] += lengths[position]
    return rows, short


class FifoPrefillPlacer:
    """The waiting queue of Algorithm 1: any group's fetch takes from its head."""

    def __init__(self, ledger: Ledger, alpha_tokens: int, beta_tokens: int) -> None:
        self._ledger = ledger
        self._alpha_tokens = alpha_tokens
        self._beta_tokens = beta_tokens
        self._queue: OrderedDict[str, Ticket] = OrderedDict()

    def set_thresholds(self, alpha_tokens: int, beta_tokens: int) -> None:
        """Go on with another α and β."""
        self._alpha_tokens, self._beta_tokens = alpha_tokens, beta_tokens

    def add(self, ticket: Ticket) -> None:
        """Let a ticket wait behind all others."""
        self._queue[ticket.request_id] = ticket

    def discard(self, request_id: str) -> None:
        """Forget a waiting ticket."""
        self._queue.pop(request_id, None)

    def waiting(self) -> int:
        """How many tickets wait."""
        return len(self._queue)

    def recall(self, tickets: Iterable[Ticket] = ()) -> None:
        """Take tickets back in order of number; the others wait here anyway."""
        merged = sorted([*self._queue.values(), *tickets], key=lambda ticket: ticket.number)
        self._queue = OrderedDict((ticket.request_id, ticket) for ticket in merged)

    def fetch(self, group: str) -> list[Placement]:
        """Run Algorithm 1 for one group."""
        placements: list[Placement] = []
        while self._queue:
            window = list(islice(self._queue.values(), WINDOW_REQUESTS))
            placed = self._place(group, window)
            placements += placed
            if len(placed) < len(window):
                break
        return placements

    def _place(self, group: str, window: list[Ticket]) -> list[Placement]:
        taking = self._ledger.groups[group].taking()
        rows, short = assign_prefill(
            taking.columns[TOK],
            taking.columns[NODE],
            self._ledger.node_read_q,
            [ticket.prefill_tokens for ticket in window],
            self._alpha_tokens,
            self._beta_tokens,
        )
        placements = []
        for ticket, row, is_short in zip(window, rows.tolist(), short.tolist(), strict=False):
            engine_id = taking.engines[row].spec.engine_id
            del self._queue[ticket.request_id]
            self._ledger.hold(engine_id, ticket.request_id, ticket.prefill_tokens)
            reason = "short-queue" if is_short else "long-queue"
            placements.append(Placement(ticket, engine_id, reason))
        return placements
