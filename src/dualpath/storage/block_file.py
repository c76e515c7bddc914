"""The bytes of one stored Full Block: a 4 KiB header, then the payload.

Header, little-endian, zero-padded to 4096 bytes so that the payload is aligned for direct I/O:

====== ===== =========================================================
offset bytes field
====== ===== =========================================================
0      8     magic ``DUALPATH``
8      4     format version
12     4     bytes of this header (4096)
16     8     payload length in bytes
24     32    block key
56     16    namespace digest, ASCII
72     16    XXH3-128 of the payload
88     32    key of the block before it in its chain, zero if not known
120    16    tenant tag, ASCII, zero if there is none
136    16    XXH3-128 of bytes 0..135
====== ===== =========================================================

XXH3 finds torn, short and flipped data at memory speed; it is no defence against somebody who
writes false blocks on purpose.  Everything here is pure.
"""

import struct

import msgspec
import xxhash

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin

HEADER_BYTES = 4096
FORMAT_VERSION = 2
_MAGIC = b"DUALPATH"
_FIELDS = struct.Struct("<8sIIQ32s16s16s32s16s")
_CHECKSUM_BYTES = 16

#: Why a block is not good; these are the reasons a ``ReadOutcome`` carries.
MISSING = "missing"
SHORT = "short"
WRONG_KEY = "wrong key"
WRONG_NAMESPACE = "wrong namespace"
WRONG_LENGTH = "wrong length"
BAD_HEADER = "bad header"
CHECKSUM = "checksum"


class BlockHeader(msgspec.Struct, frozen=True):
    """What a header says about its block; ``payload_checksum`` is 16 bytes."""

    version: int
    key: BlockKey
    payload_bytes: int
    namespace_digest: str
    payload_checksum: bytes
    origin: BlockOrigin


def payload_checksum(payload: memoryview | bytes) -> bytes:
    """Return the XXH3-128 of a payload."""
    return xxhash.xxh3_128_digest(payload)


def encode_header(
    key: BlockKey,
    namespace_digest: str,
    payload: memoryview | bytes,
    origin: BlockOrigin = UNKNOWN_ORIGIN,
) -> bytes:
    """Return the 4096 header bytes of a block; ``origin`` is its own.

    Raises ``ValueError`` unless the key has 32 bytes and the digest 16 characters.
    """
    digest = namespace_digest.encode("ascii")
    if len(key) != 32 or len(digest) != 16:
        raise ValueError(
            f"key of {len(key)} bytes and digest of {len(digest)} characters: 32 and 16 are needed"
        )
    length = memoryview(payload).nbytes
    checksum, tenant = payload_checksum(payload), origin.tenant.encode("ascii")
    fields = _FIELDS.pack(
        *(_MAGIC, FORMAT_VERSION, HEADER_BYTES, length, key, digest, checksum),
        *(origin.parent, tenant),
    )
    return (fields + xxhash.xxh3_128_digest(fields)).ljust(HEADER_BYTES, b"\0")


def decode_header(header: memoryview | bytes) -> BlockHeader | None:
    """Return the header's fields, or None if it is no intact header of this format version."""
    raw = bytes(header[: _FIELDS.size + _CHECKSUM_BYTES])
    if len(raw) < _FIELDS.size + _CHECKSUM_BYTES:
        return None
    fields, checksum = raw[: _FIELDS.size], raw[_FIELDS.size :]
    magic, version, header_bytes, length, key, digest, payload_sum, parent, tenant = _FIELDS.unpack(
        fields
    )
    intact = magic == _MAGIC and xxhash.xxh3_128_digest(fields) == checksum
    if not intact or version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return None
    origin = BlockOrigin(
        parent if any(parent) else b"", tenant.decode("ascii", "replace") if any(tenant) else ""
    )
    return BlockHeader(version, key, length, digest.decode("ascii", "replace"), payload_sum, origin)


def defect(
    key: BlockKey, namespace_digest: str, header: memoryview | bytes, payload: memoryview | bytes
) -> str | None:
    """Return why the block as read is not the one asked for, or None if it is.

    ``payload`` has the length the reader expects.
    """
    found = decode_header(header)
    if found is None:
        return BAD_HEADER
    if found.key != key:
        return WRONG_KEY
    if found.namespace_digest != namespace_digest:
        return WRONG_NAMESPACE
    if found.payload_bytes != memoryview(payload).nbytes:
        return WRONG_LENGTH
    if found.payload_checksum != payload_checksum(payload):
        return CHECKSUM
    return None
