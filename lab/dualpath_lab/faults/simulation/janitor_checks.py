"""Checks that the janitor of a simulated storage respects its lease and the events it has read.

A block is protected if it was used or written in the last ``protect_s``, or if it is pinned, and if
this was recorded before the janitor last read the journal or the pins.  The janitor must not evict
a protected block, nor a block that precedes one in its chain, nor any block after it has seen that
another process has the lease.  It knows every stored block that the journal has recorded.
"""

from collections.abc import Callable, Mapping

from dualpath.core.blocks import BlockKey
from dualpath.core.cluster import HostProcess
from dualpath.storage.block_file import HEADER_BYTES, decode_header
from dualpath.storage.chain_index import ChainIndex
from dualpath.storage.janitor import PINS, TERMS
from dualpath.storage.journal import JOURNAL, Removed, Written, decode_segment
from dualpath.storage.posix import key_of
from dualpath_lab.faults.simulation.disk import Disk, Listing, SimCalls, StorageFaults, object_path
from dualpath_lab.faults.simulation.threads import SimThreads
from dualpath_lab.faults.simulation.world import World

_JOURNAL, _PINS, _TERMS = map(object_path, (JOURNAL, PINS, TERMS))


class JanitorChecker:
    """The recorded events of blocks and their times, in seconds of the simulation."""

    def __init__(self, world: World, disk: Disk, protect_s: float) -> None:
        self.evicted: list[BlockKey] = []
        self._world = world
        self._disk = disk
        self._protect_s = protect_s
        self._parents: dict[BlockKey, BlockKey] = {}
        #: For each block, pairs of when a use was recorded and when it happened.
        self._uses: dict[BlockKey, list[tuple[float, float]]] = {}
        #: Blocks whose write is the last event that the journal has recorded of them.
        self._recorded: set[BlockKey] = set()
        #: Last blocks of pinned chains, and for each known block of them the time of its pin.
        self._pinned_ends: list[BlockKey] = []
        self._pinned_s: dict[BlockKey, float] = {}

    def on_journal_segment(self, path: str) -> None:
        """A segment of the journal has been written."""
        segment = decode_segment(bytes(self._disk.files[path].content))
        for event in segment.events if segment is not None else ():
            if isinstance(event, Written) and event.parent:
                self._parents[event.key] = event.parent
        for event in segment.events if segment is not None else ():
            if isinstance(event, Removed):
                self._recorded.discard(event.key)
                continue
            if isinstance(event, Written):
                self._recorded.add(event.key)
            self._used(event.key, (self._world.now_s, event.time_s))

    def pin(self, key: BlockKey) -> None:
        """A chain has been pinned."""
        self._pinned_ends.append(key)
        for one in self._chain(key):
            self._pinned_s.setdefault(one, self._world.now_s)

    @property
    def pinned(self) -> set[BlockKey]:
        """All blocks of pinned chains, by the events recorded so far."""
        return {one for end in self._pinned_ends for one in self._chain(end)}

    @property
    def possibly_pinned(self) -> set[BlockKey]:
        """Blocks that a janitor may regard as pinned: it also reads headers of stored blocks."""
        parents, stored = dict(self._parents), set()
        for path, file in self._disk.blocks():
            header, key = decode_header(bytes(file.content[:HEADER_BYTES])), key_of(path)
            if key is not None:
                stored.add(key)
                if header is not None and header.origin.parent:
                    parents.setdefault(key, header.origin.parent)
        return stored & {one for end in self._pinned_ends for one in chain_of(end, parents)}

    def unknown_to(self, index: ChainIndex) -> list[BlockKey]:
        """Return the stored blocks that the journal has recorded and a janitor's index lacks."""
        return [
            key
            for path, _ in self._disk.blocks()
            if (key := key_of(path)) in self._recorded
            and index.row(path.split("/")[2], key) is None
        ]

    def on_evicted(self, key: BlockKey, by: str, events_s: float, pins_s: float) -> None:
        """A janitor removes a block; it last read events and pins at these times."""
        self.evicted.append(key)
        now_s, name = self._world.now_s, f"{by} evicts block {key.hex()[:8]}"
        uses = self._uses.get(key, ())
        used_s = max((use_s for recorded_s, use_s in uses if recorded_s < events_s), default=0.0)
        if now_s - used_s < self._protect_s:
            self._world.problem(f"{name} although it has read of a use {now_s - used_s:.3f} s ago")
        if self._pinned_s.get(key, now_s) < pins_s:
            self._world.problem(f"{name} although it is pinned")

    def _used(self, key: BlockKey, use: tuple[float, float]) -> None:
        for one in self._chain(key):
            uses = self._uses.setdefault(one, [])
            if uses and uses[-1] == use:
                return
            uses.append(use)

    def _chain(self, key: BlockKey) -> list[BlockKey]:
        return chain_of(key, self._parents)


def chain_of(key: BlockKey | None, parents: Mapping[BlockKey, BlockKey]) -> list[BlockKey]:
    """Return a block and its known predecessors in the chain, last block first.

    A chain that comes back to one of its blocks, as a bug may store it, ends there.
    """
    chain: dict[BlockKey, None] = {}
    while key is not None and key not in chain:
        chain[key] = None
        key = parents.get(key)
    return [*chain]


class CheckedCalls(SimCalls):
    """System calls of a process for objects, as janitor also for evicting blocks."""

    def __init__(
        self,
        checker: JanitorChecker,
        disk: Disk,
        threads: SimThreads,
        faults: StorageFaults,
        known: HostProcess,
        runs: Callable[[int], bool],
    ) -> None:
        super().__init__(disk, threads, faults, known, runs)
        self._checker = checker
        self._events_s = self._pins_s = 0.0
        #: The process that had the lease when this one last looked.
        self._seen_holder = ""

    def scandir(self, path: str, /) -> Listing:
        """Record when the journal and the pins were last read, and who had the lease."""
        if path == _JOURNAL:
            self._events_s = self.world.now_s
        elif path == _PINS:
            self._pins_s = self.world.now_s
        listing = super().scandir(path)
        if path == _TERMS and (terms := self.disk.names(_TERMS.rstrip("/"))):
            self._seen_holder = self.disk.file(_TERMS + max(terms)).writer
        return listing

    def rename(self, source: str, target: str, /) -> None:
        """Record events of the journal."""
        super().rename(source, target)
        if target.startswith(_JOURNAL):
            self._checker.on_journal_segment(target)

    def unlink(self, path: str, /) -> None:
        """Check an eviction."""
        super().unlink(path)
        if (key := key_of(path)) is not None:
            if self._seen_holder != self.writer:
                self.world.problem(
                    f"{self.writer} evicts block {key.hex()[:8]} although it has seen that "
                    f"{self._seen_holder} has the janitor's lease"
                )
            self._checker.on_evicted(key, self.writer, self._events_s, self._pins_s)
