"""Blocks that lie whole in slots of a DRAM buffer, and in which order they give way.

A hit begins with a prompt's first block, so of a chain the tail gives way before its head: of the
blocks that no other one here follows, the one whose next use is farthest, or the least recently
used where that cannot be told (``policy.reuse``).  A block counts as used when the blocks behind it
are, which the order of leaving makes true: it is the last one's turn only when all behind it are
gone, and then at the latest time of them all.  Before that comes a block's *rank*: what is to be
retained for an agent gives way last, what nobody will ask for again first.  Of what is retained,
that goes first whose agent's next turn is expected last.

Uses are counted in blocks.  Those of a block that has left are remembered for a while, so that
intervals longer than a block stays are learned as well; a block that is new has the interval of the
one before it.
"""

import heapq
from collections.abc import Iterable, Sequence
from enum import IntEnum

from dualpath.core.blocks import BlockKey
from dualpath.core.key_news import KeyNews
from dualpath.policy.reuse import ReuseForecast

#: The uses of so many blocks that have left are remembered, for each slot.
_REMEMBERED = 4
#: The heaps are made anew when one has so many entries for each block that rests, and some more.
_MOST_STALE = 4
_SPARE = 64


class Rank(IntEnum):
    """When a block gives way, compared with others."""

    FIRST = 0
    USUAL = 1
    LAST = 2


#: A block's rank and its last use, when it is expected (negative) of one that is retained: the
#: lowest gives way first.
_Turn = tuple[Rank, int]
#: A block's rank, its next use and the second part of its turn, both negative: the lowest gives way
#: first.
_Forecast = tuple[Rank, int, int]


class _Block:
    def __init__(self, key: BlockKey, parent: BlockKey) -> None:
        self.key = key
        self.parent = parent
        self.used = 0
        self.turn: _Turn = (Rank.USUAL, 0)
        #: Between its last two uses; 0: not known.
        self.interval = 0
        self.rests = False


