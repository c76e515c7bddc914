"""What every backend has that stands before another one: all goes through."""

from collections.abc import Sequence

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.storage.contract import BlockStorage, DeclinedError, ReadOutcome


class WrappingStorage:
    """See ``dualpath.storage.contract.BlockStorage``: ``inner``, as it is.

    Who stands before a backend overrides what it does otherwise.
    """

    def __init__(self, inner: BlockStorage) -> None:
        self.inner = inner
        self.geometry = inner.geometry
        self.parallel_lookups = inner.parallel_lookups

    def is_stored(self, key: BlockKey) -> bool:
        """Ask the inner backend."""
        return self.inner.is_stored(key)

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read from the inner backend."""
        return self.inner.read(key, destination, whole=whole)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> int:
        """Write; what is not declined is stored afterwards."""
        try:
            new_blocks = self.inner.write(keys, sources, origin)
        except DeclinedError as declined:
            self._stored(keys[: declined.stored], sources)
            raise
        self._stored(keys, sources)
        return new_blocks

    def used(self, key: BlockKey) -> None:
        """Tell the inner backend."""
        self.inner.used(key)

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()

    def _stored(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        """Hear what a write has stored: ``keys``, of the first of ``sources``."""
