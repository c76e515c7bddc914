"""Requests on their way to an engine: tickets, waiting lines, and what a placement rule is."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

import msgspec

from dualpath.core.request import Request


class Ticket(msgspec.Struct, frozen=True, eq=False):
    """A submitted request; ``number`` is its place in submission order.

    ``prefill_tokens`` is tokens(r) of Algorithm 1, ``decode_tokens`` len_r of §6.1.
    """

    request_id: str
    request: Request
    number: int
    prefill_tokens: int
    decode_tokens: int


class Placement(msgspec.Struct, frozen=True):
    """A ticket's engine, already charged to the ledger, and why it is that one."""

    ticket: Ticket
    engine_id: str
    reason: str


class Placer(Protocol):
    """Gives the engines of one role to tickets; first come, first served in each line."""

    def add(self, ticket: Ticket) -> None:
        """Let a ticket wait behind all others."""

    def discard(self, request_id: str) -> None:
        """Forget a waiting ticket; nothing happens if it does not wait here."""

    def fetch(self, group: str) -> list[Placement]:
        """Place what can be placed on the engines of ``group`` and charge the ledger."""

    def recall(self, tickets: Iterable[Ticket] = ()) -> None:
        """Start over after engines came or went: lines merge, with ``tickets``, by number."""

    def waiting(self) -> int:
        """How many tickets wait."""


class WaitQueues:
    """A common waiting line from which tickets are dealt to private lines, all of them FIFO."""

    def __init__(self) -> None:
        self.common: OrderedDict[str, Ticket] = OrderedDict()
        self._private: dict[str, OrderedDict[str, Ticket]] = {}
        self._line_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.common) + len(self._line_of)

    def add(self, ticket: Ticket) -> None:
        """Put a ticket at the end of the common line."""
        self.common[ticket.request_id] = ticket

    def deal(self, ticket: Ticket, line: str) -> None:
        """Move a ticket from the common line to the end of a private one."""
        del self.common[ticket.request_id]
        self._private.setdefault(line, OrderedDict())[ticket.request_id] = ticket
        self._line_of[ticket.request_id] = line

    def private(self, line: str) -> Iterable[Ticket]:
        """Tickets of a private line, head first; the line must not change meanwhile."""
        return self._private.get(line, {}).values()

    def length(self, line: str) -> int:
        """Tickets in a private line."""
        return len(self._private.get(line, ()))

    def take(self, request_id: str) -> Ticket | None:
        """Remove a ticket from wherever it waits and return it."""
        if request_id in self.common:
            return self.common.pop(request_id)
        line = self._line_of.pop(request_id, None)
        return None if line is None else self._private[line].pop(request_id)

    def line_of(self, request_id: str) -> str | None:
        """The private line in which a ticket waits, if it does."""
        return self._line_of.get(request_id)

    def recall(self, tickets: Iterable[Ticket]) -> None:
        """Bring all tickets, and ``tickets``, into the common line in order of number."""
        merged = [*self.common.values(), *tickets]
        for line in self._private.values():
            merged.extend(line.values())
        self._private.clear()
        self._line_of.clear()
        merged.sort(key=lambda ticket: ticket.number)
        self.common = OrderedDict((ticket.request_id, ticket) for ticket in merged)
