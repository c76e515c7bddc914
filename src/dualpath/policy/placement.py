"""Requests on their way to an engine: tickets, wait queues, and what a placement rule is."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from dualpath.core.request import Request
from dualpath.policy.kept import NOTHING_KEPT
from dualpath.policy.load import Taking


class Ticket(msgspec.Struct, frozen=True, eq=False):
    """A submitted request; ``number`` is its place in submission order.

    ``prefill_tokens`` is tokens(r) of Algorithm 1, ``decode_tokens`` len_r of §6.1,
    ``kept_tokens`` what is left for it in engines' DRAM, by engine.
    """

    request_id: str
    request: Request
    number: int
    prefill_tokens: int
    decode_tokens: int
    kept_tokens: Mapping[str, int] = {}


class Placement(msgspec.Struct, frozen=True):
    """A ticket's engine, already charged to the ledger, and why it is that one."""

    ticket: Ticket
    engine_id: str
    reason: str


def kept_table(tickets: Sequence[Ticket], taking: Taking) -> tuple[list[int], list[list[int]]]:
    """Return, for a kernel, the row of each ticket in a table, and the table: tokens by engine."""
    rows: list[int] = []
    table: list[list[int]] = []
    for ticket in tickets:
        kept = ticket.kept_tokens
        rows.append(len(table) if kept else NOTHING_KEPT)
        if kept:
            table.append([kept.get(engine.spec.engine_id, 0) for engine in taking.engines])
    return rows, table


class Placer(Protocol):
    """Gives the engines of one role to tickets; first come, first served in each queue."""

    def add(self, ticket: Ticket) -> None:
        """Let a ticket wait behind all others."""

    def discard(self, request_id: str) -> None:
        """Forget a waiting ticket; nothing happens if it does not wait here."""

    def fetch(self, group: str) -> list[Placement]:
        """Place what can be placed on the engines of ``group`` and charge the ledger."""

    def recall(self, tickets: Iterable[Ticket] = ()) -> None:
        """Start over after engines came or went: queues merge, with ``tickets``, by number."""

    def waiting(self) -> int:
        """How many tickets wait."""


class WaitQueues:
    """A common queue from which tickets are dealt to private queues, all of them FIFO."""

    def __init__(self) -> None:
        self.common: OrderedDict[str, Ticket] = OrderedDict()
        self._private: dict[str, OrderedDict[str, Ticket]] = {}
        self._queue_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.common) + len(self._queue_of)

    def add(self, ticket: Ticket) -> None:
        """Put a ticket at the end of the common queue."""
        self.common[ticket.request_id] = ticket

    def deal(self, ticket: Ticket, queue: str) -> None:
        """Move a ticket from the common queue to the end of a private one."""
        del self.common[ticket.request_id]
        self._private.setdefault(queue, OrderedDict())[ticket.request_id] = ticket
        self._queue_of[ticket.request_id] = queue

    def private(self, queue: str) -> Iterable[Ticket]:
        """Tickets of a private queue, head first; it must not change meanwhile."""
        return self._private.get(queue, {}).values()

    def length(self, queue: str) -> int:
        """Tickets in a private queue."""
        return len(self._private.get(queue, ()))

    def take(self, request_id: str) -> Ticket | None:
        """Remove a ticket from wherever it waits and return it."""
        if request_id in self.common:
            return self.common.pop(request_id)
        queue = self._queue_of.pop(request_id, None)
        return None if queue is None else self._private[queue].pop(request_id)

    def queue_of(self, request_id: str) -> str | None:
        """The private queue in which a ticket waits, if it does."""
        return self._queue_of.get(request_id)

    def recall(self, tickets: Iterable[Ticket]) -> None:
        """Bring all tickets, and ``tickets``, into the common queue in order of number."""
        merged = [*self.common.values(), *tickets]
        for queue in self._private.values():
            merged.extend(queue.values())
        self._private.clear()
        self._queue_of.clear()
        merged.sort(key=lambda ticket: ticket.number)
        self.common = OrderedDict((ticket.request_id, ticket) for ticket in merged)
