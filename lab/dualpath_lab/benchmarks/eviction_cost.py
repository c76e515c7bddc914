"""Cost of an eviction: microseconds per evicted block, by the number of cached chains.

    python -m dualpath_lab.benchmarks.eviction_cost [--chains 1000,10000,100000] [--blocks 4]
    [--rounds 5]

A buffer is full of chains of ``--blocks`` blocks.  A step is the work of an engine for a block of a
request: it evicts a block (``CachedBlocks.evict``), adds another one and makes it evictable.  The
chains are used cyclically, so that reuse forecasts decide (``policy.reuse``), or in random order,
so that the least recently used block is evicted.  All sizes and both orders are measured in every
round; reported are medians, and for comparison a step without eviction, in a buffer with room.
"""

import argparse
import statistics
import time

import numpy as np

from dualpath.core.blocks import BlockKey, block_keys
from dualpath.engine.buffer.block_buffer import CachedBlocks, with_parents
from dualpath.report import markdown
from dualpath.report.model import Table

ORDERS = ("in turn", "at random")
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


def measure(chains: int, blocks: int, order: str, round_: int) -> tuple[float, float, bool]:
    """Return µs of a step with and without an eviction, and whether forecasts decide."""
    buffer = Buffer(chains, blocks)
    numbers = np.arange(3 * len(buffer.chains)) % len(buffer.chains)
    if order == ORDERS[1]:
        numbers = np.random.default_rng(round_).permutation(numbers)
    for number in numbers.tolist():
        buffer.use(number)
    steps = min(STEPS, chains)
    fresh = [_keys(-1 - number, 1)[0] for number in range(2 * steps)]
    plain_us = _timed_us(buffer, fresh[:steps], evict=False)
    return _timed_us(buffer, fresh[steps:], evict=True), plain_us, buffer.cached.forecasts


def _timed_us(buffer: Buffer, keys: list[BlockKey], *, evict: bool) -> float:
    start_ns = time.process_time_ns()
    buffer.step(keys, evict=evict)
    return (time.process_time_ns() - start_ns) / len(keys) / 1e3


def _keys(number: int, blocks: int) -> list[BlockKey]:
    return block_keys([number & 0xFFFFFFFF] * blocks, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--chains", default="1000,10000,100000")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sizes = [int(word) for word in arguments.chains.split(",")]
    found: dict[tuple[str, int], list[tuple[float, float, bool]]] = {}
    for round_ in range(arguments.rounds):
        for order in ORDERS:
            for chains in sizes:
                measured = measure(chains, arguments.blocks, order, round_)
                found.setdefault((order, chains), []).append(measured)
    rows = []
    for (order, chains), runs in found.items():
        whole_us, plain_us = (statistics.median(run[i] for run in runs) for i in (0, 1))
        rows.append(
            (
                order,
                f"{chains:,}",
                "yes" if all(run[2] for run in runs) else "no",
                f"{plain_us:.1f}",
                f"{whole_us:.1f}",
                f"{whole_us - plain_us:.1f}",
            )
        )
    columns = ("order", "chains", "forecasts decide", "added, µs", "added with eviction, µs")
    title = f"chains of {arguments.blocks} blocks, CPU time of one step"
    print(markdown.table(Table(title, (*columns, "an eviction, µs"), tuple(rows))))


if __name__ == "__main__":
    main()
