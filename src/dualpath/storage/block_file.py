"""Encodes and verifies the bytes of one stored Full Block: a header, then the payload.

The payload is the head of the block, then its tail, the window layers (``storage.sections``).

A plain block has checksums: XXH3 detects torn, truncated and flipped data at memory speed.  It
does not protect against someone who forges blocks; sealed blocks do (``storage.sealed_blocks``).
Nothing here does I/O.
"""

import logging
import re
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import xxhash

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockGeometry, BlockKey, BlockOrigin

# ------------------------------------------------------------------------------------ block header
# The header of one stored Full Block.
#
# Little-endian, zero-padded to 4096 bytes so that the payload behind it is aligned for direct I/O:
#
# ====== ===== =========================================================
# offset bytes field
# ====== ===== =========================================================
# 0      8     magic ``DUALPATH``
# 8      4     format version: 2 plain, 3 sealed, 4 compressed, 5 compressed and sealed
# 12     4     bytes of this header (4096)
# 16     8     payload length in bytes as stored, head and tail
# 24     32    block key
# 56     16    namespace digest, ASCII
# 72     16    XXH3-128 of the payload's head; its tag in a sealed block
# 88     32    key of the block before it in its chain, zero if not known
# 120    16    tenant tag, ASCII, zero if there is none
# 136    8     bytes of the payload's tail as stored
# 144    16    XXH3-128 of the payload's tail; its tag in a sealed block
# 160    16    XXH3-128 of bytes 0..159
# 176    4     sealed: 1 authenticated, 2 encrypted
# 180    8     sealed: name of the storage key
# 188    32    sealed: random bytes from which the block's own key is derived
# 220    16    sealed: XXH3-128 of bytes 176..219
# 236    4     compressed: codec, 1 (``storage.compression``)
# 240    8     compressed: payload length before compression, head and tail
# 248    8     compressed: bytes of the payload's tail before compression
# 256    16    compressed: XXH3-128 of bytes 236..255
# ====== ===== =========================================================
#
# The header is never encrypted, so that the janitor needs no storage key.  Nothing here does I/O.

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
PLAIN_VERSION = 2
SEALED_VERSION = 3
COMPRESSED_VERSION = 4
SEALED_COMPRESSED_VERSION = 5
VERSIONS = (PLAIN_VERSION, SEALED_VERSION, COMPRESSED_VERSION, SEALED_COMPRESSED_VERSION)
_SEALED = (SEALED_VERSION, SEALED_COMPRESSED_VERSION)
_COMPRESSED = (COMPRESSED_VERSION, SEALED_COMPRESSED_VERSION)
CHECKSUM_BYTES = 16
_MAGIC = b"DUALPATH"
#: A ``tenant_tag``.
_TENANT = re.compile(r"[0-9a-f]{16}")
_FIELDS = struct.Struct("<8sIIQ32s16s16s32s16sQ16s")
_SEAL = struct.Struct("<I8s32s")
_SEAL_AT = _FIELDS.size + CHECKSUM_BYTES
_COMPRESSION = struct.Struct("<IQQ")
_COMPRESSION_AT = _SEAL_AT + _SEAL.size + CHECKSUM_BYTES
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


class Compression(msgspec.Struct, frozen=True):
    """How a block is compressed: the codec's number, and its lengths before compression."""

    codec: int
    payload_bytes: int
    tail_bytes: int


class BlockHeader(msgspec.Struct, frozen=True):
    """A decoded header; the checksums have 16 bytes and are GCM tags in a sealed block.

    ``payload_bytes`` and ``tail_bytes`` are lengths as stored, and the checksums are those of the
    stored bytes.
    """

    key: BlockKey
    payload_bytes: int
    tail_bytes: int
    namespace_digest: str
    head_checksum: bytes
    tail_checksum: bytes
    origin: BlockOrigin
    seal: Seal | None = None
    compression: Compression | None = None

    @property
    def version(self) -> int:
        """The format version."""
        if self.compression is None:
            return PLAIN_VERSION if self.seal is None else SEALED_VERSION
        return COMPRESSED_VERSION if self.seal is None else SEALED_COMPRESSED_VERSION


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
    if (how := header.compression) is not None:
        raw = raw.ljust(_COMPRESSION_AT, b"\0")
        raw += _checked(_COMPRESSION.pack(how.codec, how.payload_bytes, how.tail_bytes))
    return raw.ljust(HEADER_BYTES, b"\0")


