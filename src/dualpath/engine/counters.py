"""Monotonic totals an engine reports; the router turns them into metrics."""

import threading
from enum import StrEnum


class Counter(StrEnum):
    """Names on the wire."""

    STORAGE_READ_BYTES = "storage_read_bytes"
    STORAGE_WRITE_BYTES = "storage_write_bytes"
    H2D_BYTES = "h2d_bytes"
    PE_TO_DE_BYTES = "pe_to_de_bytes"
    DE_TO_PE_BYTES = "de_to_pe_bytes"
    D2H_BYTES = "d2h_bytes"
    # ``pe_to_de`` and ``de_to_pe`` again, in parts, by what they carry (``plan.steps``).
    PE_HIT_BYTES = "pe_hit_bytes"
    MISS_BYTES = "miss_bytes"
    DE_HIT_BYTES = "de_hit_bytes"
    RELOAD_BYTES = "reload_bytes"
    LOADED_BLOCKS = "loaded_blocks"
    PERSISTED_BLOCKS = "persisted_blocks"
    PERSIST_DROPPED_BLOCKS = "persist_dropped_blocks"
    VERIFY_FAILURES = "verify_failures"
    READ_DEADLINES = "read_deadlines"
    TRANSFER_FAILURES = "transfer_failures"
    STALE_TRANSFERS = "stale_transfers"


class Counters:
    """Thread-safe totals, all starting at zero."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {name.value: 0 for name in Counter}

    def add(self, name: Counter, amount: float) -> None:
        """Add a non-negative amount."""
        with self._lock:
            self._totals[name.value] += amount

    def snapshot(self) -> dict[str, float]:
        """Return a copy of all totals."""
        with self._lock:
            return dict(self._totals)
