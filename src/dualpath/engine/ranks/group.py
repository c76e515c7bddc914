"""Collective communication of the ranks of one engine (tensor parallelism).

Each rank is a process on a device of its own.  Rank 0 is the *leader*: it is connected to the
router, owns the buffer's slots, reads and writes storage.  The others are *followers*: they move
their slice of the same blocks.  All execute the same steps, so collectives are called within the
steps, in the same order at all ranks.  The protocol has three implementations: an engine of one
rank, vLLM's tensor parallel group, and emulated ranks, which are processes or threads
(``laboratory.emulated``).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import EngineLostError
from dualpath.engine.passes.step_transfers import PrefillChunk, Replica
from dualpath.engine.threads import OS_THREADS, Health, Threads
from dualpath.plan.steps import load_steps

# --------------------------------------------------------------------------------------- rank work
# Progress of the ranks of one engine, published through shared memory.
#
# All ranks execute the same work items in the same order: passes, copies of prompts into HBM,
# copies of generated blocks out of it.  Each rank numbers them, so that an item has the same number
# at all ranks.  The leader may release the resources of an item (buffer slots, a request id) only
# when no rank moves bytes for it any more, which may happen between steps of the engine.  So every
# follower writes into a row of shared memory, which the leader polls:
#
# * ``done``: its work items with lower numbers are over and write nothing any more;
# * ``unhealthy``: it should get no new requests;
# * for each staging slot the number of the work item that has filled it, written only after a
#   successful copy.
#
# Each is one aligned word, written by one process and read by another, so that reads are atomic.
# ``done`` is written last.

log = logging.getLogger(__name__)

_WORD_BYTES = 8
_DONE, _UNHEALTHY, _STAGED = 0, 1, 2


class RankBoard:
    """Rows of all ranks in zeroed memory of ``size_bytes``; each rank writes only its own row."""

    def __init__(self, memory: NDArray[np.uint8], rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        words = memory.view(np.uint64)
        self._rows: NDArray[np.uint64] = words.reshape(ranks, len(words) // ranks)

    @staticmethod
    def size_bytes(ranks: int, staging_slots: int) -> int:
        """Return the size of the rows of ``ranks`` ranks."""
        return ranks * (_STAGED + staging_slots) * _WORD_BYTES

    @classmethod
    def alone(cls, staging_slots: int) -> "RankBoard":
        """Return the board of an engine of one rank."""
        return cls(np.zeros(cls.size_bytes(1, staging_slots), dtype=np.uint8), 0, 1)

    def write_done(self, below: int) -> None:
        """Publish that this rank's work items with lower numbers are over."""
        self._rows[self.rank, _DONE] = below

    def write_staged(self, slot: int, number: int) -> None:
        """Publish that this rank's slice of a block is in a staging slot."""
        self._rows[self.rank, _STAGED + slot] = number

    def write_unhealthy(self, *, unhealthy: bool) -> None:
        """Publish whether this rank is unhealthy and should get no new work."""
        self._rows[self.rank, _UNHEALTHY] = unhealthy

    def others_done(self, number: int) -> bool:
        """Whether this work item is over at all other ranks."""
        return all(int(row[_DONE]) > number for row in self._other_rows())

    def others_staged(self, slot: int, number: int) -> bool:
        """Whether all other ranks have filled a staging slot for this work item."""
        return all(int(row[_STAGED + slot]) == number for row in self._other_rows())

    def unhealthy(self) -> list[int]:
        """Return the other ranks that are unhealthy."""
        others = (rank for rank in range(self.ranks) if rank != self.rank)
        return [rank for rank in others if self._rows[rank, _UNHEALTHY]]

    def _other_rows(self) -> list[NDArray[np.uint64]]:
        return [self._rows[rank] for rank in range(self.ranks) if rank != self.rank]


class RankWork:
    """Numbers work items and tracks their end; methods may be called from any thread.

    Each rank calls ``begin`` for the same work items in the same order.  A follower calls ``ended``
    for each, the leader waits with ``when_idle``.
    """

    def __init__(self, board: RankBoard, threads: Threads = OS_THREADS) -> None:
        self.board = board
        self._lock = threads.lock()
        self._next = 1
        self._open: set[int] = set()
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def begin(self) -> int:
        """Return the number of the work item that begins."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            if self.board.rank:
                self._open.add(number)
            return number

    def ended(self, number: int) -> None:
        """All transfers of a work item are over at this rank."""
        with self._lock:
            assert number < self._next, f"work item {number} has not begun"
            self._open.discard(number)
            self.board.write_done(min(self._open, default=self._next))

    def staged(self, number: int, slot: int) -> None:
        """This rank's slice of a generated block is in its slot; called before ``ended``."""
        self.board.write_staged(slot, number)

    def when_idle(self, number: int, then: Callable[[], None]) -> None:
        """Call ``then`` once the work item is over at all other ranks: now, or from ``poll``."""
        with self._lock:
            done = self.board.others_done(number)
            if not done:
                self._waiting.append((number, then))
        if done:
            then()

    def poll(self) -> None:
        """Run the callbacks of work items that are over at all other ranks."""
        if not self._waiting:
            return
        with self._lock:
            over = [each for each in self._waiting if self.board.others_done(each[0])]
            self._waiting = [each for each in self._waiting if each not in over]
        for number, then in over:
            try:
                then()
            except Exception:  # a defect in one callback must not skip the others
                log.exception("the callback of work item %d failed", number)