def decode_header(raw: memoryview | bytes) -> BlockHeader | None:
    """Return the header's fields, or None for a damaged header or an unsupported version."""
    if header_version(raw) not in VERSIONS:
        return None
    fields = _FIELDS.unpack(bytes(raw[: _FIELDS.size]))
    _, version, _, length, key, digest, head_sum, parent, tenant, tail, tail_sum = fields
    seal = compression = None
    if version in _SEALED:
        if not _is_checked(raw, _SEAL_AT, _SEAL.size):
            return None
        seal = Seal(*_SEAL.unpack(bytes(raw[_SEAL_AT : _SEAL_AT + _SEAL.size])))
    if version in _COMPRESSED:
        if not _is_checked(raw, _COMPRESSION_AT, _COMPRESSION.size):
            return None
        compression = Compression(*_COMPRESSION.unpack_from(raw, _COMPRESSION_AT))
    tag = tenant.decode("ascii", "replace")
    # Whoever wrote the block chose the tag; another text would end up in tables and logs.
    origin = BlockOrigin(parent if any(parent) else b"", tag if _TENANT.fullmatch(tag) else "")
    digest_text = digest.decode("ascii", "replace")
    sums = (head_sum, tail_sum)
    return BlockHeader(key, length, tail, digest_text, *sums, origin, seal, compression)


def header_version(raw: memoryview | bytes) -> int | None:
    """Return the format version of a header, None if the bytes are not an intact header.

    0 stands for an intact header of another length.
    """
    if _is_checked(raw, 0, _FIELDS.size) or _is_checked(raw, 0, _VERSION_1_BYTES):
        version, header_bytes = _VERSION.unpack(bytes(raw[: _VERSION.size]))
        return int(version) if header_bytes == HEADER_BYTES else 0
    return None


def is_compressed(header: memoryview | bytes) -> bool:
    """Whether this is the intact header of a compressed block."""
    return header_version(header) in _COMPRESSED


def authenticated_fields(raw: memoryview | bytes) -> bytes:
    """Return the header bytes that a sealed block's tags authenticate: all except the tags.

    Of a compressed block they end with the fields of its compression.
    """
    content = bytes(raw[: _SEAL_AT + _SEAL.size])
    checks = (_HEAD_SUM, _TAIL_SUM, slice(_FIELDS.size, _SEAL_AT))
    ends = [place.stop for place in checks]
    starts = [*(place.start for place in checks), len(content)]
    fields = b"".join(content[start:end] for start, end in zip([0, *ends], starts, strict=True))
    if is_compressed(raw):
        fields += bytes(raw[_COMPRESSION_AT : _COMPRESSION_AT + _COMPRESSION.size])
    return fields


def _checked(fields: bytes) -> bytes:
    return fields + xxhash.xxh3_128_digest(fields)


def _is_checked(raw: memoryview | bytes, start: int, fields_bytes: int) -> bool:
    """Whether these bytes start with the magic and the fields at ``start`` match their checksum."""
    end = start + fields_bytes
    is_ours = bytes(raw[: len(_MAGIC)]) == _MAGIC
    found = bytes(raw[end : end + CHECKSUM_BYTES])
    return is_ours and found == xxhash.xxh3_128_digest(bytes(raw[start:end]))


# ---------------------------------------------------------------------------------------- sections
# The order of layers in the file of a Full Block: window layers last.
#
# In DRAM a Full Block has its layers in model order.  A prompt that hits many blocks needs the KV
# of window layers (sliding-window attention) in the last few blocks only, and window layers
# alternate with full-attention layers: in model order, reading a block without them would take many
# small reads, over S3 many requests.  So the file has two sections, the *head* with the
# full-attention layers and the *tail* with the window layers, each in model order and with its own
# checksum.  A read of the head alone is one request for the beginning of the file, scattered into
# place by ``preadv``. A model without window layers has no tail, and its file has its layers in
# model order.

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


