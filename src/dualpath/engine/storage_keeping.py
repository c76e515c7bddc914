"""Lets an engine keep its storage within limits, on a thread that nothing waits for."""

import logging
import time
from collections.abc import Callable

from dualpath.core.blocks import StoreNamespace
from dualpath.core.control import StorageUse
from dualpath.core.errors import StorageError
from dualpath.engine.counters import Counter
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import Thread, Threads
from dualpath.policy.write_gate import WriteGate
from dualpath.storage.contract import BlockStorage
from dualpath.storage.directory import namespace_name
from dualpath.storage.janitor import Janitor
from dualpath.storage.journal import Journal
from dualpath.storage.keeper import BEAT_S, Keeper, KeptStorage
from dualpath.storage.lease import LEASE_S
from dualpath.storage.objects import ObjectTree
from dualpath.storage.status import read_status

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000
#: Longest that ``close`` waits for a beat under way.
_CLOSE_S = 2.0


def is_kept(tree: ObjectTree, settings: EngineSettings) -> bool:
    """Whether an engine has to say what it does: its own settings ask for it, or a janitor does."""
    try:
        return settings.keeps_storage or (
            settings.mode.moves_bytes and read_status(tree) is not None
        )
    except StorageError as error:
        log.warning("nobody can say whether the storage has a janitor: %s", error)
        return False


class StorageKeeping:
    """``storage`` stands before ``inner``; ``process`` is a name that no process had before.

    ``tree`` has everything that lies in the same storage; ``now_s`` is Unix time.
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
        self.keeper = Keeper(tree, journal, gate, janitor, now_s, steady_s)
        self.storage = KeptStorage(inner, self.keeper)
        self._now_s = now_s
        self._closing = threads.event()
        self._thread: Thread | None = threads.start("storage-keeper", self._run)

    def totals(self) -> dict[str, float]:
        """Return what was done, by counter."""
        done = self.keeper.done
        return {
            Counter.STORAGE_EVICTED_BLOCKS.value: done.evicted_blocks,
            Counter.STORAGE_EVICTED_BYTES.value: done.evicted_bytes,
            Counter.STORAGE_REFUSED_BLOCKS.value: done.refused_blocks,
            Counter.STORAGE_SKIPPED_BLOCKS.value: done.skipped_blocks,
        }

    def use(self) -> StorageUse | None:
        """Return how full the storage is, None where nobody has said it."""
        status = self.keeper.status
        if status is None:
            return None
        return StorageUse(
            used_bytes=status.used_bytes,
            quota_bytes=status.limits.quota_bytes,
            blocks=status.blocks,
            age_s=max(self._now_s() - status.time_s, 0.0),
            surveyed=status.surveyed_s is not None,
        )

    def close(self) -> None:
        """Tell what is new, and let another be the janitor; idempotent, in a few seconds."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._do(self.keeper.beat)
            self._closing.wait(BEAT_S)
        self._do(self.keeper.close)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except StorageError as error:
            log.warning("the storage is not looked after: %s", error)
        except Exception:  # a defect here must not end what keeps the storage within limits
            log.exception("the storage is not looked after")
