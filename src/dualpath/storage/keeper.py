"""An engine's part in keeping its storage within limits: it tells what it does, and may be janitor.

``KeptStorage`` stands before a backend and says what happens to a ``Keeper``; whoever owns the
keeper lets it ``beat`` every few seconds on a thread of its own.
"""

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, TenantTag
from dualpath.core.errors import StorageError
from dualpath.policy.write_gate import Refusal, WriteGate
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.checks import own_origins
from dualpath.storage.contract import BlockStorage, DeclinedError, ReadOutcome
from dualpath.storage.janitor import Janitor
from dualpath.storage.journal import Journal
from dualpath.storage.objects import ObjectTree
from dualpath.storage.status import Status, read_status
from dualpath.storage.wrapping import WrappingStorage

log = logging.getLogger(__name__)

#: Between two beats.
BEAT_S = 5.0
#: A janitor that has said nothing for that long takes in no news; its survey finds what they said.
_UNHEARD_S = 3600.0


class Keeping(msgspec.Struct):
    """Totals of one keeper."""

    evicted_blocks: int = 0
    evicted_bytes: int = 0
    refused_blocks: int = 0
    skipped_blocks: int = 0


class Keeper:
    """The keeper of one engine; ``janitor`` is None where the engine is no candidate.

    ``now_s`` is Unix time, ``steady_s`` a clock that never jumps.
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
        self._lock = threading.Lock()
        self._done = Keeping()

    @property
    def done(self) -> Keeping:
        """What has been done so far."""
        totals = self._janitor.totals if self._janitor is not None else None
        with self._lock:
            return msgspec.structs.replace(
                self._done,
                evicted_blocks=totals.evicted_blocks if totals else 0,
                evicted_bytes=totals.evicted_bytes if totals else 0,
            )

    def beat(self) -> None:
        """Tell what is new, be janitor if it is this one's turn, hear how the storage is.

        Raises ``StorageError``; the next beat goes on.
        """
        self._tell()
        if self._janitor is None:
            return
        try:
            self._janitor.step()
        finally:
            self.status = read_status(self._tree)

    def close(self) -> None:
        """Tell what is left; another may be janitor at once."""
        self._tell()
        if self._janitor is not None:
            self._janitor.close()

    def admitted(
        self, keys: Sequence[BlockKey], origin: BlockOrigin, block_bytes: int
    ) -> tuple[int, Refusal | None]:
        """Return how many blocks at the head may be written, and why no more; counts the rest."""
        room = self._room_bytes(origin.tenant)
        with self._lock:
            count, refusal = self._gate.admitted(
                keys, origin.parent, block_bytes, self._steady_s(), room
            )
            if refusal is Refusal.QUOTA:
                self._done.refused_blocks += len(keys) - count
            else:
                self._done.skipped_blocks += len(keys) - count
        return count, refusal

    def written(self, keys: Sequence[BlockKey], origin: BlockOrigin, block_bytes: int) -> None:
        """Blocks are stored."""
        self.journal.written(keys, own_origins(keys, origin), block_bytes, self._now_s())

    def used(self, key: BlockKey) -> None:
        """A chain that ends with this block is used."""
        self.journal.used(key, self._now_s())

    def gone(self, key: BlockKey) -> None:
        """A block was not to be had."""
        self.journal.gone(key, self._now_s())

    def _tell(self) -> None:
        """Write the news, unless nobody has taken them in for long and nobody here could.

        Who is no candidate hears first how the storage is.
        """
        if self._janitor is None:
            self.status = read_status(self._tree)
            if self.status is None or self._now_s() - self.status.time_s > _UNHEARD_S:
                self.journal.forget()
                return
        self.journal.flush()

    def _room_bytes(self, tenant: TenantTag) -> int | None:
        """Return what the quotas leave for this tenant's blocks; None: no bound that is known."""
        status = self.status
        if status is None or not status.limits.any_quota:
            return None
        unseen = self.journal.unseen(status.seen.get(self.journal.writer, 0))
        stored = status.stored.plus(unseen)
        return status.limits.left_bytes(stored, self.journal.namespace, tenant)


class KeptStorage(WrappingStorage):
    """Tells ``keeper`` what happens; the keeper is its owner's to close."""

    def __init__(self, inner: BlockStorage, keeper: Keeper) -> None:
        super().__init__(inner)
        self.keeper = keeper
        self._block_bytes = HEADER_BYTES + inner.geometry.full_block_bytes

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read; what is missing or bad is not there for anybody."""
        outcome = self.inner.read(key, destination, whole=whole)
        if not outcome.is_good and not self._is_there(key):
            self.keeper.gone(key)
        return outcome

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> int:
        """Write what may be written; raises ``DeclinedError`` if that is not all."""
        count, refusal = self.keeper.admitted(keys, origin, self._block_bytes)
        new = self.inner.write(keys[:count], sources[:count], origin)
        self.keeper.written(keys[:count], origin, self._block_bytes)
        if refusal is not None:
            raise DeclinedError(refusal.value, count, new)
        return new

    def used(self, key: BlockKey) -> None:
        """Keep this chain longer than others."""
        self.keeper.used(key)
        super().used(key)

    def _is_there(self, key: BlockKey) -> bool:
        try:
            return self.inner.is_stored(key)
        except StorageError:
            return True
