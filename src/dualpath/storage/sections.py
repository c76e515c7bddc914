"""In which order the bytes of a Full Block lie in its file: window layers last.

In DRAM a Full Block has its layers in model order.  A prompt that hits many blocks needs the KV of
window layers (sliding-window attention) in the last few of them only, and such layers alternate
with the others: read in model order, a block without them would be many small reads, over S3 many
requests.  So the file has two sections, the *head* with all layers that attend to everything and
the *tail* with the window layers, each in model order and with a checksum of its own.  A read of
the head alone is one request for the beginning of the file, scattered into place by ``preadv``.  A
model without window layers has no tail, and its file is its Full Block.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dualpath.core.blocks import BlockGeometry

Buffer = memoryview | bytes


class Sections(NamedTuple):
    """The memory of a block's two sections, each in the order of the file.

    ``tail`` None: it is not read.
    """

    head: Sequence[Buffer]
    tail: Sequence[Buffer] | None = ()

    @property
    def buffers(self) -> list[memoryview]:
        """All of it, in the order of the file."""
        return [memoryview(buffer) for buffer in (*self.head, *(self.tail or ()))]

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return sum(buffer.nbytes for buffer in self.buffers)


class FileOrder:
    """Where the sections of blocks of one geometry lie in memory."""

    def __init__(self, geometry: BlockGeometry) -> None:
        layers = range(geometry.layers)
        self._head = _slices(geometry, [n for n in layers if not geometry.is_window_layer(n)])
        self._tail = _slices(geometry, [n for n in layers if geometry.is_window_layer(n)])

    def of(self, full_block: memoryview, *, whole: bool = True) -> Sections:
        """Return the sections of a Full Block in memory, the tail only if it is the ``whole``."""
        tail = [full_block[place] for place in self._tail] if whole else None
        return Sections([full_block[place] for place in self._head], tail)


def _slices(geometry: BlockGeometry, layers: Sequence[int]) -> list[slice]:
    """Return which bytes of a Full Block these layers are, neighbours in one."""
    found: list[slice] = []
    for layer in layers:
        place = geometry.slice_of(layer)
        if found and found[-1].stop == place.start:
            place = slice(found.pop().start, place.stop)
        found.append(place)
    return found
