"""Bytes per window of time and node, for pictures of link use and balance."""

import numpy as np
from numpy.typing import NDArray


class WindowedBytes:
    """Adds up transfers, each spread evenly over the time it took."""

    def __init__(self, window_ns: int, nodes: int) -> None:
        self._window_ns = window_ns
        self._nodes = nodes
        self._rows: list[list[float]] = []

    def add(self, node: int, start_ns: int, end_ns: int, transfer_bytes: float) -> None:
        """Count a transfer that lasted from ``start_ns`` to ``end_ns``."""
        first = start_ns // self._window_ns
        last = first if end_ns <= start_ns else (end_ns - 1) // self._window_ns
        while len(self._rows) <= last:
            self._rows.append([0.0] * self._nodes)
        if first == last:
            self._rows[first][node] += transfer_bytes
            return
        for window in range(first, last + 1):
            begin = max(start_ns, window * self._window_ns)
            end = min(end_ns, (window + 1) * self._window_ns)
            self._rows[window][node] += transfer_bytes * (end - begin) / (end_ns - start_ns)

    def table(self, windows: int) -> NDArray[np.float64]:
        """Return bytes as windows × nodes, with at least ``windows`` rows."""
        table = np.zeros((max(windows, len(self._rows)), self._nodes))
        if self._rows:
            table[: len(self._rows)] = self._rows
        return table
