"""How much of the storage NIC writes may take while requests wait for reads.

Nobody waits for a write, but reads and writes share the device.  Counted in bytes: where ``share``
is 0.2, a byte may be written for every four that are read.  So no rate has to be known, and a
storage that caches what is written is charged all the same.  While no read is open, writes pass.
"""

from collections.abc import Callable

from dualpath.engine.threads import OS_THREADS, Threads

#: Reads that do not move for so long do not hold writes up any longer.
_STILL_S = 5.0


class WriteShare:
    """One engine's; 0 < ``share`` <= 1 of what it reads and writes together, 1 is no bound.

    The blocks of one request are written in one go: what is more than the share then is made up for
    before the next write.  For several threads.
    """

    def __init__(self, share: float = 1.0, threads: Threads = OS_THREADS) -> None:
        self._written_per_read = share / (1 - share) if share < 1 else None
        self._wake = threads.condition()
        self._reading = False
        self._closed = False
        #: Written beyond the share since reads are open.
        self._ahead_bytes = 0.0

    def reading(self, some: bool) -> None:
        """From now on there are reads that requests wait for, or there are none."""
        if self._written_per_read is None:
            return
        with self._wake:
            self._reading = some
            if not some:
                self._ahead_bytes = 0.0
                self._wake.notify_all()

    def read(self, size_bytes: int) -> None:
        """So much has been read."""
        if self._written_per_read is None:
            return
        with self._wake:
            made_up_bytes = size_bytes * self._written_per_read
            self._ahead_bytes = max(self._ahead_bytes - made_up_bytes, 0.0)
            self._wake.notify_all()

    def wait_to_write(self, size_bytes: int, moves: Callable[[], None] = lambda: None) -> None:
        """Wait until so much may be written, but no longer than reads move: ``moves`` is called."""
        if self._written_per_read is None:
            return
        with self._wake:
            while self._is_ahead and self._wake.wait(_STILL_S):
                moves()
            if self._reading:
                self._ahead_bytes += size_bytes

    def close(self) -> None:
        """Hold nothing up from now on; idempotent."""
        if self._written_per_read is None:
            return
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    @property
    def _is_ahead(self) -> bool:
        return self._reading and not self._closed and self._ahead_bytes >= 1
