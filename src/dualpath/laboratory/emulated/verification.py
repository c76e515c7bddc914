"""Compares received KV with its expected content and counts the comparisons."""

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dualpath.engine.counters import Counter, Counters
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.laboratory.emulated.kv_bytes import KvFunction, Words
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.settings import Verify

Flags = NDArray[np.bool_]
#: Layer Blocks compared, and those found wrong, by place.
Counts = dict["CheckedAt", tuple[int, int]]


class CheckedAt(enum.StrEnum):
    """The place at which KV is compared."""

    PE_BUFFER = "pe_buffer"
    """In the PE's buffer, after it was read from storage."""
    PE_HBM = "pe_hbm"
    """In the PE's HBM, after a layer was loaded and before it is computed."""
    DE_BUFFER = "de_buffer"
    """In the DE's buffer: the whole prompt, read from storage or sent by the PE."""
    DE_HBM = "de_hbm"
    """In the DE's HBM: the whole prompt, before the first decode step."""


class Verifier:
    """Compares KV and counts: by place here, in total in ``counters``; thread-safe.

    Buffers hold whole blocks with the content of ``function``; HBM holds the content of ``held``, a
    rank's slice of them, which is counted as a Layer Block as well.
    """

    def __init__(
        self,
        function: KvFunction,
        verify: Verify,
        counters: Counters,
        threads: Threads = OS_THREADS,
        held: KvFunction | None = None,
    ) -> None:
        self._function = function
        self._held = held or function
        self._verify = verify
        self._lock = threads.lock()
        self._counts = {place: [0, 0] for place in CheckedAt}
        self._reported: Counts = dict.fromkeys(CheckedAt, (0, 0))
        self._totals = counters
        self._count(CheckedAt.PE_BUFFER, 0, 0)

    @property
    def compares(self) -> bool:
        """Whether KV is compared."""
        return self._verify is not Verify.CHECKSUM

    def counts(self) -> Counts:
        """Return by place (Layer Blocks compared, of which wrong)."""
        with self._lock:
            return {place: (total, wrong) for place, (total, wrong) in self._counts.items()}

    def new_counts(self) -> Counts:
        """Return the counts since the last call."""
        now, before = self.counts(), self._reported
        self._reported = now
        return {p: (now[p][0] - before[p][0], now[p][1] - before[p][1]) for p in CheckedAt}

    def add(self, counts: Counts) -> None:
        """Add the counts of another rank."""
        for place, (total, wrong) in counts.items():
            self._count(place, total, wrong)

    def layer_blocks(
        self,
        place: CheckedAt,
        parts: Sequence[Words],
        block_ids: Sequence[int],
        seeds: Seeds,
        layer: int,
    ) -> list[int]:
        """Compare blocks ``parts[p][block_ids[i]]`` with ``seeds[i]``; return each wrong i."""
        if not self.compares:
            return []
        ids = np.asarray(block_ids, dtype=np.int64)
        rows = seeds[: len(ids)]
        portion = self._held.portion_blocks
        same = np.ones(len(ids), dtype=np.bool_)
        for part, region in enumerate(parts):
            for start in range(0, len(ids), portion):
                some = slice(start, start + portion)
                same[some] &= self._same(region, ids[some], rows[some], layer, part)
        wrong: list[int] = np.flatnonzero(~same).tolist()
        self._count(place, len(ids), len(wrong))
        return wrong

    def full_blocks(
        self,
        place: CheckedAt,
        views: Sequence[memoryview],
        seeds: Seeds,
        first_loaded: Sequence[int] = (),
    ) -> list[int]:
        """Compare Full Blocks ``views[i]`` in DRAM with ``seeds[i]``; return each wrong i.

        ``first_loaded``: for each layer the first i that has its KV; empty: all blocks have it.
        """
        if not self.compares:
            return []
        first = first_loaded or [0] * self._function.geometry.layers
        wrong: list[int] = []
        wrong_layers = 0
        for index, view in enumerate(views):
            bad = [n for n in self._wrong_layers(view, seeds[index]) if index >= first[n]]
            if bad:
                wrong.append(index)
                wrong_layers += len(bad)
        self._count(place, sum(max(len(views) - i, 0) for i in first), wrong_layers)
        return wrong

    def _wrong_layers(self, view: memoryview, seeds: Seeds) -> set[int]:
        wrong: set[int] = set()
        for stack in self._function.stacks:
            found = self._function.in_full_block(stack, view)
            if self._verify is Verify.FULL:
                differs = found != seeds[:, None] ^ stack.constants[:, :, None]
            else:
                differs = found[..., 0] != seeds ^ stack.constants[:, :, :1]
            if differs.any():
                bad = differs.reshape(len(found), -1).any(axis=1)
                wrong.update(stack.layers[number] for number in np.flatnonzero(bad))
        return wrong

    def _same(
        self, region: Words, ids: NDArray[np.int64], rows: Seeds, layer: int, part: int
    ) -> Flags:
        if self._verify is Verify.FULL:
            equal = region[ids] == self._held.part_blocks(rows, layer, part)
        else:
            constants = self._held.constants[layer][part]
            word = layer % constants.shape[1]
            equal = region[ids, :, :, word] == rows[:, None] ^ constants[:, word, None]
        same: Flags = equal.reshape(len(ids), -1).all(axis=1)
        return same

    def _count(self, place: CheckedAt, total: int, wrong: int) -> None:
        with self._lock:
            self._counts[place][0] += total
            self._counts[place][1] += wrong
        self._totals.add(Counter.VERIFIED_LAYER_BLOCKS, total)
        self._totals.add(Counter.WRONG_LAYER_BLOCKS, wrong)
