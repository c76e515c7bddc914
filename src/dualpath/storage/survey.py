"""The janitor's survey: compares the stored blocks with the index, folder by folder.

The first survey of a storage without an index builds the index.  Later surveys take a day each and
find changes that were not journaled: events lost with a process, files removed by a person.
"""

import re
from collections.abc import Callable

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey
from dualpath.policy.chain_index import ChainIndex
from dualpath.storage.block_header import HEADER_BYTES, decode_header
from dualpath.storage.directory import key_of
from dualpath.storage.objects import ObjectInfo, ObjectTree

#: Duration of a survey, except the first one, which runs without pauses.
SURVEY_S = 24 * 3600.0
#: A block written less than this ago may be missing in a listing.
SETTLED_S = 60.0
_NAMESPACE = re.compile(r".+_[0-9a-f]{16}[A-Za-z0-9_.-]*")
_FAN_OUT = re.compile(r"[0-9a-f]{3}")


def is_namespace(folder: str) -> bool:
    """Whether a folder's name is that of a namespace; other folders are never touched."""
    return _NAMESPACE.fullmatch(folder) is not None


class Differences(msgspec.Struct):
    """What surveys corrected: blocks missing in the index, and blocks missing in the storage."""

    found_blocks: int = 0
    missing_blocks: int = 0


class Survey:
    """Runs surveys one after another; ``surveyed_s`` is when the last complete one ended.

    ``now_s`` is Unix time.
    """

    def __init__(
        self,
        tree: ObjectTree,
        index: ChainIndex,
        now_s: Callable[[], float],
        surveyed_s: float | None = None,
        period_s: float = SURVEY_S,
    ) -> None:
        self.surveyed_s = surveyed_s
        self.differences = Differences()
        self._tree = tree
        self._index = index
        self._now_s = now_s
        self._period_s = period_s
        self._folders: list[tuple[str, int]] = []
        self._done = 0
        self._began_s = now_s()

    @property
    def progress(self) -> float:
        """Completed share of the current survey, 0 to 1."""
        return self._done / max(len(self._folders), 1)

    def advance(self, budget_s: float) -> None:
        """Survey what is due, for about ``budget_s``; raises ``StorageError``."""
        end_s = self._now_s() + budget_s
        if not self._folders and self._is_due():
            self._begin()
        while self._folders and self._is_due():
            self._compare(*self._folders[self._done])
            self._done += 1
            if self._done == len(self._folders):
                self._finish()
            if self._now_s() >= end_s:
                return

    def run_to_end(self, report: Callable[[float], None] = lambda share: None) -> None:
        """Survey everything now; ``report`` is called with the completed share."""
        self._begin()
        while self._folders:
            self._compare(*self._folders[self._done])
            self._done += 1
            report(self.progress)
            if self._done == len(self._folders):
                self._finish()

    def _is_due(self) -> bool:
        if self.surveyed_s is None:
            return True
        if not self._folders:
            return self._now_s() >= self.surveyed_s + self._period_s / 2
        # Wait for half of the period, survey during the other half.
        passed_s = self._now_s() - self._began_s
        return passed_s * 2 >= self._period_s * self.progress

    def _begin(self) -> None:
        self._began_s, self._done = self._now_s(), 0
        found = [name for name in self._tree.folders("") if is_namespace(name)]
        names = sorted({*found, *self._index.used_by_namespace()})
        self._folders = [(name, fan_out) for name in names for fan_out in self._fan_outs(name)]
        if not self._folders:
            self._finish()

    def _fan_outs(self, namespace: str) -> list[int]:
        stored = self._tree.folders(f"{namespace}/")
        indexed = self._index.fan_outs(namespace)
        return sorted({int(name, 16) for name in stored if _FAN_OUT.fullmatch(name)} | {*indexed})

    def _finish(self) -> None:
        self.surveyed_s = self._now_s()
        self._folders, self._done = [], 0

    def _compare(self, namespace: str, fan_out: int) -> None:
        before_s = self._now_s() - SETTLED_S
        found: set[BlockKey] = set()
        for info in self._tree.objects(f"{namespace}/{fan_out:03x}/"):
            key = key_of(info.name)
            if key is None:
                continue
            found.add(key)
            if self._index.row(namespace, key) is None:
                self._note(namespace, key, info)
        for row in self._index.absent(namespace, fan_out, found, before_s).tolist():
            self._index.remove(*self._index.block(row))
            self.differences.missing_blocks += 1

    def _note(self, namespace: str, key: BlockKey, info: ObjectInfo) -> None:
        header = decode_header(self._tree.get(info.name, HEADER_BYTES) or b"")
        # A block without a valid header is removed when it is read, or evicted as an unused one.
        origin = header.origin if header is not None and header.key == key else UNKNOWN_ORIGIN
        self._index.add(namespace, key, origin.parent, origin.tenant, info.bytes, info.written_s)
        self.differences.found_blocks += 1
