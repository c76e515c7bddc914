"""Compressed blocks hold any bytes, and no flipped bit of a file goes unnoticed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.blocks import BlockOrigin, Protection, tenant_tag
from dualpath.storage.block_file import (
    HEADER_BYTES,
    BlockCodec,
    PlainBlocks,
    Sections,
    decode_header,
    defect_of_file,
    defect_of_length,
    is_compressed,
)
from dualpath.storage.compression import CHUNK_BYTES, CompressedBlocks, Compressor
from dualpath.storage.sealed_blocks import KeyRing, SealedBlocks

pytest.importorskip("backports.zstd")

KEY = bytes(range(32))
DIGEST = "0123456789abcdef"
ORIGIN = BlockOrigin(bytes(range(1, 33)), tenant_tag("a tenant's salt"))
#: End of the header fields of a compressed block; the zeros after it are not read.
FIELDS_BYTES = 272
KEYS = KeyRing("0" * 64, "a test")

#: Sections as lists of buffers, of which some can be compressed and some cannot.
BUFFER = st.one_of(
    st.binary(max_size=300),
    st.tuples(st.binary(min_size=1, max_size=4), st.integers(0, 900)).map(lambda x: x[0] * x[1]),
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 3000)).map(
        lambda x: np.random.default_rng(x[0]).integers(0, 5, x[1], np.uint8).tobytes()
    ),
)
SECTION = st.lists(BUFFER, min_size=1, max_size=3)
INNER = st.sampled_from(
    [
        PlainBlocks(DIGEST),
        *(SealedBlocks(DIGEST, protection, KEYS) for protection in Protection),
    ]
)


def compressing(inner: BlockCodec) -> CompressedBlocks:
    return CompressedBlocks(inner, Compressor(pad_bytes=64))


def read(
    codec: BlockCodec, file: bytes, head: list[bytes], tail: list[bytes] | None
) -> tuple[str | None, list[bytes]]:
    """Read a file into buffers of these lengths; return the defect, and what is in the buffers."""
    sizes = [len(buffer) for buffer in (*head, *(tail or ()))]
    memory = [memoryview(bytearray(size)) for size in sizes]
    rest = file[HEADER_BYTES:]
    arrived_bytes = min(len(rest), sum(sizes))
    for buffer in memory:
        piece, rest = rest[: buffer.nbytes], rest[buffer.nbytes :]
        buffer[: len(piece)] = piece
    payload = Sections(memory[: len(head)], None if tail is None else memory[len(head) :])
    header = file[:HEADER_BYTES]
    reason = defect_of_length(codec.verifier(payload), KEY, header, payload, arrived_bytes)
    return reason, [bytes(buffer) for buffer in memory]


@given(INNER, SECTION, st.one_of(st.just([b""]), SECTION))
def test_any_bytes_are_read_as_they_were_written(
    inner: BlockCodec, head: list[bytes], tail: list[bytes]
) -> None:
    file = b"".join(compressing(inner).encoded(KEY, Sections(head, tail), ORIGIN))
    reader = CompressedBlocks(inner)
    assert len(file) <= HEADER_BYTES + sum(map(len, head + tail))
    assert read(reader, file, head, tail) == (None, head + tail)
    assert read(reader, file, head, None) == (None, head)
    assert defect_of_file(reader, KEY, file) is None
    header = decode_header(file[:HEADER_BYTES])
    assert header is not None
    assert header.origin == ORIGIN


@pytest.mark.parametrize("width", [1, 2, 4])
def test_numbers_of_each_width_are_split_and_joined(width: int) -> None:
    """Also where buffers are longer than a chunk and do not end with one."""
    rng = np.random.default_rng(1)
    buffers = []
    for size in (CHUNK_BYTES + 4 * 1234, 4 * 777):
        content = rng.integers(0, 256, size, np.uint8)
        content[width - 1 :: width] = rng.integers(60, 64, size // width)
        buffers.append(content.tobytes())
    codec = compressing(PlainBlocks(DIGEST))
    file = b"".join(codec.encoded(KEY, Sections(buffers), ORIGIN))
    assert len(file) < sum(map(len, buffers)) * (width - 0.7) / width + HEADER_BYTES
    assert read(codec, file, buffers, []) == (None, buffers)


HEAD = [np.random.default_rng(2).integers(0, 5, 900, np.uint8).tobytes(), b"head" * 100]
TAIL = [np.random.default_rng(3).integers(0, 5, 600, np.uint8).tobytes()]
INNER_OF: dict[str, BlockCodec] = {
    "plain": PlainBlocks(DIGEST),
    "sealed": SealedBlocks(DIGEST, Protection.ENCRYPTED, KEYS),
}
FILES = {
    kind: b"".join(compressing(inner).encoded(KEY, Sections(HEAD, TAIL), ORIGIN))
    for kind, inner in INNER_OF.items()
}


@given(st.sampled_from(["plain", "sealed"]), st.integers(min_value=0), st.booleans())
def test_any_flipped_bit_is_found(kind: str, place: int, whole: bool) -> None:
    file = bytearray(FILES[kind])
    assert is_compressed(bytes(file[:HEADER_BYTES]))
    fields_bits = 8 * (FIELDS_BYTES if kind == "sealed" else 176)
    bit = place % (fields_bits + 8 * (len(file) - HEADER_BYTES))
    if kind == "plain" and bit < fields_bits:
        # The fields of a seal, between the two, are not those of a plain block.
        bit = bit if bit < 8 * 176 else bit + 8 * 60
    if bit >= fields_bits:
        bit += 8 * HEADER_BYTES - fields_bits
    file[bit // 8] ^= 1 << bit % 8
    codec = CompressedBlocks(INNER_OF[kind])
    assert defect_of_file(codec, KEY, bytes(file)) is not None
    reason, memory = read(codec, bytes(file), HEAD, TAIL if whole else None)
    header = decode_header(bytes(file[:HEADER_BYTES]))
    in_tail = (
        bit // 8 >= HEADER_BYTES
        and header is not None
        and (bit // 8 - HEADER_BYTES >= header.payload_bytes - header.tail_bytes)
    )
    if in_tail and not whole:
        assert (reason, memory) == (None, HEAD), "the tail was not read"
    else:
        assert reason is not None
