"""The bytes of one stored Full Block: its header, then the payload; and whether they are right.

The payload is the head of the block, then its tail, the window layers (``storage.sections``).

A plain block has checksums: XXH3 finds torn, short and flipped data at memory speed, and is no
defence against somebody who writes false blocks on purpose.  That is what sealed blocks are for
(``storage.sealed_blocks``).  Nothing here does I/O.
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

#: Why a block is not good; these are the reasons a ``ReadOutcome`` carries.
MISSING = "missing"
SHORT = "short"
WRONG_KEY = "wrong key"
WRONG_NAMESPACE = "wrong namespace"
WRONG_LENGTH = "wrong length"
BAD_HEADER = "bad header"
CHECKSUM = "checksum"
#: A sealed block that is damaged, or that nobody wrote who has its storage key.
NOT_AUTHENTIC = "not authentic"
#: A block of another release of this format.
OTHER_FORMAT = "format version"
#: A block sealed with a storage key that is not here.
OTHER_STORAGE_KEY = "storage key"
#: With these nothing need be wrong: such a block is not read, and stays where it is.
STAYING = frozenset({OTHER_FORMAT, OTHER_STORAGE_KEY})


class BlockForm(Protocol):
    """How blocks of one namespace are written, and what makes one believed."""

    def encoded(
        self, key: BlockKey, payload: Sections, origin: BlockOrigin = UNKNOWN_ORIGIN
    ) -> list[memoryview]:
        """Return the file of a whole block: its header, then a buffer for each of ``payload``'s.

        They are good until the same thread calls again; ``origin`` is the block's own.
        """
        ...

    def defect(self, key: BlockKey, header: memoryview | bytes, payload: Sections) -> str | None:
        """Return why the block as read is not the one asked for, or None if it is.

        ``payload`` has the lengths the reader expects; of a tail that was not read nothing is
        said.  It is writable, and holds the block's own bytes afterwards if nothing is wrong.
        """
        ...

    def arrival(self, payload: Sections) -> "Arrival":
        """Return what looks at one block's ``payload`` while its file is read into it."""
        ...


class Arrival(Protocol):
    """One block on its way into memory."""

    def arrived(self, file_bytes: int) -> None:
        """Take in that the file's first ``file_bytes`` are there; need not be told of all."""
        ...

    def defect(self, key: BlockKey, header: memoryview | bytes) -> str | None:
        """Return ``BlockForm.defect``, once, when all of it is there."""
        ...


class WholeArrival:
    """See ``Arrival``: looks at the block when all of it is there."""

    def __init__(self, form: BlockForm, payload: Sections) -> None:
        self._form = form
        self._payload = payload

    def arrived(self, file_bytes: int) -> None:
        """Wait for the rest."""

    def defect(self, key: BlockKey, header: memoryview | bytes) -> str | None:
        """Ask the form."""
        return self._form.defect(key, header, self._payload)


class PlainBlocks:
    """See ``BlockForm``: the block as it is, with checksums."""

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

    def arrival(self, payload: Sections) -> Arrival:
        """Compute the checksums of what is there while the rest comes."""
        return PlainArrival(self._digest, payload)


class PlainArrival:
    """See ``Arrival``: a plain block's checksums, computed piece by piece in the file's order."""

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

    def arrived(self, file_bytes: int) -> None:
        """Go on to there."""
        self._hash_until(file_bytes - HEADER_BYTES)

    def defect(self, key: BlockKey, header: memoryview | bytes) -> str | None:
        """Go on to the end and compare."""
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
    """Return the 4096 header bytes of a whole plain block; ``origin`` is its own.

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
    """Return ``BlockForm.defect`` of a plain block."""
    return PlainArrival(namespace_digest, payload).defect(key, header)


def header_asked_for(
    key: BlockKey, namespace_digest: str, header: memoryview | bytes, payload: Sections
) -> BlockHeader | str:
    """Return the header of the block that is meant, or why it is another one's or none."""
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
    arrival: Arrival,
    key: BlockKey,
    header: memoryview | bytes,
    payload: Sections,
    arrived_bytes: int,
) -> str | None:
    """Return what is wrong with a file of which ``arrived_bytes`` of the payload have come."""
    if arrived_bytes >= payload.size_bytes:
        return arrival.defect(key, header)
    # What says that it is of another format may be shorter than a block of this one.
    return OTHER_FORMAT if header_version(header) not in (None, *VERSIONS) else SHORT


def defect_of_file(form: BlockForm, key: BlockKey, content: bytes) -> str | None:
    """Return the same of a whole file, by whoever does not know the block's geometry."""
    header, payload = content[:HEADER_BYTES], memoryview(bytearray(content[HEADER_BYTES:]))
    found = decode_header(header)
    head_bytes = max(payload.nbytes - (0 if found is None else found.tail_bytes), 0)
    sections = Sections([payload[:head_bytes]], [payload[head_bytes:]])
    return form.defect(key, header, sections)
