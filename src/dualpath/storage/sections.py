"""The order of layers in the file of a Full Block: window layers last.

In DRAM a Full Block has its layers in model order.  A prompt that hits many blocks needs the KV of
window layers (sliding-window attention) in the last few blocks only, and window layers alternate
with full-attention layers: in model order, reading a block without them would take many small
reads, over S3 many requests.  So the file has two sections, the *head* with the full-attention
layers and the *tail* with the window layers, each in model order and with its own checksum.  A read
of the head alone is one request for the beginning of the file, scattered into place by ``preadv``.
A model without window layers has no tail, and its file has its layers in model order.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dualpath.core.blocks import BlockGeometry

Buffer = memoryview | bytes


class Sections(NamedTuple):
    """The memory of a block's two sections, each in file order.

    ``tail`` None: the tail is not read.
    """

    head: Sequence[Buffer]
    tail: Sequence[Buffer] | None = ()

    @property
    def buffers(self) -> list[memoryview]:
        """All buffers, in file order."""
        return [memoryview(buffer) for buffer in (*self.head, *(self.tail or ()))]

    @property
    def size_bytes(self) -> int:
        """Total bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


class FileOrder:
    """Maps Full Blocks of one geometry to the sections of their files."""

    def __init__(self, geometry: BlockGeometry) -> None:
        layers = range(geometry.layers)
        self._head = _slices(geometry, [n for n in layers if not geometry.is_window_layer(n)])
        self._tail = _slices(geometry, [n for n in layers if geometry.is_window_layer(n)])

    def of(self, full_block: memoryview, *, whole: bool = True) -> Sections:
        """Return the sections of a Full Block in memory, with the tail if ``whole``."""
        tail = [full_block[place] for place in self._tail] if whole else None
        return Sections([full_block[place] for place in self._head], tail)


def _slices(geometry: BlockGeometry, layers: Sequence[int]) -> list[slice]:
    """Return the byte ranges of layers in a Full Block; adjacent ranges are merged."""
    found: list[slice] = []
    for layer in layers:
        place = geometry.slice_of(layer)
        if found and found[-1].stop == place.start:
            place = slice(found.pop().start, place.stop)
        found.append(place)
    return found
