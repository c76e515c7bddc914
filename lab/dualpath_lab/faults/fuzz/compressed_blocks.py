"""Malformed stored blocks, compressed."""

from dualpath.storage.block_file import BlockCodec, Compression, PlainBlocks, Sections
from dualpath.storage.compression import CompressedBlocks, Compressor
from dualpath_lab.faults.fuzz.files import BlockSubject
from dualpath_lab.faults.fuzz.inputs import Inputs

#: Small blocks save too little with the alignment of an engine's.
_PAD_BYTES = 64


class CompressedBlockSubject(BlockSubject):
    """Compressed blocks; in some, what was compressed is damaged below intact checksums."""

    fields_bytes = 272

    def form(self, digest: str, inputs: Inputs) -> BlockCodec:
        """See ``BlockSubject``."""
        inner = PlainBlocks(digest)
        compressor = Compressor(_PAD_BYTES) if inputs.chance(0.6) else _Damaging(inputs)
        return CompressedBlocks(inner, compressor)

    def payload(self, inputs: Inputs) -> bytes:
        """Return bytes of which a quarter of the bits is random."""
        return bytes(each & 3 for each in super().payload(inputs))


class _Damaging(Compressor):
    """Damages the stored sections before the header's checksums are computed."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(_PAD_BYTES)
        self._inputs = inputs

    def compressed(self, payload: Sections) -> tuple[Sections, Compression] | None:
        found = super().compressed(payload)
        assert found is not None, "the payload can be compressed"
        stored, how = found
        head = self._inputs.damaged(b"".join(stored.head))
        return Sections([memoryview(head)], stored.tail), how