class KeptBlocks:
    """Whole blocks by slot and key, a key once; owned by one ``SlotPool``.

    A block *rests* while nobody holds its slot: then it may be evicted.  There are ``capacity``
    slots.
    """

    def __init__(self, capacity: int) -> None:
        self.resting = 0
        self.evicted = 0
        self._blocks: dict[int, _Block] = {}
        self._slots: dict[BlockKey, int] = {}
        #: How many blocks here follow a key, which itself need not be here.
        self._followers: dict[BlockKey, int] = {}
        #: Keys whose blocks, here or not, give way last, and when they are expected to be used.
        self._retained: dict[BlockKey, int] = {}
        self._uses = 0
        #: (turn, slot) of resting blocks that nothing follows; of others it has stale entries.
        self._leaving: list[tuple[_Turn, int]] = []
        #: The same blocks by their next use.
        self._farthest: list[tuple[_Forecast, int]] = []
        self._reuse = ReuseForecast(max(capacity, 1))
        #: Last use and interval of blocks that have left, the latest last.
        self._left: dict[BlockKey, tuple[int, int]] = {}
        self._most_left = _REMEMBERED * capacity
        self._news = KeyNews()

    def __len__(self) -> int:
        """All of them, resting or not."""
        return len(self._blocks)

    @property
    def forecasts(self) -> bool:
        """Whether intervals repeat, so that the chain expected last gives way."""
        return self._reuse.believed

    def __contains__(self, slot: int) -> bool:
        """Whether a slot holds a whole block."""
        return slot in self._blocks

    def items(self) -> list[tuple[int, BlockKey]]:
        """Return slots with the keys of their blocks."""
        return [(slot, block.key) for slot, block in self._blocks.items()]

    def has(self, key: BlockKey) -> bool:
        """Whether a block is here."""
        return key in self._slots

    def head(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the slots of the blocks at the head of ``keys`` that are here."""
        slots = []
        for key in keys:
            if (slot := self._slots.get(key)) is None:
                break
            slots.append(slot)
        return slots

    def add(self, slot: int, key: BlockKey, parent: BlockKey) -> bool:
        """A slot that somebody holds has a whole block; False if that block is here already.

        ``parent`` is the key before it, empty where that is not known.
        """
        if key in self._slots:
            return False
        block = self._blocks[slot] = _Block(key, parent)
        block.used, block.interval = self._left.pop(key, (0, 0))
        block.turn = Rank.USUAL, block.used
        self._slots[key] = slot
        self._followers[parent] = self._followers.get(parent, 0) + 1
        self._news.note(key)
        return True

    def rest(self, slot: int) -> None:
        """Nobody holds the slot any more: its block was used until now, and may go."""
        block = self._blocks[slot]
        self._uses += 1
        if not block.rests:
            self.resting += 1
            self._learn(block)
        block.used, block.rests = self._uses, True
        block.turn = self._turn(block.key)
        self._let_leave(slot, block)

    def retain(self, keys: Iterable[BlockKey], expected_ns: int) -> None:
        """Let the blocks of these keys give way last, those too that come later.

        ``expected_ns`` is when they are expected to be used, on any clock.
        """
        for key in keys:
            self._retained[key] = expected_ns
            self._take_turn(key, (Rank.LAST, -expected_ns))

    def let_go(self, keys: Iterable[BlockKey], rank: Rank = Rank.USUAL) -> None:
        """Retain the blocks of these keys no longer; ``rank`` FIRST: those that rest go first."""
        for key in keys:
            self._retained.pop(key, None)
            if (slot := self._slots.get(key)) is not None:
                self._take_turn(key, (rank, self._blocks[slot].used))

    def wake(self, slot: int) -> bool:
        """Somebody holds the slot; return whether its block has rested."""
        block = self._blocks[slot]
        rested, block.rests = block.rests, False
        self.resting -= rested
        return rested

    def rests(self, slot: int) -> bool:
        """Whether a slot's block may be evicted."""
        return self._blocks[slot].rests

    def evict(self) -> int:
        """Let the block go whose turn it is; return its slot.  At least one has to rest."""
        slot = self._next()
        block = self._blocks[slot]
        self.evicted += 1
        self.resting -= 1
        self._forget(slot, block)
        parent_slot = self._slots.get(block.parent)
        if parent_slot is not None:
            parent = self._blocks[parent_slot]
            parent.used = max(parent.used, block.used)
            parent.turn = max(parent.turn, block.turn)
            self._let_leave(parent_slot, parent)
        return slot

    def gives_way_to(self, key: BlockKey) -> bool:
        """Whether the block whose turn it is gives way before that of ``key`` would if it came."""
        return self.resting > 0 and self._blocks[self._next()].turn < self._turn(key)

    def clear(self) -> list[int]:
        """Let all go that rest; return their slots."""
        return [self.evict() for _ in range(self.resting)]

    def tell(self, *, begin: bool) -> None:
        """Begin to note news, all that is here first; or end it."""
        self._news.tell(self._slots, begin=begin)

    def news(self, limit: int) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return up to ``limit`` keys whose blocks have come or gone since last told."""
        return self._news.take(limit, self._slots)

    def _turn(self, key: BlockKey) -> _Turn:
        """Return the turn of a block that is used just now."""
        expected_ns = self._retained.get(key)
        return (Rank.USUAL, self._uses) if expected_ns is None else (Rank.LAST, -expected_ns)

    def _take_turn(self, key: BlockKey, turn: _Turn) -> None:
        if (slot := self._slots.get(key)) is not None:
            block = self._blocks[slot]
            block.turn = turn
            self._let_leave(slot, block)

    def _learn(self, block: _Block) -> None:
        if block.used:
            interval = self._uses - block.used
            self._reuse.learn(interval, block.interval)
            block.interval = interval
        elif (slot := self._slots.get(block.parent)) is not None:
            block.interval = self._blocks[slot].interval

    def _next(self) -> int:
        while self._leaving and not self._waits(self._leaving[0][0], self._leaving[0][1]):
            heapq.heappop(self._leaving)
        if not self._leaving:
            # All that rest are followed by blocks that others hold, who mostly hold these as well.
            return min((b.turn, slot) for slot, b in self._blocks.items() if b.rests)[1]
        slot = self._leaving[0][1]
        age, interval = self._uses - self._blocks[slot].used, self._blocks[slot].interval
        if not self.forecasts or self._reuse.given_up(age, interval):
            return slot
        while True:
            (rank, _, turn), slot = self._farthest[0]
            if self._waits((rank, -turn), slot):
                return slot
            heapq.heappop(self._farthest)

    def _waits(self, turn: _Turn, slot: int) -> bool:
        """Whether it is still so that a slot's block may leave, and this its turn."""
        block = self._blocks.get(slot)
        return block is not None and block.turn == turn and self._may_leave(block)

    def _forecast(self, block: _Block) -> _Forecast:
        rank, turn = block.turn
        if rank is Rank.LAST:
            return rank, turn, -turn
        return rank, -turn - self._reuse.expected(block.interval), -turn

    def _may_leave(self, block: _Block) -> bool:
        return block.rests and block.key not in self._followers

    def _let_leave(self, slot: int, block: _Block) -> None:
        if self._may_leave(block):
            heapq.heappush(self._leaving, (block.turn, slot))
            heapq.heappush(self._farthest, (self._forecast(block), slot))
            longest = max(len(self._leaving), len(self._farthest))
            if longest > _MOST_STALE * self.resting + _SPARE:
                self._make_heaps_anew()

    def _make_heaps_anew(self) -> None:
        leaving = [(slot, b) for slot, b in self._blocks.items() if self._may_leave(b)]
        self._leaving = [(b.turn, slot) for slot, b in leaving]
        self._farthest = [(self._forecast(b), slot) for slot, b in leaving]
        heapq.heapify(self._leaving)
        heapq.heapify(self._farthest)

    def _forget(self, slot: int, block: _Block) -> None:
        del self._blocks[slot], self._slots[block.key]
        self._left[block.key] = block.used, block.interval
        if len(self._left) > self._most_left:
            del self._left[next(iter(self._left))]
        left = self._followers[block.parent] - 1
        if left:
            self._followers[block.parent] = left
        else:
            del self._followers[block.parent]
        self._news.note(block.key)


def with_parents(keys: Iterable[BlockKey], parent: BlockKey) -> Iterable[tuple[BlockKey, BlockKey]]:
    """Return consecutive keys, each with the one before it; ``parent`` is the first one's."""
    for key in keys:
        yield key, parent
        parent = key
