"""An engine's part in storage maintenance: its journal, its quota checks and, perhaps, the janitor.

``MaintainedStorage`` wraps a backend and reports its reads and writes to a ``StorageMaintenance``.
The owner of that calls ``tick`` every few seconds on a separate thread.
"""

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, TenantTag
from dualpath.core.errors import StorageError
from dualpath.storage.block_file import HEADER_BYTES, UNREADABLE_HERE
from dualpath.storage.contract import (
    BlockStorage,
    DeclinedError,
    ReadOutcome,
    WriteOutcome,
    run_origins,
)
from dualpath.storage.janitor import Janitor, Status, read_status
from dualpath.storage.journal import Journal
from dualpath.storage.objects import ObjectTree
from dualpath.storage.quotas import Refusal, WriteGate
from dualpath.storage.wrapping import WrappingStorage

log = logging.getLogger(__name__)

#: Interval of ``StorageMaintenance.tick``.
BEAT_S = 5.0
#: Without a janitor's status for this long, events are dropped; a later survey finds the blocks.
_UNHEARD_S = 3600.0


class MaintenanceStats(msgspec.Struct):
    """Totals of one ``StorageMaintenance``."""

    evicted_blocks: int = 0
    evicted_bytes: int = 0
    refused_blocks: int = 0
    skipped_blocks: int = 0


class StorageMaintenance:
    """Storage maintenance of one engine; ``janitor`` is None if the engine is not a candidate.

    ``now_s`` is Unix time, ``steady_s`` a monotonic clock.
    """

    def __init__(
        self,
        tree: ObjectTree,
        journal: Journal,
        gate: WriteGate,
        janitor: Janitor | None,
        now_s: Callable[[], float],
        steady_s: Callable[[], float],
    ) -> None:
        self.journal = journal
        self.status: Status | None = None
        self._tree = tree
        self._gate = gate
        self._janitor = janitor
        self._now_s = now_s
        self._steady_s = steady_s
        self._status_changed_s, self._status_changes = steady_s(), 0
        self._lock = threading.Lock()
        self._stats = MaintenanceStats()

    @property
    def stats(self) -> MaintenanceStats:
        """Totals so far."""
        totals = self._janitor.totals if self._janitor is not None else None
        with self._lock:
            return msgspec.structs.replace(
                self._stats,
                evicted_blocks=totals.evicted_blocks if totals else 0,
                evicted_bytes=totals.evicted_bytes if totals else 0,
            )

    @property
    def status_age_s(self) -> float | None:
        """For how long the storage's status has been the same, in s; None without a status.

        By this process's clock, as the janitor's may be wrong; but a status that was already old
        when this process started is as old as it states.
        """
        if self.status is None:
            return None
        unchanged_s = self._steady_s() - self._status_changed_s
        if self._status_changes > 1:
            return unchanged_s
        return max(unchanged_s, self._now_s() - self.status.time_s)

    def tick(self) -> None:
        """Write the journal, do a janitor step while holding the lease, read the storage's status.

        Raises ``StorageError``; the next tick continues.
        """
        self._write_journal()
        if self._janitor is None:
            return
        try:
            self._janitor.step()
        finally:
            self._read_status()

    def close(self) -> None:
        """Write the rest of the journal and release the janitor's lease."""
        self._write_journal()
        if self._janitor is not None:
            self._janitor.close()

    def admitted(
        self, keys: Sequence[BlockKey], origin: BlockOrigin, block_bytes: int
    ) -> tuple[int, Refusal | None]:
        """Return how many leading blocks may be written, and why not all; counts the others.

        ``block_bytes``: what each of them takes in storage, as far as is known.
        """
        room = self._room_bytes(origin.tenant)
        with self._lock:
            count, refusal = self._gate.admitted(
                keys, origin.parent, block_bytes, self._steady_s(), room
            )
            if refusal is Refusal.QUOTA:
                self._stats.refused_blocks += len(keys) - count
            else:
                self._stats.skipped_blocks += len(keys) - count
        return count, refusal

    def written(
        self, keys: Sequence[BlockKey], origin: BlockOrigin, sizes_bytes: Sequence[int]
    ) -> None:
        """Record that blocks of these sizes were stored."""
        self.journal.written(keys, run_origins(keys, origin), sizes_bytes, self._now_s())

    def used(self, key: BlockKey) -> None:
        """Record a use of the chain that ends with this block."""
        self.journal.used(key, self._now_s())

    def removed(self, key: BlockKey) -> None:
        """Record that a block is missing."""
        self.journal.removed(key, self._now_s())

    def _read_status(self) -> None:
        status = read_status(self._tree)
        if status is not None and (self.status is None or status.time_s != self.status.time_s):
            self._status_changed_s = self._steady_s()
            self._status_changes += 1
        self.status = status

    def _write_journal(self) -> None:
        """Write new events, or drop them if the storage has had no janitor for long.

        An engine that is a candidate always writes them: it may apply them itself.
        """
        if self._janitor is None:
            self._read_status()
            if (age_s := self.status_age_s) is None or age_s > _UNHEARD_S:
                self.journal.discard_pending()
                return
        self.journal.flush()

    def _room_bytes(self, tenant: TenantTag) -> int | None:
        """Return the bytes that quotas leave for this tenant's blocks; None: no known limit."""
        status = self.status
        if status is None or not status.limits.any_quota:
            return None
        unapplied = self.journal.unapplied(status.applied_segments.get(self.journal.writer, 0))
        stored = status.stored.plus(unapplied)
        return status.limits.left_bytes(stored, self.journal.namespace, tenant)


class MaintainedStorage(WrappingStorage):
    """Reports to ``maintenance`` and applies its write gate; does not close ``maintenance``."""

    def __init__(self, inner: BlockStorage, maintenance: StorageMaintenance) -> None:
        super().__init__(inner)
        self.maintenance = maintenance
        #: What a block takes: the largest one of the last write, and before it a whole one.
        self._block_bytes = HEADER_BYTES + inner.geometry.full_block_bytes

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read; a block that is missing or was removed as corrupt is recorded as missing."""
        outcome = self.inner.read(key, destination, whole=whole)
        absent = not outcome.is_good and outcome.reason not in UNREADABLE_HERE
        if absent and not self._is_there(key):
            self.maintenance.removed(key)
        return outcome

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> WriteOutcome:
        """Write the admitted blocks; raises ``DeclinedError`` if some were declined."""
        count, refusal = self.maintenance.admitted(keys, origin, self._block_bytes)
        outcome = self.inner.write(keys[:count], sources[:count], origin)
        sizes_bytes = [HEADER_BYTES + payload for payload in outcome.payload_bytes]
        self.maintenance.written(keys[:count], origin, sizes_bytes)
        self._block_bytes = max(sizes_bytes, default=self._block_bytes)
        if refusal is not None:
            raise DeclinedError(refusal.value, outcome)
        return outcome

    def used(self, key: BlockKey) -> None:
        """Record the use in the journal."""
        self.maintenance.used(key)
        super().used(key)

    def _is_there(self, key: BlockKey) -> bool:
        try:
            return self.inner.is_stored(key)
        except StorageError:
            return True
