"""Sealed blocks authenticate every bit of the block, its key and namespace, and the writer."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.blocks import BlockOrigin, Protection, tenant_tag
from dualpath.core.errors import ConfigError
from dualpath.storage.block_file import (
    HEADER_BYTES,
    BlockCodec,
    PlainBlocks,
    Sections,
    decode_header,
    defect_of_file,
    packed_header,
)
from dualpath.storage.sealed_blocks import KeyRing, SealedBlocks

KEY = bytes(range(32))
DIGEST = "0123456789abcdef"
HEAD, TAIL = bytes(range(256)) * 4, bytes(range(255, -1, -1))
ORIGIN = BlockOrigin(bytes(range(1, 33)), tenant_tag("a tenant's salt"))
OLD, NEW = "0" * 64, "1" * 64
#: End of the header fields; the zeros after it are not authenticated and not read.
FIELDS_BYTES = 236
KINDS = st.sampled_from(list(Protection))


def sealing(protection: Protection, keys: str = OLD) -> SealedBlocks:
    return SealedBlocks(DIGEST, protection, KeyRing(keys, "a test"))


def stored(form: BlockCodec, origin: BlockOrigin = ORIGIN) -> bytes:
    payload = Sections([HEAD[:100], HEAD[100:]], [TAIL])
    return b"".join(form.encoded(KEY, payload, origin))


def read(form: BlockCodec, file: bytes, *, whole: bool = True) -> tuple[str | None, bytes]:
    """Return the defect, and the memory after the read."""
    head_end = HEADER_BYTES + len(HEAD)
    head, tail = bytearray(file[HEADER_BYTES:head_end]), bytearray(file[head_end:])
    reason = form.defect(
        KEY,
        file[:HEADER_BYTES],
        Sections([memoryview(head)], [memoryview(tail)] if whole else None),
    )
    return reason, bytes(head + tail)


@given(KINDS)
def test_blocks_are_readable_with_the_key(protection: Protection) -> None:
    form = sealing(protection)
    assert read(form, stored(form)) == (None, HEAD + TAIL)
    reason, memory = read(form, stored(form), whole=False)
    assert (reason, memory[: len(HEAD)]) == (None, HEAD)
    assert defect_of_file(form, KEY, stored(form)) is None


@given(KINDS, st.booleans())
def test_a_block_is_opened_by_the_tenant_in_its_header(
    protection: Protection, names_tenant: bool
) -> None:
    """Older engines sealed blocks of generated tokens without a tenant."""
    origin = BlockOrigin(ORIGIN.parent, ORIGIN.tenant if names_tenant else "")
    file = stored(sealing(protection), origin)
    assert read(sealing(protection), file) == (None, HEAD + TAIL)
    header = decode_header(file[:HEADER_BYTES])
    assert header is not None
    assert header.origin == origin


def test_encrypted_blocks_do_not_contain_their_payload() -> None:
    file = stored(sealing(Protection.ENCRYPTED))
    windows = {(HEAD + TAIL)[i : i + 16] for i in range(len(HEAD + TAIL) - 15)}
    payload = file[HEADER_BYTES:]
    assert not any(payload[i : i + 16] in windows for i in range(len(payload) - 15))
    clear = stored(sealing(Protection.AUTHENTICATED))
    assert clear[HEADER_BYTES:] == HEAD + TAIL


@given(KINDS, st.integers(0, FIELDS_BYTES + len(HEAD + TAIL) - 1), st.integers(0, 7))
def test_every_flipped_bit_is_found(protection: Protection, place: int, bit: int) -> None:
    form = sealing(protection)
    changed = bytearray(stored(form))
    changed[place if place < FIELDS_BYTES else place - FIELDS_BYTES + HEADER_BYTES] ^= 1 << bit
    reason, _ = read(form, bytes(changed))
    assert reason == ("bad header" if place < FIELDS_BYTES else "not authentic")


@given(
    KINDS,
    st.sampled_from(["parent", "tenant", "salt", "head_checksum", "tail_checksum", "kind"]),
)
def test_a_forged_header_with_a_valid_checksum_is_rejected(
    protection: Protection, field: str
) -> None:
    form = sealing(protection)
    file = stored(form)
    header = decode_header(file)
    assert header is not None
    assert header.seal is not None
    origin, seal, replace = header.origin, header.seal, msgspec.structs.replace
    forged = {
        "parent": replace(header, origin=replace(origin, parent=KEY)),
        "tenant": replace(header, origin=replace(origin, tenant="")),
        "salt": replace(header, seal=replace(seal, salt=bytes(32))),
        "kind": replace(header, seal=replace(seal, kind=3 - seal.kind)),
        "head_checksum": replace(header, head_checksum=bytes(16)),
        "tail_checksum": replace(header, tail_checksum=bytes(16)),
    }[field]
    reason, _ = read(form, packed_header(forged) + file[HEADER_BYTES:])
    assert reason == "not authentic"


@given(KINDS)
def test_parts_of_two_writes_do_not_make_a_block(protection: Protection) -> None:
    form = sealing(protection)
    one, other = decode_header(stored(form)), stored(form)
    assert one is not None
    second = decode_header(other)
    assert second is not None
    mixed = msgspec.structs.replace(second, head_checksum=one.head_checksum)
    assert read(form, packed_header(mixed) + other[HEADER_BYTES:])[0] == "not authentic"


@given(KINDS)
def test_without_the_key_a_block_is_neither_read_nor_forged(protection: Protection) -> None:
    ours, theirs = sealing(protection, OLD), sealing(protection, NEW)
    assert read(ours, stored(theirs))[0] == "storage key"
    assert read(ours, stored(PlainBlocks(DIGEST)))[0] == "not authentic"
    assert read(PlainBlocks(DIGEST), stored(ours))[0] == "format version"
    file = stored(theirs)
    header, mine = decode_header(file), decode_header(stored(ours))
    assert header is not None
    assert header.seal is not None
    assert mine is not None
    assert mine.seal is not None
    seal = msgspec.structs.replace(header.seal, key_id=mine.seal.key_id)
    posing = packed_header(msgspec.structs.replace(header, seal=seal))
    assert read(ours, posing + file[HEADER_BYTES:])[0] == "not authentic"


@given(KINDS)
def test_a_new_key_writes_and_an_old_one_is_still_read(protection: Protection) -> None:
    before, both = sealing(protection, OLD), sealing(protection, f"{NEW}  # of today\n{OLD}\n")
    after = sealing(protection, NEW)
    assert read(both, stored(before)) == (None, HEAD + TAIL)
    assert read(after, stored(both)) == (None, HEAD + TAIL)
    assert read(before, stored(both))[0] == "storage key"
    assert read(after, stored(before))[0] == "storage key"


def test_no_two_writes_share_a_key() -> None:
    form = sealing(Protection.ENCRYPTED)
    headers = [decode_header(stored(form)) for _ in range(64)]
    salts = {header.seal.salt for header in headers if header and header.seal}
    assert len(salts) == 64
    key = KeyRing(OLD, "a test").newest
    asked = [(kind, tenant, salt) for kind in (1, 2) for tenant in ("", "a") for salt in salts]
    assert len({key.block_key(*one) for one in asked}) == len(asked)


def test_writing_does_not_change_the_payload() -> None:
    payload = Sections([memoryview(bytearray(HEAD))], [memoryview(bytearray(TAIL))])
    sealing(Protection.ENCRYPTED).encoded(KEY, Sections(*payload))
    assert payload == Sections([HEAD], [TAIL])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has 0 characters, must have at least 64"),
        ("# nothing", "has 0 characters, must have at least 64"),
        (f"{OLD}\nshort", "has 5 characters, must have at least 64"),
        (f"{OLD}\n{OLD}", "has 2 storage keys, 1 of them different"),
    ],
)
def test_invalid_keys_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        KeyRing(text, "a test")
