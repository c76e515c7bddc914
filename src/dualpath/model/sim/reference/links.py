"""Links: servers that carry bytes first come, first served, storage NICs (§2.3), their use."""

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dualpath.model.sim.reference.events import EventQueue
from dualpath.model.sim.rules import (
    count_use,
    equal_served_bytes,
    equal_wait_ns,
    last_window,
    serve,
)

Done = Callable[[], None]


class WindowedBytes:
    """Bytes per window of time and node: transfers, each spread evenly over the time it took."""

    def __init__(self, window_ns: int, nodes: int) -> None:
        self._window_ns = window_ns
        self._nodes = nodes
        self._rows: list[list[float]] = []

    def add(self, node: int, start_ns: int, end_ns: int, transfer_bytes: float) -> None:
        """Count a transfer that lasted from ``start_ns`` to ``end_ns``."""
        last = last_window(start_ns, end_ns, self._window_ns)
        while len(self._rows) <= last:
            self._rows.append([0.0] * self._nodes)
        count_use(self._rows, node, start_ns, end_ns, last, transfer_bytes, self._window_ns)

    def table(self, windows: int) -> NDArray[np.float64]:
        """Return bytes as windows × nodes, with at least ``windows`` rows."""
        table = np.zeros((max(windows, len(self._rows)), self._nodes))
        if self._rows:
            table[: len(self._rows)] = self._rows
        return table


class Server:
    """A link direction or a memory: what is charged later is carried later."""

    def __init__(
        self, bytes_per_s: float, usage: WindowedBytes | None = None, node: int = 0
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._usage = usage
        self._node = node
        self.busy_until_ns = 0

    def charge(self, now_ns: int, transfer_bytes: float) -> int:
        """Queue a transfer and return when it is over."""
        start_ns, self.busy_until_ns = serve(
            now_ns, self.busy_until_ns, transfer_bytes, self._bytes_per_s
        )
        if self._usage is not None:
            self._usage.add(self._node, start_ns, self.busy_until_ns, transfer_bytes)
        return self.busy_until_ns


class FifoSnic:
    """A storage NIC that serves one read after the other at full rate."""

    def __init__(self, events: EventQueue, server: Server, latency_ns: int) -> None:
        self._events = events
        self._server = server
        self._latency_ns = latency_ns

    def read(self, read_bytes: float, done: Done) -> None:
        """Queue a read now; ``done`` runs when its last byte is in DRAM."""
        end_ns = self._server.charge(self._events.now_ns, read_bytes)
        self._events.at(end_ns + self._latency_ns, done)


class EqualSnic:
    """A storage NIC that serves all reads at once, each at an equal part of its rate.

    ``served_bytes`` is what each read under way since the beginning would have got: a read ends
    when it has grown by the read's bytes (processor sharing in virtual time).
    """

    def __init__(
        self,
        events: EventQueue,
        bytes_per_s: float,
        latency_ns: int,
        usage: WindowedBytes,
        node: int,
    ) -> None:
        self._events = events
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns
        self._usage = usage
        self._node = node
        self._served_bytes = 0.0
        self._since_ns = 0
        self._reads: list[tuple[float, int, Done]] = []
        self._count = 0
        self._version = 0

    def read(self, read_bytes: float, done: Done) -> None:
        """Begin a read now; ``done`` runs when its last byte is in DRAM."""
        self._advance()
        heapq.heappush(self._reads, (self._served_bytes + read_bytes, self._count, done))
        self._count += 1
        self._expect_next()

    def _advance(self) -> None:
        now_ns = self._events.now_ns
        if self._reads:
            carried = equal_served_bytes(now_ns - self._since_ns, self._bytes_per_s)
            self._served_bytes += carried / len(self._reads)
            self._usage.add(self._node, self._since_ns, now_ns, carried)
        self._since_ns = now_ns

    def _expect_next(self) -> None:
        self._version += 1
        left = self._reads[0][0] - self._served_bytes
        wait_ns = equal_wait_ns(left, len(self._reads), self._bytes_per_s)
        self._events.at(self._events.now_ns + wait_ns, self._end_next, self._version)

    def _end_next(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        end_bytes, _, done = heapq.heappop(self._reads)
        self._served_bytes = max(self._served_bytes, end_bytes)
        self._events.at(self._events.now_ns + self._latency_ns, done)
        if self._reads:
            self._expect_next()
