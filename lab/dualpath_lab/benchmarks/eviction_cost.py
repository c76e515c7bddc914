"""Cost of an eviction: microseconds per evicted block, by the number of cached chains.

A buffer is full of chains of ``--blocks`` blocks.  A step is the work of an engine for a block of a
request: it evicts a block (``CachedBlocks.evict``), adds another one and makes it evictable.  The
chains are used cyclically, so that reuse forecasts decide (``policy.reuse``), or in random order,
so that the least recently used block is evicted.  All sizes and both orders are measured in every
round; reported are medians, and for comparison a step without eviction, in a buffer with room.
"""

import time
from typing import Annotated, NamedTuple

import numpy as np

from dualpath.core.blocks import BlockKey, block_keys
from dualpath.core.settings import Setting, Settings
from dualpath.engine.buffer.block_buffer import CachedBlocks, with_parents
from dualpath_sim.harness.experiment import Experiment, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, numbers_page

ORDERS = ("in turn", "at random")


class EvictionSettings(Settings, frozen=True, kw_only=True):
    """Sizes of the buffer."""

    chains: Annotated[tuple[int, ...], Setting("chains that fit", ge=1)] = (1000, 10_000, 100_000)
    blocks: Annotated[int, Setting("blocks of a chain", ge=1)] = 4
    repeat: Annotated[int, Setting("rounds", ge=1)] = 5


class Case(NamedTuple):
    """An order of uses and the number of chains."""

    order: str
    chains: int


#: Number of steps that are timed together.
STEPS = 20_000


class Buffer:
    """Slots full of chains, of which there are a quarter more than fit."""

    def __init__(self, chains: int, blocks: int) -> None:
        self.blocks = blocks
        self.chains = [_keys(number, blocks) for number in range(chains + chains // 4)]
        capacity = chains * blocks
        self.cached = CachedBlocks(2 * capacity)
        self.room = list(range(2 * capacity - 1, capacity - 1, -1))
        self._free = list(range(capacity - 1, -1, -1))

    def use(self, number: int) -> None:
        """Use a chain: touch its cached blocks, and add the others in the place of evicted ones."""
        keys = self.chains[number]
        held = self.cached.cached_slots(keys)
        for slot in held:
            self.cached.touch(slot)
        parent = keys[len(held) - 1] if held else b""
        for key, before in with_parents(keys[len(held) :], parent):
            slot = self._free.pop() if self._free else self.cached.evict()
            self.cached.add(slot, key, before)
            held.append(slot)
        for slot in reversed(held):
            self.cached.make_evictable(slot)

    def step(self, keys: list[BlockKey], *, evict: bool) -> None:
        """Add a block for each of ``keys``, chains of one block, and make it evictable."""
        for key in keys:
            slot = self.cached.evict() if evict else self.room.pop()
            self.cached.add(slot, key, b"")
            self.cached.make_evictable(slot)


def measure(settings: EvictionSettings, case: Case, number: int) -> Numbers:
    """Return µs of a step with and without an eviction, and whether forecasts decide."""
    buffer = Buffer(case.chains, settings.blocks)
    numbers = np.arange(3 * len(buffer.chains)) % len(buffer.chains)
    if case.order == ORDERS[1]:
        numbers = np.random.default_rng(number).permutation(numbers)
    for chain in numbers.tolist():
        buffer.use(chain)
    steps = min(STEPS, case.chains)
    fresh = [_keys(-1 - step, 1)[0] for step in range(2 * steps)]
    plain_us = _timed_us(buffer, fresh[:steps], evict=False)
    both_us = _timed_us(buffer, fresh[steps:], evict=True)
    return {
        "added_us": plain_us,
        "added_with_eviction_us": both_us,
        "eviction_us": both_us - plain_us,
        "forecasts": float(buffer.cached.forecasts),
    }


def _timed_us(buffer: Buffer, keys: list[BlockKey], *, evict: bool) -> float:
    start_ns = time.process_time_ns()
    buffer.step(keys, evict=evict)
    return (time.process_time_ns() - start_ns) / len(keys) / 1e3


def _keys(number: int, blocks: int) -> list[BlockKey]:
    return block_keys([number & 0xFFFFFFFF] * blocks, 1)


EVICTION = Experiment(
    name="eviction",
    title="Cost of an eviction, by the number of cached chains",
    settings=EvictionSettings(),
    result=Numbers,
    stages=lambda settings, progress: one_stage(
        {
            f"{chains:,} chains {order}": Case(order, chains)
            for order in ORDERS
            for chains in settings.chains
        },
        lambda case, number: measure(settings, case, number),
    ),
    draw=numbers_page(
        "CPU time of one step",
        [
            Column("forecasts decide", "forecasts", "{:.0%}"),
            Column("added, µs", "added_us", "{:.1f}"),
            Column("added with eviction, µs", "added_with_eviction_us", "{:.1f}", tolerance=0.25),
            Column("an eviction, µs", "eviction_us", "{:.1f}"),
        ],
        settings=lambda settings: (f"Chains of {settings.blocks} blocks.",),
    ),
)
