"""The on-disk format detects every defect of a block."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockGeometry, BlockOrigin, tenant_tag
from dualpath.storage import block_file
from dualpath.storage import block_file as block_header
from dualpath.storage.block_file import FileOrder, PlainBlocks, Sections

KEY = bytes(range(32))
DIGEST = "0123456789abcdef"
PAYLOAD = bytes(range(256)) * 16
TAIL = bytes(range(255, -1, -1))
ORIGIN = BlockOrigin(bytes(range(1, 33)), tenant_tag("a tenant's salt"))
FORM = PlainBlocks(DIGEST)
WHOLE = Sections([PAYLOAD[:1000], PAYLOAD[1000:]], [TAIL])


def header() -> bytes:
    return block_file.encode_header(KEY, DIGEST, WHOLE, ORIGIN)


def defect(payload: Sections, key: bytes = KEY, digest: str = DIGEST) -> str | None:
    return block_file.defect(key, digest, header(), payload)


def damaged(content: bytes, position: int, bit: int = 0) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def test_a_header_describes_the_stored_block() -> None:
    found = block_header.decode_header(header())
    assert found is not None
    assert (found.key, found.namespace_digest) == (KEY, DIGEST)
    assert (found.payload_bytes, found.tail_bytes) == (4096 + 256, 256)
    assert found.origin == ORIGIN
    assert len(header()) == block_header.HEADER_BYTES
    assert defect(WHOLE) is None


def test_the_origin_of_a_block_may_be_unknown() -> None:
    found = block_header.decode_header(block_file.encode_header(KEY, DIGEST, WHOLE))
    assert found is not None
    assert found.origin == UNKNOWN_ORIGIN


def test_the_division_of_memory_does_not_change_the_file() -> None:
    assert defect(Sections([PAYLOAD], [TAIL[:3], TAIL[3:]])) is None


@given(position=st.integers(0, 175), bit=st.integers(0, 7))
def test_every_flipped_header_bit_is_found(position: int, bit: int) -> None:
    found = block_file.defect(KEY, DIGEST, damaged(header(), position, bit), WHOLE)
    assert found == "bad header"


@given(position=st.integers(0, len(PAYLOAD) - 1), bit=st.integers(0, 7))
def test_every_flipped_payload_bit_is_found(position: int, bit: int) -> None:
    assert defect(Sections([damaged(PAYLOAD, position, bit)], [TAIL])) == "checksum"


@given(position=st.integers(0, len(TAIL) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_tail_affects_only_reads_of_the_tail(position: int, bit: int) -> None:
    tail = damaged(TAIL, position, bit)
    assert defect(Sections([PAYLOAD], [tail])) == "checksum"
    assert defect(Sections([PAYLOAD], None)) is None


@pytest.mark.parametrize(
    ("key", "digest", "payload", "reason"),
    [
        (bytes(32), DIGEST, WHOLE, "wrong key"),
        (KEY, "f" * 16, WHOLE, "wrong namespace"),
        (KEY, DIGEST, Sections([PAYLOAD[:-1]], [TAIL]), "wrong length"),
        (KEY, DIGEST, Sections([PAYLOAD], [TAIL[:-1]]), "wrong length"),
        (KEY, DIGEST, Sections([PAYLOAD + TAIL]), "wrong length"),
        (KEY, DIGEST, Sections([PAYLOAD + TAIL], None), "wrong length"),
    ],
)
def test_an_intact_block_of_another_kind_is_refused(
    key: bytes, digest: str, payload: Sections, reason: str
) -> None:
    assert defect(payload, key, digest) == reason


def test_another_format_version_is_distinguished_from_a_bad_header() -> None:
    fields = header()[:8] + (6).to_bytes(4, "little") + header()[12:160]
    later = (fields + xxhash.xxh3_128_digest(fields)).ljust(4096, b"\0")
    assert block_header.decode_header(later) is None
    assert block_file.defect(KEY, DIGEST, later, WHOLE) == "format version"


def version_1(payload: bytes) -> bytes:
    """The first 4096 bytes of a block of format version 1."""
    fields = struct.pack(
        "<8sIIQ32s16s16s",
        *(b"DUALPATH", 1, 4096, len(payload), KEY, DIGEST.encode()),
        xxhash.xxh3_128_digest(payload),
    )
    return (fields + xxhash.xxh3_128_digest(fields)).ljust(4096, b"\0")


def test_version_1_is_distinguished_from_a_bad_header_also_if_short() -> None:
    old = version_1(PAYLOAD)
    assert block_file.defect(KEY, DIGEST, old, WHOLE) == "format version"
    assert (
        block_file.defect_of_length(FORM.verifier(WHOLE), KEY, old, WHOLE, 10) == "format version"
    )
    assert block_file.defect_of_length(FORM.verifier(WHOLE), KEY, header(), WHOLE, 10) == "short"
    assert block_file.defect(KEY, DIGEST, damaged(old, 20), WHOLE) == "bad header"


@given(position=st.integers(0, 4096 + 4096 + 255))
def test_a_complete_file_is_verified_by_its_header(position: int) -> None:
    content = header() + PAYLOAD + TAIL
    assert block_file.defect_of_file(FORM, KEY, content) is None
    reason = block_file.defect_of_file(FORM, KEY, damaged(content, position))
    in_padding = 176 <= position < 4096
    assert reason == (None if in_padding else "bad header" if position < 4096 else "checksum")
    assert block_file.defect_of_file(FORM, KEY, content[:-1]) == "wrong length"
    assert block_file.defect_of_file(FORM, KEY, content[:4097]) == "wrong length"


def test_keys_and_digests_have_fixed_sizes() -> None:
    with pytest.raises(ValueError, match="32 bytes and 16 characters"):
        block_file.encode_header(b"short", DIGEST, WHOLE)


def test_window_layers_come_last_in_a_file_and_neighbours_in_one_piece() -> None:
    geometry = BlockGeometry(1, ((1, 2), (4,), (8,), (16,), (32,)), (0, 0, 5, 0, 7))
    block = memoryview(bytes(range(63)))
    sections = FileOrder(geometry).of(block)
    assert [bytes(b) for b in sections.head] == [bytes(range(7)), bytes(range(15, 31))]
    assert sections.tail is not None
    assert [bytes(b) for b in sections.tail] == [bytes(range(7, 15)), bytes(range(31, 63))]
    assert FileOrder(geometry).of(block, whole=False) == (sections.head, None)


def test_without_window_layers_a_file_is_the_block() -> None:
    block = memoryview(bytes(8))
    order = FileOrder(BlockGeometry.uniform(4, 1, 2))
    assert order.of(block) == ([block], [])
    assert order.of(block, whole=False) == ([block], None)
