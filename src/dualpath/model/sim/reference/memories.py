"""Buffers of nodes, granted first come, first served (§4.1), and what they keep: the DRAM tier."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from dualpath.model.sim.rules import (
    REUSE_WINDOW,
    adopted_blocks,
    extended_blocks,
    kept_after_eviction,
    room_blocks,
)
from dualpath.policy.reuse import ReuseForecast

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
        self._reuse = ReuseForecast(REUSE_WINDOW)
        self._uses = 0
        self._used: dict[int, int] = {}
        self._interval: dict[int, int] = {}

    def of(self, agent: int) -> int:
        """Return how many blocks at the head of an agent's context are kept."""
        return self._blocks.get(agent, 0)

    def adopt(self, wanted: Wanted) -> int:
        """Let a request have what is kept of its blocks; return how many that are."""
        adopted = adopted_blocks(self.of(wanted.agent), wanted.first, wanted.kept)
        if adopted:
            self._set(wanted.agent, wanted.first)
        return adopted

    def use(self, agent: int) -> None:
        """Note that an agent's next request has come, whether anything is kept for it or not."""
        self._uses += 1
        if agent in self._used:
            interval = self._uses - self._used[agent]
            self._reuse.learn(interval, self._interval.get(agent, 0))
            self._interval[agent] = interval
        self._used[agent] = self._uses

    def keep(self, agent: int, first: int, end: int) -> None:
        """Keep blocks [first, end) that a request has given back, if their head is kept as well."""
        blocks = extended_blocks(self.of(agent), first, end)
        if blocks:
            self._set(agent, blocks)
            self._blocks.move_to_end(agent)

    def shrink(self, most_blocks: int) -> None:
        """Evict until no more are kept, the tail first of an agent's (``policy.reuse``)."""
        while self.total_blocks > most_blocks:
            agent = self._next_to_leave()
            excess = self.total_blocks - most_blocks
            self._set(agent, kept_after_eviction(self.of(agent), excess))

    def _next_to_leave(self) -> int:
        oldest, reuse = next(iter(self._blocks)), self._reuse
        age = self._uses - self._used[oldest]
        if not reuse.believed or reuse.given_up(age, self._interval.get(oldest, 0)):
            return oldest
        return max(reversed(self._blocks), key=self._next_use)

    def _next_use(self, agent: int) -> int:
        return self._used[agent] + self._reuse.expected(self._interval.get(agent, 0))

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
                self.kept.use(wanted.agent)
                self._shrink()
            granted(adopted)

    def _shrink(self) -> None:
        self.kept.shrink(room_blocks(self._free_bytes, self._block_bytes))
