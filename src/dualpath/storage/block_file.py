"""Encodes and verifies the bytes of one stored Full Block: a header, then the payload.

The payload is the head of the block, then its tail, the window layers (``storage.sections``).

A plain block has checksums: XXH3 detects torn, truncated and flipped data at memory speed.  It
does not protect against someone who forges blocks; sealed blocks do (``storage.sealed_blocks``).
Nothing here does I/O.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import xxhash

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin
from dualpath.storage.block_header import (
    HEADER_BYTES,
    PLAIN_VERSION,
    VERSIONS,
    BlockHeader,
    decode_header,
    header_version,
    packed_header,
)
from dualpath.storage.sections import Buffer, Sections

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
#: The block may be intact but this process cannot read it: it is not removed.
UNREADABLE_HERE = frozenset({OTHER_FORMAT, OTHER_STORAGE_KEY})


class BlockCodec(Protocol):
    """Encodes and verifies the blocks of one namespace."""

    def encoded(
        self, key: BlockKey, payload: Sections, origin: BlockOrigin = UNKNOWN_ORIGIN
    ) -> list[memoryview]:
        """Return the file of a block as buffers: its header, then one per buffer of ``payload``.

        The buffers are valid until the same thread calls again.
        """
        ...

    def defect(self, key: BlockKey, header: memoryview | bytes, payload: Sections) -> str | None:
        """Return why a block that was read is not valid, None if it is.

        ``payload`` has the lengths that the reader expects; a tail that was not read is not
        verified.  Encrypted blocks are decrypted in place, so ``payload`` must be writable.
        """
        ...

    def verifier(self, payload: Sections) -> "BlockVerifier":
        """Return a verifier of one block whose file is being read into ``payload``."""
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

    def __init__(self, namespace_digest: str) -> None:
        self._digest = namespace_digest

    def encoded(
        self, key: BlockKey, payload: Sections, origin: BlockOrigin = UNKNOWN_ORIGIN
    ) -> list[memoryview]:
        """Return header and payload."""
        header = encode_header(key, self._digest, payload, origin)
        return [memoryview(header), *payload.buffers]

    def defect(self, key: BlockKey, header: memoryview | bytes, payload: Sections) -> str | None:
        """Compare checksums; the payload may be read-only."""
        return defect(key, self._digest, header, payload)

    def verifier(self, payload: Sections) -> BlockVerifier:
        """Compute the checksums while the block is being read."""
        return PlainVerifier(self._digest, payload)


class PlainVerifier:
    """See ``BlockVerifier``: computes a plain block's checksums incrementally, in file order."""

    def __init__(self, namespace_digest: str, payload: Sections) -> None:
        self._digest = namespace_digest
        self._payload = payload
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
        found = header_asked_for(key, self._digest, header, self._payload)
        if isinstance(found, str):
            return found
        if found.version != PLAIN_VERSION:
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
) -> bytes:
    """Return the 4096 header bytes of a plain block.

    Raises ``ValueError`` unless the key has 32 bytes and the digest 16 characters.
    """
    tail = payload.tail or ()
    sizes = (payload.size_bytes, Sections(tail).size_bytes)
    sums = (checksum(payload.head), checksum(tail))
    return packed_header(
        BlockHeader(PLAIN_VERSION, key, *sizes, namespace_digest, *sums, origin=origin)
    )


def defect(
    key: BlockKey, namespace_digest: str, header: memoryview | bytes, payload: Sections
) -> str | None:
    """Return ``BlockCodec.defect`` of a plain block."""
    return PlainVerifier(namespace_digest, payload).defect(key, header)


def header_asked_for(
    key: BlockKey, namespace_digest: str, header: memoryview | bytes, payload: Sections
) -> BlockHeader | str:
    """Return the header of the expected block, or the reason why the header does not match."""
    found = decode_header(header)
    if found is None:
        return BAD_HEADER if header_version(header) in (None, *VERSIONS) else OTHER_FORMAT
    if found.key != key:
        return WRONG_KEY
    if found.namespace_digest != namespace_digest:
        return WRONG_NAMESPACE
    head, tail = payload
    tail_bytes = found.tail_bytes if tail is None else Sections(tail).size_bytes
    sizes = (found.payload_bytes - found.tail_bytes, found.tail_bytes)
    return found if sizes == (Sections(head).size_bytes, tail_bytes) else WRONG_LENGTH


def defect_of_length(
    verifier: BlockVerifier,
    key: BlockKey,
    header: memoryview | bytes,
    payload: Sections,
    arrived_bytes: int,
) -> str | None:
    """Return the defect of a block with ``arrived_bytes`` of payload read, None if valid."""
    if arrived_bytes >= payload.size_bytes:
        return verifier.defect(key, header)
    # A block of another format version may be shorter than one of this version.
    return OTHER_FORMAT if header_version(header) not in (None, *VERSIONS) else SHORT


def defect_of_file(codec: BlockCodec, key: BlockKey, content: bytes) -> str | None:
    """Return the defect of a complete block file, None if valid; needs no block geometry."""
    header, payload = content[:HEADER_BYTES], memoryview(bytearray(content[HEADER_BYTES:]))
    found = decode_header(header)
    head_bytes = max(payload.nbytes - (0 if found is None else found.tail_bytes), 0)
    sections = Sections([payload[:head_bytes]], [payload[head_bytes:]])
    return codec.defect(key, header, sections)