# ------------------------------------------------------------------------------------ shared loads
# Shared loads: ranks that replicate KV load one part each and exchange the parts on the device.
#
# Latent KV is replicated on every rank of an engine.  By default each of ``a`` ranks loads all of
# it, without communication but with ``a`` times the bytes.  With ``share_loads`` each rank loads
# one block in ``a``, in turn as with sends, and before a layer is computed the ranks gather the
# other blocks: one collective per layer, over the links between GPUs.
#
# The thread that computes calls it once for every layer, in the same order at all ranks.  By then
# nothing reads the layer's region any more: its previous layer has been sent (``layer_stream``),
# and the kernels of that layer were queued before.  The exchanged blocks depend only on the plan,
# not on the outcome of transfers: if a rank failed to load a request, undefined bytes are exchanged
# and the request fails at the end of the pass at all ranks.


class LoadExchange(Protocol):
    """The collective of ranks that replicate KV, on their devices."""

    def exchange(self, layer: int, blocks: Sequence[Sequence[int]]) -> None:
        """Copy HBM blocks ``blocks[r]`` of a layer from replica ``r`` to every other replica.

        Ordered on the device after the calling thread's queued work and waits, and before its next
        work.
        """
        ...


class SharedLoads:
    """The shared loads of one pass.

    ``chunks`` are all chunks of the pass, the same at all ranks, including chunks for which this
    rank moves nothing.  ``resident`` as in ``plan.steps.load_steps``.
    """

    def __init__(
        self,
        exchange: LoadExchange,
        replica: Replica,
        chunks: Sequence[PrefillChunk],
        geometry: BlockGeometry,
        *,
        resident: bool,
    ) -> None:
        self._exchange = exchange
        self._replica = replica
        self._chunks = [(chunk, chunk.layout(geometry)) for chunk in chunks]
        self._resident = resident
        self._complete: set[int] = set()

    def complete(self, layer: int) -> None:
        """Gather the KV before the chunks in ``layer``'s HBM; this rank has loaded its own part."""
        if layer in self._complete:
            return
        self._complete.add(layer)
        blocks: list[list[int]] = [[] for _ in range(self._replica.count)]
        for chunk, layout in self._chunks:
            for step in load_steps(layout, layer, chunk.chunk, resident=self._resident):
                for position in range(step.blocks.count):
                    loads = blocks[self._replica.turn(step, position)]
                    loads.append(chunk.hbm_blocks[step.blocks.first + position])
        if any(blocks):
            self._exchange.exchange(layer, blocks)


T = TypeVar("T")
U = TypeVar("U")


class RankGroup(Protocol):
    """One rank's end; every rank calls the same methods in the same order.

    Both raise if another rank has ended: an engine that has lost a rank cannot go on.
    """

    rank: int
    size: int

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value at every rank; the values of other ranks are ignored."""
        ...

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks at every rank, in the order of ranks."""
        ...


class OneRank:
    """The group of an engine of one rank."""

    rank = 0
    size = 1

    def broadcast(self, value: T | None) -> T:
        """Return the value."""
        assert value is not None
        return value

    def gather(self, value: T) -> list[T]:
        """Return a list of the value."""
        return [value]


#: Has no state: every engine of one rank may use it.
ONE_RANK = OneRank()


class TimedGroup:
    """A group with a time limit for every collective: a rank that hangs breaks its engine.

    A collective may hang and cannot be cancelled.  So ``poll``, called from another thread, marks
    the data plane as broken when one takes longer than ``limit_s``; the process, and with it the
    engine, is then ended.
    """

    def __init__(self, group: RankGroup, health: Health, limit_s: float) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._health = health
        self._limit_s = limit_s
        self._since_ns: int | None = None

    def broadcast(self, value: T | None) -> T:
        """See ``RankGroup``."""
        return self._timed(lambda: self._group.broadcast(value))

    def gather(self, value: T) -> list[T]:
        """See ``RankGroup``."""
        return self._timed(lambda: self._group.gather(value))

    def poll(self) -> None:
        """Mark the data plane as broken if a collective takes too long; called periodically."""
        since_ns = self._since_ns
        if since_ns is None:
            return
        waited_s = (self._health.threads.now_ns() - since_ns) / 1e9
        if waited_s > self._limit_s:
            self._health.fail(
                f"rank {self.rank} of {self.size} has waited {waited_s:.0f} s for the others"
            )

    def _timed(self, call: Callable[[], U]) -> U:
        self._since_ns = self._health.threads.now_ns()
        try:
            return call()
        except Exception as error:
            reason = f"rank {self.rank} of {self.size} has lost the others: {error}"
            self._health.fail(reason)
            raise EngineLostError(reason) from error
        finally:
            self._since_ns = None
