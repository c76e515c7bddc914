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

from dualpath.policy.load import IntArray, Ledger
from dualpath.policy.placement import Placement, Ticket

#: Added to the tokens of C3 so that any engine of C2 ranks before it; tokens stay below.
LONG_QUEUE = 1 << 60
#: Rank of C1.
OVERLOADED = 1 << 62
#: Waiting requests looked at in one kernel call; the fetch goes on while all of them are placed.
WINDOW_REQUESTS = 64


def assign_prefill(
    tok: IntArray,
    node: IntArray,
    read_q: IntArray,
    lengths: IntArray,
    alpha_tokens: int,
    beta_tokens: int,
) -> tuple[IntArray, NDArray[np.bool_]]:
    """Return the rows given to the first requests of a queue, and which were in C2.

    ``tok`` and ``node`` have one row per engine of the group in order, ``read_q`` one per node,
    ``lengths`` the tokens of the waiting requests, head first.  The result is as long as the
    number of requests placed.  Compiles with numba as it stands.
    """
    load = tok.copy()
    rank = np.where(read_q[node] > alpha_tokens, load + LONG_QUEUE, load)
    rank = np.where(load > beta_tokens, OVERLOADED, rank)
    rows = np.empty(lengths.size, np.int64)
    short = np.empty(lengths.size, np.bool_)
    for position in range(lengths.size):
        row = rank.argmin()
        if rank[row] == OVERLOADED:
            return rows[:position], short[:position]
        rows[position] = row
        short[position] = rank[row] < LONG_QUEUE
        load[row] += lengths[position]
        rank[row] = OVERLOADED if load[row] > beta_tokens else rank[row] + lengths[position]
    return rows, short


class FifoPrefillPlacer:
    """The waiting queue of Algorithm 1: any group's fetch takes from its head."""

    def __init__(self, ledger: Ledger, alpha_tokens: int, beta_tokens: int) -> None:
        self._ledger = ledger
        self._alpha_tokens = alpha_tokens
        self._beta_tokens = beta_tokens
        self._queue: OrderedDict[str, Ticket] = OrderedDict()

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
        state = self._ledger.groups[group]
        rows, short = assign_prefill(
            state.tok,
            state.node,
            self._ledger.node_read_q,
            np.array([ticket.prefill_tokens for ticket in window], np.int64),
            self._alpha_tokens,
            self._beta_tokens,
        )
        placements = []
        for ticket, row, is_short in zip(window, rows.tolist(), short.tolist(), strict=False):
            engine_id = state.engines[row].spec.engine_id
            del self._queue[ticket.request_id]
            self._ledger.hold(engine_id, ticket.request_id, ticket.prefill_tokens)
            reason = "short-queue" if is_short else "long-queue"
            placements.append(Placement(ticket, engine_id, reason))
        return placements
