"""Storage of Oracle runs (§7.2): it records which blocks exist and stores no payload.

Each block is an empty file, so that the blocks survive restarts and are shared by engines, as real
blocks are.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.storage import block_file
from dualpath.storage.checks import check_destination, check_sources
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.directory import (
    BLOCK_SUFFIX,
    NamespaceDirectory,
    key_of,
    namespaces_in,
    refused,
)
from dualpath.storage.system_calls import create_file

ORACLE = "oracle"


def copy_lengths(source: str | Path, root: str | Path) -> int:
    """Mark the blocks of a directory of real blocks under ``root``, so that Oracle hits them too.

    Returns how many blocks were marked.  Raises ``ConfigError`` for an unusable ``root`` and for
    an unreadable namespace in ``source``.
    """
    marked = 0
    for folder, namespace in namespaces_in(Path(source)):
        if namespace.mode == ORACLE:
            continue
        storage = LengthOnlyStorage(root, msgspec.structs.replace(namespace, mode=ORACLE))
        blank = memoryview(bytes(namespace.geometry.full_block_bytes))
        for block in folder.rglob(f"*{BLOCK_SUFFIX}"):
            if key := key_of(block.as_posix()):
                marked += storage.write([key], [blank])
    return marked


class LengthOnlyStorage:
    """See ``dualpath.storage.contract.BlockStorage``, except that no payload is read or written.

    ``read`` does not change its destination and reports 0 bytes.  Raises ``ConfigError`` for a
    namespace whose mode is not ``"oracle"``, so that empty and real blocks are never mixed.
    """

    def __init__(self, root: str | Path, namespace: StoreNamespace) -> None:
        if namespace.mode != ORACLE:
            raise ConfigError(
                f"namespace of mode {namespace.mode!r} cannot be length-only; "
                f"set its mode to {ORACLE!r}"
            )
        self.parallel_lookups = 1
        self.namespace = namespace
        self.geometry = namespace.geometry
        self._directory = NamespaceDirectory(Path(root), namespace, ".length")

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether a block has a marker."""
        return self._directory.has(key)

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Return the outcome of a read, without reading."""
        check_destination(self.geometry, destination)
        return ReadOutcome(0, None if self.is_stored(key) else block_file.MISSING)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> int:
        """Mark the blocks as existing."""
        check_sources(self.geometry, keys, sources)
        return sum(self._mark(key) for key in keys)

    def used(self, key: BlockKey) -> None:
        """Do nothing: this backend does not evict."""

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _mark(self, key: BlockKey) -> bool:
        path = self._directory.block_path(key)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            create_file(path, [])
        except FileExistsError:
            return False
        except OSError as error:
            raise refused("marker", path, 0, error) from error
        return True
