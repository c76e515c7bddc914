"""Base class of backends that wrap another backend."""

from collections.abc import Sequence

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.storage.contract import BlockStorage, DeclinedError, ReadOutcome


class WrappingStorage:
    """See ``dualpath.storage.contract.BlockStorage``: forwards everything to ``inner``.

    Subclasses override what they change.
    """

    def __init__(self, inner: BlockStorage) -> None:
        self.inner = inner
        self.geometry = inner.geometry
        self.parallel_lookups = inner.parallel_lookups

    def is_stored(self, key: BlockKey) -> bool:
        """Look up in the inner backend."""
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
        """Write to the inner backend and report the stored blocks to ``_stored``."""
        try:
            new_blocks = self.inner.write(keys, sources, origin)
        except DeclinedError as declined:
            self._stored(keys[: declined.stored], sources)
            raise
        self._stored(keys, sources)
        return new_blocks

    def used(self, key: BlockKey) -> None:
        """Record the use in the inner backend."""
        self.inner.used(key)

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()

    def _stored(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        """Handle blocks that a write has stored: ``keys``, from the first of ``sources``."""
