"""Buffers of nodes, granted first come, first served (§4.1), and what they keep: the DRAM tier."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from dualpath.model.sim.rules import (
    adopted_blocks,
    extended_blocks,
    kept_after_eviction,
    room_blocks,
)

Granted = Callable[[int], None]
"""Called with the number of blocks that were kept and are the request's now."""


class Wanted(NamedTuple):
    """Room for ``blocks`` of an agent's context from ``first`` on.

    Of these the first ``kept`` are believed to lie in the buffer already.
    """

    agent: int
    first: int
    blocks: int
    kept: int


class KeptRuns:
    """What a buffer keeps for agents' next rounds: the head of each context, by latest use."""

    def __init__(self) -> None:
        self.total_blocks = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def of(self, agent: int) -> int:
        """Return how many blocks at the head of an agent's context are kept."""
        return self._blocks.get(agent, 0)

    def adopt(self, wanted: Wanted) -> int:
        """Let a request have what is kept of its blocks; return how many that are."""
        adopted = adopted_blocks(self.of(wanted.agent), wanted.first, wanted.kept)
        if adopted:
            self._set(wanted.agent, wanted.first)
        return adopted

    def keep(self, agent: int, first: int, end: int) -> None:
        """Keep blocks [first, end) that a request has given back, if their head is kept as well."""
        blocks = extended_blocks(self.of(agent), first, end)
        if blocks:
            self._set(agent, blocks)
            self._blocks.move_to_end(agent)

    def shrink(self, most_blocks: int) -> None:
        """Evict, the least recently used agent's tail first, until no more are kept."""
        while self.total_blocks > most_blocks:
            agent, blocks = next(iter(self._blocks.items()))
            self._set(agent, kept_after_eviction(blocks, self.total_blocks - most_blocks))

    def _set(self, agent: int, blocks: int) -> None:
        self.total_blocks += blocks - self.of(agent)
        if blocks:
            self._blocks[agent] = blocks
        else:
            self._blocks.pop(agent, None)


class NodeBuffer:
    """Buffer space of one node in one role; with ``keeps`` its unused part is a DRAM tier."""

    def __init__(self, capacity_bytes: float, block_bytes: float, *, keeps: bool) -> None:
        self.kept = KeptRuns()
        self._keeps = keeps
        self._free_bytes = capacity_bytes
        self._block_bytes = block_bytes
        self._waiting: deque[tuple[Wanted, Granted]] = deque()

    def reserve(self, wanted: Wanted, granted: Granted) -> None:
        """Run ``granted`` when there is room: at once if nobody waits and there is."""
        self._waiting.append((wanted, granted))
        self._grant()

    def release(self, agent: int, first: int, blocks: int, whole: int) -> None:
        """Give back ``blocks`` from ``first`` on, the first ``whole`` full ones, to be kept."""
        self._free_bytes += blocks * self._block_bytes
        if self._keeps:
            self.kept.keep(agent, first, first + whole)
        self._grant()

    def keep(self, agent: int, first: int, end: int) -> None:
        """Keep blocks that were written beyond any reservation: generated ones."""
        if self._keeps:
            self.kept.keep(agent, first, end)
            self._shrink()

    def _grant(self) -> None:
        while self._waiting:
            wanted, granted = self._waiting[0]
            need_bytes = wanted.blocks * self._block_bytes
            if need_bytes > self._free_bytes:
                return
            self._waiting.popleft()
            self._free_bytes -= need_bytes
            adopted = self.kept.adopt(wanted)
            if self._keeps:
                self._shrink()
            granted(adopted)

    def _shrink(self) -> None:
        self.kept.shrink(room_blocks(self._free_bytes, self._block_bytes))
