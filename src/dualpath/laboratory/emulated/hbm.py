"""The emulated engine's HBM: registered DRAM, divided as an engine divides its KV memory."""

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.engine.hbm_copy import HbmLayout
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.laboratory.emulated.kv_bytes import KvFunction, Words
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import allocate_registered


class EmulatedHbm:
    """``regions`` layers of KV for ``hbm_bytes`` of memory; layer l lives in region l mod regions.

    Blocks are handed out to whole requests; ``take`` and ``give_back`` may be called from any
    thread.  Raises ``ConfigError`` if not even one block fits.
    """

    def __init__(
        self,
        function: KvFunction,
        regions: int,
        hbm_bytes: int,
        threads: Threads = OS_THREADS,
    ) -> None:
        geometry = function.geometry
        self.blocks = hbm_bytes // (regions * geometry.layer_block_bytes)
        if self.blocks < 1:
            raise ConfigError(
                f"HBM of {hbm_bytes} bytes holds no block of {regions} layers of "
                f"{geometry.layer_block_bytes} bytes; raise the HBM"
            )
        self.regions = regions
        self._geometry = geometry
        self._function = function
        self._memory = allocate_registered(regions * self.blocks * geometry.layer_block_bytes)
        shape = (regions, self.blocks, geometry.block_tokens, function.words)
        self.words: Words = self._memory.array.view(np.uint64).reshape(shape)
        self._free = deque(range(self.blocks))
        self._held: Counter[int] = Counter()
        self._returned: set[int] = set()
        #: Called when blocks become free that were held.
        self.freed: Callable[[], None] = lambda: None
        self._lock = threads.lock()

    def layout(self) -> HbmLayout:
        """Describe the memory to the traffic manager."""
        size = self._geometry.layer_block_bytes
        regions = tuple(
            RegionInfo(
                name=f"hbm.{index}",
                base_address=self._memory.address + index * self.blocks * size,
                stride_bytes=size,
                piece_bytes=size,
                pieces=self.blocks,
            )
            for index in range(self.regions)
        )
        layers = range(self._geometry.layers)
        return HbmLayout(
            regions=regions,
            region_of_layer=tuple(regions[layer % self.regions].name for layer in layers),
            capacity_tokens=self.blocks * self._geometry.block_tokens,
        )

    @property
    def free_tokens(self) -> int:
        """Tokens for which there is room now."""
        with self._lock:
            return len(self._free) * self._geometry.block_tokens

    def take(self, blocks: int) -> tuple[int, ...] | None:
        """Return that many free blocks, None if there are not enough."""
        with self._lock:
            if blocks > len(self._free):
                return None
            return tuple(self._free.popleft() for _ in range(blocks))

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Return blocks nobody reads or writes any more."""
        with self._lock:
            self._free.extend(block for block in block_ids if block not in self._held)
            self._returned |= self._held.keys() & set(block_ids)

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Give these to nobody before ``let_go``; see ``engine.chunk_transfers.BlockHolder``."""
        with self._lock:
            self._held.update(hbm_blocks)

    def let_go(self, hbm_blocks: tuple[int, ...]) -> None:
        """Nothing writes to these any more: those given back meanwhile are free."""
        with self._lock:
            self._held -= Counter(hbm_blocks)
            freed = {block for block in hbm_blocks if block not in self._held} & self._returned
            self._returned -= freed
            self._free.extend(sorted(freed))
        if freed:
            self.freed()

    def layer(self, layer: int) -> Words:
        """Return the memory [block, token, word] in which a layer's KV lies."""
        region: Words = self.words[layer % self.regions]
        return region

    def write_blocks(self, layer: int, block_ids: Sequence[int], seeds: Seeds) -> None:
        """Compute KV: fill blocks with the content of ``seeds`` [block, token]."""
        region, ids = self.layer(layer), np.asarray(block_ids, dtype=np.int64)
        for start in range(0, len(ids), self._function.portion_blocks):
            part = slice(start, start + self._function.portion_blocks)
            region[ids[part]] = self._function.layer_blocks(seeds[part], layer)

    def write_token(self, block_id: int, place: int, seed: np.uint64) -> None:
        """Compute one token's KV in all layers; every layer needs a region of its own."""
        self.words[:, block_id, place, :] = self._function.token(seed)
