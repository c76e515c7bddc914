"""Compares what lies in a storage with its index, folder by folder, for as long as a janitor lives.

The first survey of a storage without an index is how it becomes known; the later ones, spread over
a day each, find what nobody told: a process that died with its news, a person who removed files.
"""

import re
from collections.abc import Callable

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey
from dualpath.policy.chain_index import ChainIndex
from dualpath.storage.block_header import HEADER_BYTES, decode_header
from dualpath.storage.directory import key_of
from dualpath.storage.objects import ObjectInfo, ObjectTree

#: A survey takes that long, but the first one.
SURVEY_S = 24 * 3600.0
#: What was written that short a time ago may not be in a listing yet.
SETTLED_S = 60.0
_NAMESPACE = re.compile(r".+_[0-9a-f]{16}[A-Za-z0-9_.-]*")
_FAN_OUT = re.compile(r"[0-9a-f]{3}")


def is_namespace(folder: str) -> bool:
    """Whether a folder of a storage has the name of a namespace; others are not touched."""
    return _NAMESPACE.fullmatch(folder) is not None


class Differences(msgspec.Struct):
    """What surveys found: blocks nobody had told of, and blocks that were gone."""

    found_blocks: int = 0
    gone_blocks: int = 0


class Survey:
    """One survey after the other of one index; ``surveyed_s`` is when the last one ended.

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
        """Share of the survey under way that is done, 0 to 1."""
        return self._done / max(len(self._folders), 1)

    def go_on(self, budget_s: float) -> None:
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

    def whole(self, report: Callable[[float], None] = lambda share: None) -> None:
        """Survey everything now; ``report`` hears the share that is done."""
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
        # Half of the period to wait, half of it to look.
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
        lying = self._tree.folders(f"{namespace}/")
        known = self._index.fan_outs(namespace)
        return sorted({int(name, 16) for name in lying if _FAN_OUT.fullmatch(name)} | {*known})

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
            self.differences.gone_blocks += 1

    def _note(self, namespace: str, key: BlockKey, info: ObjectInfo) -> None:
        header = decode_header(self._tree.get(info.name, HEADER_BYTES) or b"")
        # What has no good header is found bad by who reads it, or goes as the oldest do.
        origin = header.origin if header is not None and header.key == key else UNKNOWN_ORIGIN
        self._index.add(namespace, key, origin.parent, origin.tenant, info.bytes, info.written_s)
        self.differences.found_blocks += 1