#: Reasons of a ``ReadOutcome``.
MISSING = "missing"
SHORT = "short"
WRONG_KEY = "wrong key"
WRONG_NAMESPACE = "wrong namespace"
WRONG_LENGTH = "wrong length"
BAD_HEADER = "bad header"
CHECKSUM = "checksum"
#: A sealed block that is damaged, or was not written with its storage key.
NOT_AUTHENTIC = "not authentic"
#: A block of another format version.
OTHER_FORMAT = "format version"
#: A block sealed with a storage key that this process does not have.
OTHER_STORAGE_KEY = "storage key"
#: A block of a codec that is unknown here, or that needs a library which is not installed.
OTHER_CODEC = "codec"
#: A compressed block whose content cannot be decompressed, or is not what was compressed.
DECOMPRESSION = "decompression"
#: The block may be intact but this process cannot read it: a read does not remove it, so that a
#: process with wrong keys destroys nothing.  It counts as absent, and a write replaces it.
UNREADABLE_HERE = frozenset({OTHER_FORMAT, OTHER_STORAGE_KEY, OTHER_CODEC})


class AbsentReports:
    """Logs stored blocks that count as absent because this process cannot read them.

    Only the first one is a warning: after the removal of a storage key there may be millions.
    """

    def __init__(self) -> None:
        self._warned = False

    def absent(self, name: str, reason: str) -> None:
        """Log one block."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(
            level,
            "cannot read stored block %s (%s): it and others like it count as absent, and are "
            "replaced when their prompts have been computed again",
            *(name, reason),
        )


class BlockCodec(Protocol):
    """Encodes and verifies the blocks of one namespace.

    ``has_keys``: whether it opens blocks with keys, which may be removed while blocks remain.
    """

    has_keys: bool

    def unreadable(self, header: memoryview | bytes) -> str | None:
        """Return why this process cannot read a block with this header, of ``UNREADABLE_HERE``.

        None if it may be able to; a read finds other defects.
        """
        ...

    def encoded(
        self,
        key: BlockKey,
        payload: Sections,
        origin: BlockOrigin = UNKNOWN_ORIGIN,
        compression: Compression | None = None,
    ) -> list[memoryview]:
        """Return the file of a block as buffers, the header first.

        ``compression``: how the payload was compressed, None if it was not.  The buffers are valid
        until the same thread calls again.
        """
        ...

    def defect(self, key: BlockKey, header: memoryview | bytes, payload: Sections) -> str | None:
        """Return why a block that was read is not valid, None if it is.

        ``payload`` has the lengths that the reader expects; a tail that was not read is not
        verified.  Encrypted blocks are decrypted in place, so ``payload`` must be writable.
        """
        ...

    def defect_of_compressed(
        self, key: BlockKey, header: memoryview | bytes, stored: Sections
    ) -> str | None:
        """Return the defect of a compressed block as it is stored, None if it is valid.

        ``stored`` is decrypted in place and not decompressed into anything.
        """
        ...

    def verifier(self, payload: Sections) -> "BlockVerifier":
        """Return a verifier of one block while its file is read into ``payload``."""
        ...


class BlockVerifier(Protocol):
    """Verifies one block while its file is being read."""

    def received(self, file_bytes: int) -> None:
        """Note that the file's first ``file_bytes`` are in memory; calls are optional."""
        ...

    def defect(self, key: BlockKey, header: memoryview | bytes) -> str | None:
        """Return ``BlockCodec.defect`` of the complete block; call it once."""
        ...


class DeferredVerifier:
    """See ``BlockVerifier``: verifies the block after it was read completely."""

    def __init__(self, codec: BlockCodec, payload: Sections) -> None:
        self._codec = codec
        self._payload = payload

    def received(self, file_bytes: int) -> None:
        """Do nothing."""

    def defect(self, key: BlockKey, header: memoryview | bytes) -> str | None:
        """Verify with the codec."""
        return self._codec.defect(key, header, self._payload)


