"""How far several threads have come with one run of blocks."""

import threading

from dualpath.storage.contract import ReadOutcome


class RunProgress:
    """The shared progress of one call of ``read``; the run ends at its first bad block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first_bad: int | None = None
        self._reason: str | None = None
        self._bytes_read = 0

    def is_over_before(self, position: int) -> bool:
        """Return whether a block before ``position`` is known to be bad."""
        with self._lock:
            return self._first_bad is not None and self._first_bad < position

    def note(self, position: int, reason: str | None, moved_bytes: int) -> None:
        """Add a block: why it is bad (None: it is good) and what was moved for it."""
        with self._lock:
            self._bytes_read += moved_bytes
            earlier = self._first_bad is None or position < self._first_bad
            if reason is not None and earlier:
                self._first_bad, self._reason = position, reason

    def outcome(self, blocks: int) -> ReadOutcome:
        """Return the result for a run of so many blocks."""
        good = blocks if self._first_bad is None else self._first_bad
        return ReadOutcome(good, self._bytes_read, self._reason)
