"""The thread of an engine that journals storage accesses and enforces the storage's limits."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dualpath.core.blocks import StoreNamespace
from dualpath.core.control import StorageUse
from dualpath.core.errors import StorageError
from dualpath.engine.counters import Counter
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import Thread, Threads, TimeLimit
from dualpath.node.secret_file import read_secret
from dualpath.storage.contract import BlockStorage
from dualpath.storage.janitor import LEASE_S, Janitor, read_status
from dualpath.storage.journal import Journal
from dualpath.storage.maintenance import BEAT_S, MaintainedStorage, StorageMaintenance
from dualpath.storage.objects import ObjectTree
from dualpath.storage.posix import namespace_name
from dualpath.storage.quotas import WriteGate
from dualpath.storage.sealed_blocks import STORAGE_KEY_REMEDY, STORAGE_KEY_VARIABLE, key_ring

if TYPE_CHECKING:
    from dualpath.storage.sealed_blocks import KeyRing

# ------------------------------------------------------------------------------------ storage keys
# The source of the storage keys of engines and of commands that manage a storage.


def load_storage_keys(file: str) -> "KeyRing | None":
    """Return the keys in ``file``, otherwise those of the environment, otherwise None.

    Raises ``ConfigError`` for a file that cannot be read and for weak keys.
    """
    found = read_secret(
        file,
        setting="storage_key_file",
        variable=STORAGE_KEY_VARIABLE,
        remedy=STORAGE_KEY_REMEDY,
    )
    return None if found is None else key_ring(*found)


log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000


def needs_maintenance(tree: ObjectTree, settings: EngineSettings) -> bool:
    """Whether an engine has to journal its accesses, by its own settings or for a janitor."""
    try:
        return settings.limits_storage or (
            settings.mode.moves_bytes and read_status(tree) is not None
        )
    except StorageError as error:
        log.warning("it is unknown whether the storage has a janitor: %s", error)
        return False


class MaintenanceThread:
    """Runs ``StorageMaintenance``; ``storage`` wraps ``inner`` with it.

    ``process`` is a unique name of this process, ``tree`` accesses all objects of the storage,
    ``now_s`` is Unix time.
    """

    def __init__(
        self,
        inner: BlockStorage,
        tree: ObjectTree,
        settings: EngineSettings,
        namespace: StoreNamespace,
        process: str,
        threads: Threads,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        def steady_s() -> float:
            return threads.now_ns() / _NS_PER_S

        limits = settings.limits
        candidate = (tree, process, limits, now_s, steady_s, LEASE_S)
        janitor = Janitor(*candidate) if limits.any else None
        journal = Journal(tree, namespace_name(namespace), process)
        gate = WriteGate(settings.storage_write_bytes_per_s, twice=settings.storage_write_twice)
        self.maintenance = StorageMaintenance(tree, journal, gate, janitor, now_s, steady_s)
        self.storage = MaintainedStorage(inner, self.maintenance)
        self._closing = threads.event()
        self._thread: Thread | None = threads.start("storage-maintenance", self._run)

    def totals(self) -> dict[str, float]:
        """Return the counters of maintenance."""
        done = self.maintenance.stats
        return {
            Counter.STORAGE_EVICTED_BLOCKS.value: done.evicted_blocks,
            Counter.STORAGE_EVICTED_BYTES.value: done.evicted_bytes,
            Counter.STORAGE_REFUSED_BLOCKS.value: done.refused_blocks,
            Counter.STORAGE_SKIPPED_BLOCKS.value: done.skipped_blocks,
        }

    def use(self) -> StorageUse | None:
        """Return how full the storage is, None without the status of a janitor."""
        status, age_s = self.maintenance.status, self.maintenance.status_age_s
        if status is None or age_s is None:
            return None
        return StorageUse(
            used_bytes=status.used_bytes,
            quota_bytes=status.limits.quota_bytes,
            blocks=status.blocks,
            age_s=age_s,
            surveyed=status.surveyed_s is not None,
        )

    def close(self, limit: TimeLimit) -> None:
        """Write the journal and give up the janitor's lease, within the limit; idempotent."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            limit.join([thread])

    def _run(self) -> None:
        while not self._closing.is_set():
            self._do(self.maintenance.tick)
            self._closing.wait(BEAT_S)
        self._do(self.maintenance.close)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except StorageError as error:
            log.warning("storage maintenance failed: %s", error)
        except Exception:  # a defect must not end the maintenance of the storage
            log.exception("storage maintenance failed")
