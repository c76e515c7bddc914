"""Sealed blocks: without the storage key they can be neither forged nor, if encrypted, read.

AES-256-GCM of ``cryptography``.  Every write of a block has its own key, which HKDF-SHA256 derives
from the storage key, the kind of the seal, the tenant's tag and 32 random bytes in the header.  So
each nonce is used once per key: 0 for the head, 1 for the tail.  After 2^64 writes under one
storage key, the probability that two have drawn the same random bytes is 2^-129.

Head and tail have a tag each, so that a block can be read without its window layers.  Each tag also
authenticates the header: key, namespace, lengths, origin.  *Encrypted* blocks hide their payload,
*authenticated* ones have it in clear: GMAC takes a third of the CPU time of keyed BLAKE3 and a
twentieth of keyed BLAKE2b (``benchmarks/sealed_blocks.py``), as processors have instructions for
it.
"""

import os
import threading
from collections.abc import Callable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, Protection
from dualpath.storage.block_file import (
    NOT_AUTHENTIC,
    OTHER_STORAGE_KEY,
    BlockVerifier,
    DeferredVerifier,
    header_asked_for,
)
from dualpath.storage.block_header import (
    CHECKSUM_BYTES,
    SEALED_VERSION,
    BlockHeader,
    Seal,
    authenticated_fields,
    packed_header,
)
from dualpath.storage.key_ring import KeyRing
from dualpath.storage.sections import Buffer, Sections

_KINDS = {Protection.AUTHENTICATED: 1, Protection.ENCRYPTED: 2}
_SALT_BYTES = 32
_HEAD_NONCE, _TAIL_NONCE = (number.to_bytes(12, "big") for number in (0, 1))
_NO_TAG = bytes(CHECKSUM_BYTES)


class SealedBlocks:
    """See ``dualpath.storage.block_file.BlockCodec``.

    ``random_bytes`` returns n unpredictable bytes; repeated ones would reuse a block's key.
    """

    def __init__(
        self,
        namespace_digest: str,
        protection: Protection,
        keys: KeyRing,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._digest = namespace_digest
        self._kind = _KINDS[protection]
        self._encrypts = protection is Protection.ENCRYPTED
        self._keys = keys
        self._random_bytes = random_bytes
        self._per_thread = threading.local()

    def encoded(
        self, key: BlockKey, payload: Sections, origin: BlockOrigin = UNKNOWN_ORIGIN
    ) -> list[memoryview]:
        """Seal; ciphertext is in a buffer of this thread, ``payload`` is not changed."""
        seal = Seal(self._kind, self._keys.newest.id, self._random_bytes(_SALT_BYTES))
        secret = self._keys.newest.block_key(self._kind, origin.tenant, seal.salt)
        head, tail = payload.head, payload.tail or ()

        def header(head_tag: bytes, tail_tag: bytes) -> bytes:
            sizes = (payload.size_bytes, Sections(tail).size_bytes)
            tags = (head_tag, tail_tag)
            return packed_header(
                BlockHeader(SEALED_VERSION, key, *sizes, self._digest, *tags, origin, seal)
            )

        bound = authenticated_fields(header(_NO_TAG, _NO_TAG))
        room = self._divided(payload.buffers) if self._encrypts else payload.buffers
        tags = (
            self._close(secret, _HEAD_NONCE, bound, head, room[: len(head)]),
            self._close(secret, _TAIL_NONCE, bound, tail, room[len(head) :]),
        )
        return [memoryview(header(*tags)), *room]

    def defect(self, key: BlockKey, header: memoryview | bytes, payload: Sections) -> str | None:
        """Verify the tags and decrypt; a block with a wrong tag is "not authentic"."""
        found = header_asked_for(key, self._digest, header, payload)
        if isinstance(found, str):
            return found
        seal = found.seal
        if seal is None or seal.kind != self._kind:
            return NOT_AUTHENTIC
        storage_key = self._keys.find(seal.key_id)
        if storage_key is None:
            return OTHER_STORAGE_KEY
        secret = storage_key.block_key(self._kind, found.origin.tenant, seal.salt)
        bound = authenticated_fields(header)
        sections = [(_HEAD_NONCE, found.head_checksum, payload.head)]
        if payload.tail is not None:
            sections.append((_TAIL_NONCE, found.tail_checksum, payload.tail))
        opens = all(self._open(secret, nonce, tag, bound, part) for nonce, tag, part in sections)
        return None if opens else NOT_AUTHENTIC

    def verifier(self, payload: Sections) -> BlockVerifier:
        """Return a deferred verifier: the block's key depends on the header, read with the rest."""
        return DeferredVerifier(self, payload)

    def _close(
        self,
        secret: bytes,
        nonce: bytes,
        bound: bytes,
        section: Sequence[Buffer],
        room: Sequence[memoryview],
    ) -> bytes:
        """Return the tag of a section; encrypted blocks are encrypted into ``room``."""
        sealing = Cipher(algorithms.AES256(secret), modes.GCM(nonce)).encryptor()
        sealing.authenticate_additional_data(bound)
        for clear, into in zip(section, room, strict=True):
            if self._encrypts:
                sealing.update_into(clear, into)
            else:
                sealing.authenticate_additional_data(clear)
        sealing.finalize()
        return sealing.tag

    def _open(
        self, secret: bytes, nonce: bytes, tag: bytes, bound: bytes, section: Sequence[Buffer]
    ) -> bool:
        """Whether a section is authentic; encrypted blocks are decrypted in place."""
        opening = Cipher(algorithms.AES256(secret), modes.GCM(nonce, tag)).decryptor()
        opening.authenticate_additional_data(bound)
        for buffer in section:
            if self._encrypts:
                opening.update_into(buffer, buffer)
            else:
                opening.authenticate_additional_data(buffer)
        try:
            opening.finalize()
        except InvalidTag:
            return False
        return True

    def _divided(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """Return this thread's buffer, divided like ``buffers``; it is reused by later calls."""
        needed_bytes = sum(buffer.nbytes for buffer in buffers)
        room: memoryview | None = getattr(self._per_thread, "room", None)
        if room is None or room.nbytes < needed_bytes:
            room = self._per_thread.room = memoryview(bytearray(needed_bytes))
        divided = []
        for buffer in buffers:
            divided.append(room[: buffer.nbytes])
            room = room[buffer.nbytes :]
        return divided
