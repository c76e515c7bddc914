"""Removes blocks from a storage and records the removals in the journal."""

from collections.abc import Sequence

from dualpath.policy.chain_index import ChainIndex
from dualpath.storage.directory import object_name
from dualpath.storage.journal import Journal
from dualpath.storage.objects import ObjectTree

#: Blocks removed per step; a removal can be stopped between steps.
BATCH = 256


class Removal:
    """Removes blocks of an index; ``process`` is a unique name that no process had before."""

    def __init__(self, tree: ObjectTree, index: ChainIndex, process: str) -> None:
        self._tree = tree
        self._index = index
        self._process = process
        self._journals: dict[str, Journal] = {}

    def remove(self, rows: Sequence[int]) -> int:
        """Remove blocks, in order; return their bytes.

        Raises ``StorageError``; then the index still has all of them, though some may be removed.
        """
        blocks = [self._index.block(row) for row in rows]
        self._tree.remove([object_name(place, key) for place, key in blocks])
        before_bytes = self._index.used_bytes
        for row, (place, key) in zip(rows, blocks, strict=True):
            # Dated at its last use: a later write of the block by another process stays valid.
            self._journal(place).removed(key, float(self._index.tables().times[row]))
            self._index.remove(place, key)
        return before_bytes - self._index.used_bytes

    def flush_journal(self) -> None:
        """Write the removals since the last call to the journal."""
        for journal in self._journals.values():
            journal.flush()

    def _journal(self, namespace: str) -> Journal:
        if namespace not in self._journals:
            writer = f"{self._process}-{len(self._journals)}"
            self._journals[namespace] = Journal(self._tree, namespace, writer)
        return self._journals[namespace]
