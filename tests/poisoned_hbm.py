"""A prefill engine with HBM that holds NaN wherever no KV was loaded or computed.

When a layer's region is free for it, and before anything is loaded into it or computed, all of the
region becomes NaN, of whatever layer and request it was.  So what attention reads of stale KV is in
its answer, however small its weight.  Blocks that the pass computes become zeros: of the last one
vLLM's kernel multiplies what is behind the prompt by a weight of zero, which leaves NaN as it is.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.engine.passes.pass_transfers import PassTransfers
from dualpath.transport.contract import RegionInfo

#: As ``setattr``, for good or for one test.
Patch = Callable[[Any, str, Any], None]
#: In every byte: NaN in float32, bfloat16 and float16.
_NAN = 0xFF


def poison_hbm(patch: Patch = setattr) -> None:
    """Poison the HBM of this process's prefill engines, which share regions between layers."""
    original = LayerStream._load

    def load(self: LayerStream, layer: int, device_error: str | None = None) -> None:
        # With a region for every layer, KV of earlier chunks would have to stay.
        assert self._regions < self._geometry.layers, "give the engine fewer layer_buffers"
        chunks = [each.chunk for each in self._moves.chunks]
        computed = [block for c in chunks for block in c.hbm_blocks[c.chunk.first : c.chunk.end]]
        regions = {region.name: region for region in self._transfers._transport.info().regions}
        for name in self._transfers._hbm_regions[layer]:
            _poison(regions[name], computed)
        original(self, layer, device_error)

    patch(LayerStream, "_load", load)


def skip_wait(unwaited: int, patch: Patch = setattr) -> None:
    """Make this process's prefill engines skip the wait for the stored KV of one layer.

    Its loads begin when it is computed, so that they are late in every run.
    """
    late: list[Callable[[], None]] = []
    originals = PassTransfers.load, LayerStream.wait_loaded, LayerStream.computed
    original_load, original_wait, original_computed = originals

    def load(self: PassTransfers, layer: int, device_error: str | None, *, resident: bool) -> None:
        begin = functools.partial(original_load, self, layer, device_error, resident=resident)
        if layer == unwaited:
            late.append(begin)
        else:
            begin()

    def wait_loaded(self: LayerStream, layer: int) -> None:
        if layer == unwaited:
            self._waited.add(layer)  # Else the engine would find it out itself.
        else:
            original_wait(self, layer)

    def computed(self: LayerStream, layer: int) -> None:
        if layer == unwaited:
            late.pop()()
        original_computed(self, layer)

    patch(PassTransfers, "load", load)
    patch(LayerStream, "wait_loaded", wait_loaded)
    patch(LayerStream, "computed", computed)


def _poison(region: RegionInfo, computed: Iterable[int]) -> None:
    """Fill all blocks of a region except those that are ``computed`` now."""
    block_bytes = region.stride_bytes
    assert block_bytes == region.piece_bytes, "memory between blocks is not ours"
    ctypes.memset(region.base_address, _NAN, block_bytes * region.pieces)
    for block in computed:
        ctypes.memset(region.base_address + block * block_bytes, 0, block_bytes)
