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
- What an engine's DRAM keeps of the prompt weighs within its category (``policy.kept``).
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import numpy as np

from dualpath.policy.accounts import NODE, TOK, Column, IntArray, Table
from dualpath.policy.events import PE_KEPT, PE_LONG_QUEUE, PE_REASONS, PE_SHORT_QUEUE
from dualpath.policy.kept import prefill_worth, weighed_tokens
from dualpath.policy.load import Ledger
from dualpath.policy.placement import Placement, Ticket, kept_table

#: Waiting requests given to the first kernel call of a fetch; while all of them are placed, the
#: next call gets twice as many.
WINDOW_REQUESTS = 4


def assign_prefill(
    tok: Column,
    node: Column,
    read_q: Column,
    lengths: Column,
    kept_rows: Column,
    kept: Table,
    worth: float,
    alpha_tokens: int,
    beta_tokens: int,
) -> tuple[IntArray, IntArray]:
    """Return the rows given to the first requests of a queue, and why (places in ``PE_REASONS``).

    ``tok`` and ``node`` have one row per engine of the group in order, ``read_q`` one per node,
    ``lengths`` the tokens of the waiting requests, head first.  ``kept[kept_rows[i]]`` are the
    tokens each engine keeps of request i (none where that is ``NOTHING_KEPT``), ``worth`` of them
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
        if kept_rows[position] >= 0:
            of_engine = kept[kept_rows[position]]
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
        self._queue: OrderedDict[str, Ticket] = OrderedDict()

    def set_thresholds(self, alpha_tokens: int, beta_tokens: int) -> None:
        """Go on with another α and β."""
        self._alpha_tokens, self._beta_tokens = alpha_tokens, beta_tokens
        self._worth = prefill_worth(alpha_tokens, beta_tokens)

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
        most = WINDOW_REQUESTS
        while self._queue:
            window = list(islice(self._queue.values(), most))
            placed = self._place(group, window)
            placements += placed
            if len(placed) < len(window):
                break
            most *= 2
        return placements

    def _place(self, group: str, window: list[Ticket]) -> list[Placement]:
        taking = self._ledger.groups[group].taking()
        rows, why = assign_prefill(
            taking.columns[TOK],
            taking.columns[NODE],
            self._ledger.node_read_q,
            [ticket.prefill_tokens for ticket in window],
            *kept_table(window, taking),
            self._worth,
            self._alpha_tokens,
            self._beta_tokens,
        )
        placements = []
        for ticket, row, reason in zip(window, rows.tolist(), why.tolist(), strict=False):
            engine_id = taking.engines[row].spec.engine_id
            del self._queue[ticket.request_id]
            self._ledger.hold(engine_id, ticket.request_id, ticket.prefill_tokens)
            placements.append(Placement(ticket, engine_id, PE_REASONS[reason]))
        return placements
