"""HBM of an emulated engine: registered DRAM with the layout of an engine's KV memory."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dualpath.core.errors import ConfigError
from dualpath.core.parts import WHOLE, PartSlice
from dualpath.engine.engine_memory import allocated
from dualpath.engine.hbm_layout import HbmLayout, shared_layers
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.laboratory.emulated.kv_bytes import KvFunction, Words
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.settings import WORD_BYTES
from dualpath.transport.contract import RegionInfo


class EmulatedHbm:
    """Memory of ``hbm_bytes`` for ``regions`` layers of KV; layer l is in region l mod regions.

    A region is sized for the largest of its layers: block b of each of them begins at the same
    address, with its parts one after the other.  The memory holds whole blocks or the slice
    ``held`` of them, like ``function``.  Blocks are allocated for whole requests; ``allocate`` and
    ``free`` may be called from any thread.  Raises ``ConfigError`` if not even one block fits.
    """

    def __init__(
        self,
        function: KvFunction,
        regions: int,
        hbm_bytes: int,
        threads: Threads = OS_THREADS,
        held: PartSlice = WHOLE,
        *,
        touch: bool = False,
    ) -> None:
        geometry = function.geometry
        layers = range(geometry.layers)
        sizes = [max(map(geometry.bytes_of, layers[first::regions])) for first in range(regions)]
        self.blocks = hbm_bytes // sum(sizes)
        if self.blocks < 1:
            raise ConfigError(
                f"HBM of {hbm_bytes} bytes is too small for one block of {regions} layers of "
                f"{max(sizes)} bytes; raise the HBM"
            )
        self._geometry = geometry
        self._slice = held
        self._function = function
        self._memory = allocated(self.blocks * sum(sizes), touch=touch)
        self._regions = [
            RegionInfo(f"hbm.{index}", address, size, size, self.blocks)
            for index, (address, size) in enumerate(
                zip(_addresses(self._memory.address, self.blocks, sizes), sizes, strict=True)
            )
        ]
        self._parts = [self._layer(layer) for layer in layers]
        self._free = deque(range(self.blocks))
        self._held: Counter[int] = Counter()
        #: Blocks that were freed while held.
        self._freed_while_held: set[int] = set()
        #: Called when released blocks become free.
        self.on_freed: Callable[[], None] = lambda: None
        self._lock = threads.lock()

    def layout(self) -> HbmLayout:
        """Describe the memory to the traffic manager."""
        capacity_tokens = self.blocks * self._geometry.block_tokens
        return shared_layers(self._regions, self._geometry, capacity_tokens, self._slice)

    def _region_of(self, layer: int) -> RegionInfo:
        return self._regions[layer % len(self._regions)]

    def _layer(self, layer: int) -> tuple[Words, ...]:
        """Return the memory [block, head, token, word] of each part of a layer."""
        region, parts = self._region_of(layer), []
        heads, tokens = self._function.heads, self._geometry.block_tokens
        first = (region.base_address - self._memory.address) // WORD_BYTES
        words = self._memory.array.view(np.uint64)[first:]
        for part_words in self._function.layer_words[layer]:
            shape = (self.blocks, heads, tokens, part_words)
            token_bytes = part_words * WORD_BYTES
            strides = (region.stride_bytes, tokens * token_bytes, token_bytes, WORD_BYTES)
            parts.append(as_strided(words, shape, strides))
            words = words[heads * tokens * part_words :]
        return tuple(parts)

    @property
    def free_tokens(self) -> int:
        """The number of tokens that fit into the free blocks."""
        with self._lock:
            return len(self._free) * self._geometry.block_tokens

    def allocate(self, blocks: int) -> tuple[int, ...] | None:
        """Allocate that many blocks; return their ids, None if not enough are free."""
        with self._lock:
            if blocks > len(self._free):
                return None
            return tuple(self._free.popleft() for _ in range(blocks))

    def free(self, block_ids: Sequence[int]) -> None:
        """Free blocks; held ones become free when they are released."""
        with self._lock:
            self._free.extend(block for block in block_ids if block not in self._held)
            self._freed_while_held |= self._held.keys() & set(block_ids)

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Do not reuse these blocks before ``unhold``; see ``BlockHolder``."""
        with self._lock:
            self._held.update(hbm_blocks)

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Release held blocks; those freed meanwhile can be allocated again."""
        with self._lock:
            self._held -= Counter(hbm_blocks)
            released = {block for block in hbm_blocks if block not in self._held}
            freed = released & self._freed_while_held
            self._freed_while_held -= freed
            self._free.extend(sorted(freed))
        if freed:
            self.on_freed()

    def layer(self, layer: int) -> tuple[Words, ...]:
        """Return the memory [block, head, token, word] of each part of a layer."""
        return self._parts[layer]

    def write_blocks(self, layer: int, block_ids: Sequence[int], seeds: Seeds) -> None:
        """Write the KV of ``seeds`` [block, token] to blocks of a layer."""
        ids, step = np.asarray(block_ids, dtype=np.int64), self._function.portion_blocks
        for part, region in enumerate(self.layer(layer)):
            for start in range(0, len(ids), step):
                some = slice(start, start + step)
                region[ids[some]] = self._function.part_blocks(seeds[some], layer, part)

    def write_token(self, block_id: int, place: int, seed: np.uint64) -> None:
        """Write one token's KV in all layers; every layer needs a region of its own."""
        for words, constants in self._stacks:
            words[:, block_id, :, place] = seed ^ constants

    @cached_property
    def _stacks(self) -> list[tuple[Words, Words]]:
        """The memory [layer, block, head, token, word] of equal parts, with their constants."""
        found = []
        for stack in self._function.stacks:
            (first, *_) = parts = [self._parts[layer][stack.part] for layer in stack.layers]
            apart = parts[-1].ctypes.data - first.ctypes.data
            layer_stride = apart // max(len(parts) - 1, 1)
            shape, strides = (len(parts), *first.shape), (layer_stride, *first.strides)
            found.append((as_strided(first, shape, strides), stack.constants))
        return found


def _addresses(first: int, blocks: int, sizes: Sequence[int]) -> list[int]:
    """Return the start addresses of consecutive regions with blocks of these sizes."""
    return [first + blocks * before for before in itertools.accumulate(sizes[:-1], initial=0)]
