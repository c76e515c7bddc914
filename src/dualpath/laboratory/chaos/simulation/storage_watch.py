"""Sees what engines tell the janitor of a simulated storage, and that it keeps to what it knows.

A block may not go that was used or written in the last ``protect_s``, or that is pinned, where that
was told before the janitor last looked; nor may one that lies before such a block in its chain.
"""

from collections.abc import Callable, Mapping

from dualpath.core.blocks import BlockKey
from dualpath.core.cluster import HostProcess
from dualpath.laboratory.chaos.simulation.calls import SimCalls, StorageFaults
from dualpath.laboratory.chaos.simulation.disk import Disk, Listing, object_path
from dualpath.laboratory.chaos.simulation.threads import SimThreads
from dualpath.laboratory.chaos.simulation.world import World
from dualpath.storage.block_header import HEADER_BYTES, decode_header
from dualpath.storage.directory import key_of
from dualpath.storage.journal import JOURNAL, Gone, Written, decode_segment
from dualpath.storage.pins import PINS

_JOURNAL, _PINS = object_path(JOURNAL), object_path(PINS)


class StorageWatch:
    """What was told of blocks, and when; times in seconds of the world."""

    def __init__(self, world: World, disk: Disk, protect_s: float) -> None:
        self.evicted = 0
        self._world = world
        self._disk = disk
        self._protect_s = protect_s
        self._parents: dict[BlockKey, BlockKey] = {}
        #: Of each block the pairs of when a use was told and when it was.
        self._uses: dict[BlockKey, list[tuple[float, float]]] = {}
        #: The last blocks of pinned chains, and since when those are pinned that were known then.
        self._pinned_ends: list[BlockKey] = []
        self._pinned_s: dict[BlockKey, float] = {}

    def told(self, path: str) -> None:
        """A segment of the journal has appeared."""
        segment = decode_segment(bytes(self._disk.files[path].content))
        for news in segment.news if segment is not None else ():
            if isinstance(news, Written) and news.parent:
                self._parents[news.key] = news.parent
        for news in segment.news if segment is not None else ():
            if not isinstance(news, Gone):
                self._used(news.key, (self._world.now_s, news.time_s))

    def pin(self, key: BlockKey) -> None:
        """A chain is pinned."""
        self._pinned_ends.append(key)
        for one in self._chain(key):
            self._pinned_s.setdefault(one, self._world.now_s)

    @property
    def pinned(self) -> set[BlockKey]:
        """All blocks of pinned chains, by what was told of them until now."""
        return {one for end in self._pinned_ends for one in self._chain(end)}

    @property
    def may_stay(self) -> set[BlockKey]:
        """Blocks that a janitor may take for pinned: it has read what stored ones say as well."""
        parents, stored = dict(self._parents), set()
        for path, file in self._disk.blocks():
            header, key = decode_header(bytes(file.content[:HEADER_BYTES])), key_of(path)
            if key is not None:
                stored.add(key)
                if header is not None and header.origin.parent:
                    parents.setdefault(key, header.origin.parent)
        return stored & {one for end in self._pinned_ends for one in chain_of(end, parents)}

    def goes(self, key: BlockKey, by: str, news_s: float, pins_s: float) -> None:
        """A janitor that has looked for news and pins at those times removes a block."""
        self.evicted += 1
        now_s, name = self._world.now_s, f"{by} evicts block {key.hex()[:8]}"
        used_s = max((use for told, use in self._uses.get(key, ()) if told < news_s), default=0.0)
        if now_s - used_s < self._protect_s:
            self._world.problem(f"{name}, used {now_s - used_s:.3f} s ago, and knows it")
        if self._pinned_s.get(key, now_s) < pins_s:
            self._world.problem(f"{name}, which is pinned")

    def _used(self, key: BlockKey, use: tuple[float, float]) -> None:
        for one in self._chain(key):
            uses = self._uses.setdefault(one, [])
            if uses and uses[-1] == use:
                return
            uses.append(use)

    def _chain(self, key: BlockKey) -> list[BlockKey]:
        return chain_of(key, self._parents)


def chain_of(key: BlockKey | None, parents: Mapping[BlockKey, BlockKey]) -> list[BlockKey]:
    """Return a block and all that are known to be before it, tail first."""
    chain: list[BlockKey] = []
    while key is not None:
        chain.append(key)
        key = parents.get(key)
    return chain


class WatchedCalls(SimCalls):
    """The system calls behind a process's objects, and its janitor's if it is."""

    def __init__(
        self,
        watch: StorageWatch,
        disk: Disk,
        threads: SimThreads,
        faults: StorageFaults,
        known: HostProcess,
        runs: Callable[[int], bool],
    ) -> None:
        super().__init__(disk, threads, faults, known, runs)
        self._watch = watch
        self._news_s = self._pins_s = 0.0

    def scandir(self, path: str, /) -> Listing:
        """Note when news and pins were looked for last."""
        if path == _JOURNAL:
            self._news_s = self.world.now_s
        elif path == _PINS:
            self._pins_s = self.world.now_s
        return super().scandir(path)

    def rename(self, source: str, target: str, /) -> None:
        """Note what was told."""
        super().rename(source, target)
        if target.startswith(_JOURNAL):
            self._watch.told(target)

    def unlink(self, path: str, /) -> None:
        """Look whether a block may go."""
        super().unlink(path)
        if (key := key_of(path)) is not None:
            self._watch.goes(key, self.writer, self._news_s, self._pins_s)
