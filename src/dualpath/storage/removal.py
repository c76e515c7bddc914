"""Takes blocks out of a storage, and tells whoever keeps an index of it."""

from collections.abc import Sequence

from dualpath.policy.chain_index import ChainIndex
from dualpath.storage.directory import object_name
from dualpath.storage.journal import Journal
from dualpath.storage.objects import ObjectTree

#: Blocks removed between two looks at whatever may end a removal.
BATCH = 256


class Removal:
    """Removes blocks that an index has; ``process`` is a name that no process had before."""

    def __init__(self, tree: ObjectTree, index: ChainIndex, process: str) -> None:
        self._tree = tree
        self._index = index
        self._process = process
        self._journals: dict[str, Journal] = {}

    def remove(self, rows: Sequence[int]) -> int:
        """Remove blocks, in order; return their bytes.

        Raises ``StorageError``; the index has all of them then, though some may be gone.
        """
        blocks = [self._index.block(row) for row in rows]
        self._tree.remove([object_name(place, key) for place, key in blocks])
        before_bytes = self._index.used_bytes
        for row, (place, key) in zip(rows, blocks, strict=True):
            # Gone as of its last use: who wrote it again since then is right by any clock.
            self._journal(place).gone(key, float(self._index.tables().times[row]))
            self._index.remove(place, key)
        return before_bytes - self._index.used_bytes

    def tell(self) -> None:
        """Write what was removed since this was last called."""
        for journal in self._journals.values():
            journal.flush()

    def _journal(self, namespace: str) -> Journal:
        if namespace not in self._journals:
            writer = f"{self._process}-{len(self._journals)}"
            self._journals[namespace] = Journal(self._tree, namespace, writer)
        return self._journals[namespace]
