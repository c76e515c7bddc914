"""The bytes of one stored Full Block: a 4 KiB header, then the payload.

Header, little-endian, zero-padded to 4096 bytes so that the payload is aligned for direct I/O:

====== ===== =========================================================
offset bytes field
====== ===== =========================================================
0      8     magic ``DUALPATH``
8      4     format version
12     4     bytes of this header (4096)
16     8     payload length in bytes, head and tail
24     32    block key
56     16    namespace digest, ASCII
72     16    XXH3-128 of the payload's head
88     32    key of the block before it in its chain, zero if not known
120    16    tenant tag, ASCII, zero if there is none
136    8     bytes of the payload's tail
144    16    XXH3-128 of the payload's tail
160    16    XXH3-128 of bytes 0..159
====== ===== =========================================================

The payload is the head of the block, then its tail, the window layers (``storage.sections``).

XXH3 finds torn, short and flipped data at memory speed; it is no defence against somebody who
writes false blocks on purpose.  Everything here is pure.
"""

import struct
from collections.abc import Sequence

import msgspec
import xxhash

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.storage.sections import Buffer, Sections

HEADER_BYTES = 4096
FORMAT_VERSION = 2
_MAGIC = b"DUALPATH"
_FIELDS = struct.Struct("<8sIIQ32s16s16s32s16sQ16s")
_CHECKSUM_BYTES = 16
#: What the checksum of a header of version 1 covered.
_VERSION_1_BYTES = 88

#: Why a block is not good; these are the reasons a ``ReadOutcome`` carries.
MISSING = "missing"
SHORT = "short"
WRONG_KEY = "wrong key"
WRONG_NAMESPACE = "wrong namespace"
WRONG_LENGTH = "wrong length"
BAD_HEADER = "bad header"
#: A block of another release of this format: nothing is wrong with it, so it stays where it is.
OTHER_FORMAT = "format version"
CHECKSUM = "checksum"


class BlockHeader(msgspec.Struct, frozen=True):
    """What a header says about its block; checksums are 16 bytes."""

    version: int
    key: BlockKey
    payload_bytes: int
    tail_bytes: int
    namespace_digest: str
    head_checksum: bytes
    tail_checksum: bytes
    origin: BlockOrigin


def checksum(buffers: Sequence[Buffer]) -> bytes:
    """Return the XXH3-128 of buffers one after the other."""
    if len(buffers) == 1:
        return xxhash.xxh3_128_digest(buffers[0])
    hasher = xxhash.xxh3_128()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.digest()


def encode_header(
    key: BlockKey,
    namespace_digest: str,
    payload: Sections,
    origin: BlockOrigin = UNKNOWN_ORIGIN,
) -> bytes:
    """Return the 4096 header bytes of a whole block; ``origin`` is its own.

    Raises ``ValueError`` unless the key has 32 bytes and the digest 16 characters.
    """
    digest = namespace_digest.encode("ascii")
    if len(key) != 32 or len(digest) != 16:
        raise ValueError(
            f"key of {len(key)} bytes and digest of {len(digest)} characters: 32 and 16 are needed"
        )
    tail = payload.tail or ()
    fields = _FIELDS.pack(
        *(_MAGIC, FORMAT_VERSION, HEADER_BYTES, payload.size_bytes, key, digest),
        *(checksum(payload.head), origin.parent, origin.tenant.encode("ascii")),
        *(Sections(tail).size_bytes, checksum(tail)),
    )
    return (fields + xxhash.xxh3_128_digest(fields)).ljust(HEADER_BYTES, b"\0")


def decode_header(header: memoryview | bytes) -> BlockHeader | None:
    """Return the header's fields, or None if it is no intact header of this format version."""
    if not _is_intact(header, _FIELDS.size):
        return None
    fields = _FIELDS.unpack(bytes(header[: _FIELDS.size]))
    _, version, header_bytes, length, key, digest, head_sum, parent, tenant, tail, tail_sum = fields
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return None
    origin = BlockOrigin(
        parent if any(parent) else b"", tenant.decode("ascii", "replace") if any(tenant) else ""
    )
    digest_text = digest.decode("ascii", "replace")
    return BlockHeader(version, key, length, tail, digest_text, head_sum, tail_sum, origin)


def _is_intact(header: memoryview | bytes, fields_bytes: int) -> bool:
    """Whether these are fields of that many bytes, and their checksum."""
    raw = bytes(header[: fields_bytes + _CHECKSUM_BYTES])
    fields, found = raw[:fields_bytes], raw[fields_bytes:]
    return fields[: len(_MAGIC)] == _MAGIC and xxhash.xxh3_128_digest(fields) == found


def defect(
    key: BlockKey, namespace_digest: str, header: memoryview | bytes, payload: Sections
) -> str | None:
    """Return why the block as read is not the one asked for, or None if it is.

    ``payload`` has the lengths the reader expects; of a tail that was not read nothing is said.
    """
    found = decode_header(header)
    if found is None:
        is_other = _is_intact(header, _FIELDS.size) or _is_intact(header, _VERSION_1_BYTES)
        return OTHER_FORMAT if is_other else BAD_HEADER
    if found.key != key:
        return WRONG_KEY
    if found.namespace_digest != namespace_digest:
        return WRONG_NAMESPACE
    head, tail = payload
    tail_bytes = found.tail_bytes if tail is None else Sections(tail).size_bytes
    sizes = (found.payload_bytes - found.tail_bytes, found.tail_bytes)
    if sizes != (Sections(head).size_bytes, tail_bytes):
        return WRONG_LENGTH
    if found.head_checksum != checksum(head):
        return CHECKSUM
    if tail is not None and found.tail_checksum != checksum(tail):
        return CHECKSUM
    return None


def defect_of_length(
    key: BlockKey,
    namespace_digest: str,
    header: memoryview | bytes,
    payload: Sections,
    arrived_bytes: int,
) -> str | None:
    """Return the same of a file of which ``arrived_bytes`` of the payload have come."""
    if arrived_bytes >= payload.size_bytes:
        return defect(key, namespace_digest, header, payload)
    # What says that it is of another format may be shorter than a block of this one.
    empty = Sections((), ())
    other = defect(key, namespace_digest, header, empty) == OTHER_FORMAT
    return OTHER_FORMAT if other else SHORT


def defect_of_file(key: BlockKey, namespace_digest: str, content: bytes) -> str | None:
    """Return the same of a whole file, by whoever does not know the block's geometry."""
    header, payload = content[:HEADER_BYTES], memoryview(content)[HEADER_BYTES:]
    found = decode_header(header)
    head_bytes = max(payload.nbytes - (0 if found is None else found.tail_bytes), 0)
    sections = Sections([payload[:head_bytes]], [payload[head_bytes:]])
    return defect(key, namespace_digest, header, sections)