class PlainBlocks:
    """See ``BlockCodec``: blocks in clear, with checksums."""

    has_keys = False

    def __init__(self, namespace_digest: str) -> None:
        self._digest = namespace_digest

    def unreadable(self, header: memoryview | bytes) -> str | None:
        """Compare the format version."""
        readable = header_version(header) in (None, PLAIN_VERSION, COMPRESSED_VERSION)
        return None if readable else OTHER_FORMAT

    def encoded(
        self,
        key: BlockKey,
        payload: Sections,
        origin: BlockOrigin = UNKNOWN_ORIGIN,
        compression: Compression | None = None,
    ) -> list[memoryview]:
        """Return header and payload."""
        header = encode_header(key, self._digest, payload, origin, compression)
        return [memoryview(header), *payload.buffers]

    def defect(self, key: BlockKey, header: memoryview | bytes, payload: Sections) -> str | None:
        """Compare checksums; the payload may be read-only."""
        return defect(key, self._digest, header, payload)

    def defect_of_compressed(
        self, key: BlockKey, header: memoryview | bytes, stored: Sections
    ) -> str | None:
        """Compare the checksums of the stored bytes."""
        return PlainVerifier(self._digest, stored, compressed=True).defect(key, header)

    def verifier(self, payload: Sections) -> BlockVerifier:
        """Compute the checksums while the block is being read."""
        return PlainVerifier(self._digest, payload)


class PlainVerifier:
    """See ``BlockVerifier``: computes a plain block's checksums incrementally, in file order."""

    def __init__(
        self, namespace_digest: str, payload: Sections, *, compressed: bool = False
    ) -> None:
        self._digest = namespace_digest
        self._payload = payload
        self._compressed = compressed
        self._head, self._tail = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._waiting = deque(
            (hasher, memoryview(buffer))
            for hasher, section in ((self._head, payload.head), (self._tail, payload.tail or ()))
            for buffer in section
        )
        self._hashed_bytes = 0

    def received(self, file_bytes: int) -> None:
        """Hash up to there."""
        self._hash_until(file_bytes - HEADER_BYTES)

    def defect(self, key: BlockKey, header: memoryview | bytes) -> str | None:
        """Hash the rest and compare."""
        found = header_asked_for(
            key, self._digest, header, self._payload, compressed=self._compressed
        )
        if isinstance(found, str):
            return found
        if found.seal is not None:
            return OTHER_FORMAT
        self._hash_until(self._payload.size_bytes)
        if found.head_checksum != self._head.digest():
            return CHECKSUM
        if self._payload.tail is not None and found.tail_checksum != self._tail.digest():
            return CHECKSUM
        return None

    def _hash_until(self, payload_bytes: int) -> None:
        while self._waiting and self._hashed_bytes < payload_bytes:
            hasher, buffer = self._waiting.popleft()
            piece = buffer[: payload_bytes - self._hashed_bytes]
            hasher.update(piece)
            self._hashed_bytes += piece.nbytes
            if piece.nbytes < buffer.nbytes:
                self._waiting.appendleft((hasher, buffer[piece.nbytes :]))


def checksum(buffers: Sequence[Buffer]) -> bytes:
    """Return the XXH3-128 of the concatenated buffers."""
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
    compression: Compression | None = None,
) -> bytes:
    """Return the 4096 header bytes of a block that is not sealed.

    Raises ``ValueError`` unless the key has 32 bytes and the digest 16 characters.
    """
    tail = payload.tail or ()
    sizes = (payload.size_bytes, Sections(tail).size_bytes)
    sums = (checksum(payload.head), checksum(tail))
    return packed_header(
        BlockHeader(key, *sizes, namespace_digest, *sums, origin, compression=compression)
    )


def defect(
    key: BlockKey, namespace_digest: str, header: memoryview | bytes, payload: Sections
) -> str | None:
    """Return ``BlockCodec.defect`` of a plain block."""
    return PlainVerifier(namespace_digest, payload).defect(key, header)


