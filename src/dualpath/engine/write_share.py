"""The share of the storage NIC that writes may use while requests wait for reads.

No request waits for a write, but reads and writes share the device.  The share is counted in bytes:
with ``share`` 0.2, one byte may be written for every four bytes read.  So no rate has to be known,
and writes that the storage caches count as well.  While no read is open, writes are not limited.
"""

from collections.abc import Callable

from dualpath.engine.threads import OS_THREADS, Threads

#: Reads without progress for this time do not delay writes any longer.
_NO_PROGRESS_S = 5.0


class WriteShare:
    """The share of one engine; 0 < ``share`` <= 1 of all bytes read and written, 1 is no limit.

    The blocks of one request are written at once: the excess over the share is compensated before
    the next write.  Thread-safe.
    """

    def __init__(self, share: float = 1.0, threads: Threads = OS_THREADS) -> None:
        self._written_per_read = share / (1 - share) if share < 1 else None
        self._wake = threads.condition()
        self._reading = False
        self._closed = False
        #: Bytes written beyond the share while reads are open.
        self._ahead_bytes = 0.0

    def reading(self, some: bool) -> None:
        """Set whether requests wait for reads."""
        if self._written_per_read is None:
            return
        with self._wake:
            self._reading = some
            if not some:
                self._ahead_bytes = 0.0
                self._wake.notify_all()

    def read(self, size_bytes: int) -> None:
        """Bytes have been read."""
        if self._written_per_read is None:
            return
        with self._wake:
            allowed_bytes = size_bytes * self._written_per_read
            self._ahead_bytes = max(self._ahead_bytes - allowed_bytes, 0.0)
            self._wake.notify_all()

    def wait_to_write(self, size_bytes: int, progressed: Callable[[], None] = lambda: None) -> None:
        """Wait until a write is allowed, or reads make no progress.

        ``progressed`` is called with the progress of reads.
        """
        if self._written_per_read is None:
            return
        with self._wake:
            while self._is_ahead and self._wake.wait(_NO_PROGRESS_S):
                progressed()
            if self._reading:
                self._ahead_bytes += size_bytes

    def close(self) -> None:
        """Delay no writes from now on; idempotent."""
        if self._written_per_read is None:
            return
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    @property
    def _is_ahead(self) -> bool:
        return self._reading and not self._closed and self._ahead_bytes >= 1
