"""The on-disk format finds whatever is wrong with a block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockOrigin, tenant_tag
from dualpath.storage import block_file

KEY = bytes(range(32))
DIGEST = "0123456789abcdef"
PAYLOAD = bytes(range(256)) * 16
ORIGIN = BlockOrigin(bytes(range(1, 33)), tenant_tag("a tenant's salt"))


def header() -> bytes:
    return block_file.encode_header(KEY, DIGEST, PAYLOAD, ORIGIN)


def test_a_header_says_what_was_stored() -> None:
    found = block_file.decode_header(header())
    assert found is not None
    assert (found.key, found.payload_bytes, found.namespace_digest) == (KEY, 4096, DIGEST)
    assert found.origin == ORIGIN
    assert len(header()) == block_file.HEADER_BYTES
    assert block_file.defect(KEY, DIGEST, header(), PAYLOAD) is None


def test_where_a_block_comes_from_need_not_be_known() -> None:
    found = block_file.decode_header(block_file.encode_header(KEY, DIGEST, PAYLOAD))
    assert found is not None
    assert found.origin == UNKNOWN_ORIGIN


@given(position=st.integers(0, 151), bit=st.integers(0, 7))
def test_every_flipped_header_bit_is_found(position: int, bit: int) -> None:
    damaged = bytearray(header())
    damaged[position] ^= 1 << bit
    assert block_file.defect(KEY, DIGEST, bytes(damaged), PAYLOAD) == "bad header"


@given(position=st.integers(0, len(PAYLOAD) - 1), bit=st.integers(0, 7))
def test_every_flipped_payload_bit_is_found(position: int, bit: int) -> None:
    damaged = bytearray(PAYLOAD)
    damaged[position] ^= 1 << bit
    assert block_file.defect(KEY, DIGEST, header(), bytes(damaged)) == "checksum"


@pytest.mark.parametrize(
    ("key", "digest", "payload", "reason"),
    [
        (bytes(32), DIGEST, PAYLOAD, "wrong key"),
        (KEY, "f" * 16, PAYLOAD, "wrong namespace"),
        (KEY, DIGEST, PAYLOAD[:-1], "wrong length"),
    ],
)
def test_an_intact_block_of_another_kind_is_refused(
    key: bytes, digest: str, payload: bytes, reason: str
) -> None:
    assert block_file.defect(key, digest, header(), payload) == reason


def test_another_format_version_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    old = header()
    monkeypatch.setattr(block_file, "FORMAT_VERSION", 3)
    assert block_file.decode_header(old) is None


def test_keys_and_digests_have_fixed_sizes() -> None:
    with pytest.raises(ValueError, match="32 and 16"):
        block_file.encode_header(b"short", DIGEST, PAYLOAD)