def header_asked_for(
    key: BlockKey,
    namespace_digest: str,
    header: memoryview | bytes,
    payload: Sections,
    *,
    compressed: bool = False,
) -> BlockHeader | str:
    """Return the header of the expected block, or the reason why the header does not match.

    A block is expected to be compressed or not: compressed bytes must never pass as KV.
    """
    found = decode_header(header)
    if found is None:
        return BAD_HEADER if header_version(header) in (None, *VERSIONS) else OTHER_FORMAT
    if (found.compression is not None) != compressed:
        return OTHER_FORMAT
    if found.key != key:
        return WRONG_KEY
    if found.namespace_digest != namespace_digest:
        return WRONG_NAMESPACE
    head, tail = payload
    tail_bytes = found.tail_bytes if tail is None else Sections(tail).size_bytes
    sizes = (found.payload_bytes - found.tail_bytes, found.tail_bytes)
    return found if sizes == (Sections(head).size_bytes, tail_bytes) else WRONG_LENGTH


def stored_bytes(header: memoryview | bytes, payload: Sections) -> int:
    """Return how many bytes behind a block's header ``payload`` takes in its file.

    A compressed block takes fewer bytes than ``payload``, as its header states; all others take as
    many.
    """
    if is_compressed(header) and (found := decode_header(header)) is not None:
        return found.payload_bytes - (found.tail_bytes if payload.tail is None else 0)
    return payload.size_bytes


def first_of(buffers: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """Return the first ``size_bytes`` of buffers, or all of them, without empty ones at the end."""
    found = []
    for buffer in buffers:
        if size_bytes <= 0:
            break
        found.append(buffer[:size_bytes])
        size_bytes -= found[-1].nbytes
    return found


def fill(buffers: Sequence[memoryview], content: Buffer) -> None:
    """Copy ``content`` to the beginning of buffers, which have room for all of it."""
    left = memoryview(content)
    for part in first_of(buffers, left.nbytes):
        part[:] = left[: part.nbytes]
        left = left[part.nbytes :]


def needs_more(
    header: memoryview | bytes, payload: Sections, asked_bytes: int, arrived_bytes: int
) -> bool:
    """Whether a read of ``asked_bytes`` behind the header ended before the block's last byte."""
    cut = asked_bytes < payload.size_bytes and arrived_bytes >= asked_bytes
    return cut and asked_bytes < stored_bytes(header, payload)


def payload_bytes_of(header: memoryview | bytes, default: int) -> int:
    """Return the payload bytes of a stored block, ``default`` if its header is damaged."""
    found = decode_header(header)
    return default if found is None else found.payload_bytes


def defect_of_length(
    verifier: BlockVerifier,
    key: BlockKey,
    header: memoryview | bytes,
    payload: Sections,
    arrived_bytes: int,
) -> str | None:
    """Return the defect of a block with ``arrived_bytes`` of payload read, None if valid."""
    if arrived_bytes >= min(stored_bytes(header, payload), payload.size_bytes):
        return verifier.defect(key, header)
    # A block of another format version may be shorter than one of this version.
    if header_version(header) not in (None, *VERSIONS):
        return OTHER_FORMAT
    # With a damaged header it may be a compressed block, which is complete.
    return BAD_HEADER if arrived_bytes > 0 and decode_header(header) is None else SHORT


def defect_of_file(codec: BlockCodec, key: BlockKey, content: bytes) -> str | None:
    """Return the defect of a complete block file, None if valid; needs no block geometry."""
    header, payload = content[:HEADER_BYTES], memoryview(bytearray(content[HEADER_BYTES:]))
    found = decode_header(header)
    head_bytes = max(payload.nbytes - (0 if found is None else found.tail_bytes), 0)
    sections = Sections([payload[:head_bytes]], [payload[head_bytes:]])
    if found is not None and found.compression is not None:
        return codec.defect_of_compressed(key, header, sections)
    return codec.defect(key, header, sections)
