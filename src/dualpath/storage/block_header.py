"""The header of one stored Full Block.

Little-endian, zero-padded to 4096 bytes so that the payload behind it is aligned for direct I/O:

====== ===== =========================================================
offset bytes field
====== ===== =========================================================
0      8     magic ``DUALPATH``
8      4     format version: 2 plain, 3 sealed
12     4     bytes of this header (4096)
16     8     payload length in bytes, head and tail
24     32    block key
56     16    namespace digest, ASCII
72     16    XXH3-128 of the payload's head; its tag in a sealed block
88     32    key of the block before it in its chain, zero if not known
120    16    tenant tag, ASCII, zero if there is none
136    8     bytes of the payload's tail
144    16    XXH3-128 of the payload's tail; its tag in a sealed block
160    16    XXH3-128 of bytes 0..159
176    4     sealed: 1 authenticated, 2 encrypted
180    8     sealed: name of the storage key
188    32    sealed: random bytes from which the block's own key is derived
220    16    sealed: XXH3-128 of bytes 176..219
====== ===== =========================================================

The header is never encrypted, so that the janitor needs no storage key.  Nothing here does I/O.
"""

import struct

import msgspec
import xxhash

from dualpath.core.blocks import BlockKey, BlockOrigin

HEADER_BYTES = 4096
PLAIN_VERSION = 2
SEALED_VERSION = 3
VERSIONS = (PLAIN_VERSION, SEALED_VERSION)
CHECKSUM_BYTES = 16
_MAGIC = b"DUALPATH"
_FIELDS = struct.Struct("<8sIIQ32s16s16s32s16sQ16s")
_SEAL = struct.Struct("<I8s32s")
_SEAL_AT = _FIELDS.size + CHECKSUM_BYTES
#: Offsets of the payload's checksums (of its tags in a sealed block).
_HEAD_SUM, _TAIL_SUM = slice(72, 88), slice(144, 160)
_VERSION = struct.Struct("<8xII")
#: Bytes covered by the checksum of a version 1 header.
_VERSION_1_BYTES = 88


class Seal(msgspec.Struct, frozen=True):
    """How a block is sealed: ``key_id`` (8 bytes) identifies the storage key, ``salt`` 32 bytes."""

    kind: int
    key_id: bytes
    salt: bytes


class BlockHeader(msgspec.Struct, frozen=True):
    """A decoded header; the checksums have 16 bytes and are GCM tags in a sealed block."""

    version: int
    key: BlockKey
    payload_bytes: int
    tail_bytes: int
    namespace_digest: str
    head_checksum: bytes
    tail_checksum: bytes
    origin: BlockOrigin
    seal: Seal | None = None


def packed_header(header: BlockHeader) -> bytes:
    """Return the 4096 bytes of a header.

    Raises ``ValueError`` unless the key has 32 bytes and the digest 16 characters.
    """
    digest = header.namespace_digest.encode("ascii")
    if len(header.key) != 32 or len(digest) != 16:
        raise ValueError(
            f"key of {len(header.key)} bytes and digest of {len(digest)} characters; must be 32 "
            "bytes and 16 characters"
        )
    origin = header.origin
    raw = _checked(
        _FIELDS.pack(
            *(_MAGIC, header.version, HEADER_BYTES, header.payload_bytes, header.key, digest),
            *(header.head_checksum, origin.parent, origin.tenant.encode("ascii")),
            *(header.tail_bytes, header.tail_checksum),
        )
    )
    if (seal := header.seal) is not None:
        raw += _checked(_SEAL.pack(seal.kind, seal.key_id, seal.salt))
    return raw.ljust(HEADER_BYTES, b"\0")


def decode_header(raw: memoryview | bytes) -> BlockHeader | None:
    """Return the header's fields, or None for a damaged header or an unsupported version."""
    if header_version(raw) not in VERSIONS:
        return None
    fields = _FIELDS.unpack(bytes(raw[: _FIELDS.size]))
    _, version, _, length, key, digest, head_sum, parent, tenant, tail, tail_sum = fields
    seal = None
    if version == SEALED_VERSION:
        if not _is_checked(raw, _SEAL_AT, _SEAL.size):
            return None
        seal = Seal(*_SEAL.unpack(bytes(raw[_SEAL_AT : _SEAL_AT + _SEAL.size])))
    origin = BlockOrigin(
        parent if any(parent) else b"", tenant.decode("ascii", "replace") if any(tenant) else ""
    )
    digest_text = digest.decode("ascii", "replace")
    return BlockHeader(version, key, length, tail, digest_text, head_sum, tail_sum, origin, seal)


def header_version(raw: memoryview | bytes) -> int | None:
    """Return the format version of a header, None if the bytes are not an intact header.

    0 stands for an intact header of another length.
    """
    if _is_checked(raw, 0, _FIELDS.size) or _is_checked(raw, 0, _VERSION_1_BYTES):
        version, header_bytes = _VERSION.unpack(bytes(raw[: _VERSION.size]))
        return int(version) if header_bytes == HEADER_BYTES else 0
    return None


def authenticated_fields(raw: memoryview | bytes) -> bytes:
    """Return the header bytes that a sealed block's tags authenticate: all except the tags."""
    content = bytes(raw[: _SEAL_AT + _SEAL.size])
    checks = (_HEAD_SUM, _TAIL_SUM, slice(_FIELDS.size, _SEAL_AT))
    ends = [place.stop for place in checks]
    starts = [*(place.start for place in checks), len(content)]
    return b"".join(content[start:end] for start, end in zip([0, *ends], starts, strict=True))


def _checked(fields: bytes) -> bytes:
    return fields + xxhash.xxh3_128_digest(fields)


def _is_checked(raw: memoryview | bytes, start: int, fields_bytes: int) -> bool:
    """Whether these bytes start with the magic and the fields at ``start`` match their checksum."""
    end = start + fields_bytes
    is_ours = bytes(raw[: len(_MAGIC)]) == _MAGIC
    found = bytes(raw[end : end + CHECKSUM_BYTES])
    return is_ours and found == xxhash.xxh3_128_digest(bytes(raw[start:end]))
