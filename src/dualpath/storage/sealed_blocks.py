"""Sealed blocks: without the storage key they can be neither forged nor, if encrypted, read.

AES-256-GCM of ``cryptography``.  Every write of a block has its own key, which HKDF-SHA256 derives
from the storage key, the kind of the seal, the tenant's tag and 32 random bytes in the header.  So
each nonce is used once per key: 0 for the head, 1 for the tail.  After 2^64 writes under one
storage key, the probability that two have drawn the same random bytes is 2^-129.

Head and tail have a tag each, so that a block can be read without its window layers.  Each tag also
authenticates the header: key, namespace, lengths, origin.  *Encrypted* blocks hide their payload,
*authenticated* ones have it in clear: GMAC takes a third of the CPU time of keyed BLAKE3 and a
twentieth of keyed BLAKE2b (``lab/dualpath_lab/benchmarks/sealed_blocks.py``), as processors have
instructions for it.
"""

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, Protection, StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.storage.block_file import (
    CHECKSUM_BYTES,
    NOT_AUTHENTIC,
    OTHER_FORMAT,
    OTHER_STORAGE_KEY,
    VERSIONS,
    BlockHeader,
    BlockVerifier,
    Buffer,
    Compression,
    DeferredVerifier,
    PlainBlocks,
    Seal,
    Sections,
    authenticated_fields,
    decode_header,
    header_asked_for,
    header_version,
    packed_header,
)
from dualpath.storage.compression import CompressedBlocks, Compressor

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

# -------------------------------------------------------------------------------------- protection
# Selects a namespace's block codec by its protection; ``cryptography`` is optional, so that it is
# imported where it is used.

#: The environment variable with storage keys, read if no file is given.
STORAGE_KEY_VARIABLE = "DUALPATH_STORAGE_KEY"
STORAGE_KEY_REMEDY = (
    f"create a storage key with `openssl rand -hex 32`; give the same keys to all engines in a "
    f"file ({{storage_key_file}}) or in {STORAGE_KEY_VARIABLE}, one key per line, the newest first"
)


def key_ring(text: str, origin: str) -> "KeyRing":
    """Return the ``KeyRing`` of a text; raises ``ConfigError`` also without ``cryptography``."""
    try:
        importlib.import_module("cryptography")
    except ImportError as error:
        raise ConfigError(
            f"storage keys need the package cryptography ({error}); "
            f"{extra('sealed').remedy}, or give no storage key"
        ) from error

    return KeyRing(text, origin)


def block_codec(
    namespace: StoreNamespace,
    keys: "KeyRing | None" = None,
    compressor: Compressor | None = None,
) -> CompressedBlocks:
    """Return the codec of a namespace's blocks, which ``compressor`` compresses if there is one.

    Compressed blocks are read in any case.  Raises ``ConfigError`` without the namespace's keys.
    """
    digest, protection = namespace.digest(), namespace.protection
    block_bytes = namespace.geometry.full_block_bytes
    if protection is msgspec.UNSET:
        return CompressedBlocks(PlainBlocks(digest), compressor, block_bytes)
    sealed = SealedBlocks(digest, protection, require_keys(protection, keys))
    return CompressedBlocks(sealed, compressor, block_bytes)


def require_keys(protection: Protection, keys: "KeyRing | None") -> "KeyRing":
    """Return the keys; raises ``ConfigError`` if there are none."""
    if keys is None:
        raise ConfigError(
            f"blocks must be {protection}, and there is no storage key; {STORAGE_KEY_REMEDY}"
        )
    return keys


# ---------------------------------------------------------------------------------------- key ring
# Storage keys: writes are sealed with the newest key, reads accept all keys.

#: 256 bits in hexadecimal digits.
MIN_SECRET_CHARACTERS = 64
_MAX_KEYS = 16


class StorageKey:
    """One key; its ``id``, 8 bytes stored with each block, reveals nothing about the key."""

    def __init__(self, text: str) -> None:
        self._secret = text.encode()
        self.id = _hkdf(b"", b"dualpath storage key id", 8).derive(self._secret)

    def block_key(self, kind: int, tenant: str, salt: bytes) -> bytes:
        """Return the 32-byte key of one block.

        ``salt``: 32 bytes, random for every write.  ``kind``: see ``Seal``.
        """
        info = b"dualpath block %d %s" % (kind, tenant.encode())
        return _hkdf(salt, info, 32).derive(self._secret)


class KeyRing:
    """Keys of a text, one per line, the newest first; # starts a comment.

    Raises ``ConfigError`` for no key, a short key, a duplicate, or too many keys.  ``origin``
    (file or variable) is named in errors.
    """

    def __init__(self, text: str, origin: str) -> None:
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        texts = [line for line in lines if line]
        short = min(map(len, texts), default=0)
        if short < MIN_SECRET_CHARACTERS:
            raise ConfigError(
                f"a storage key in {origin} has {short} characters, must have at least "
                f"{MIN_SECRET_CHARACTERS}; {STORAGE_KEY_REMEDY}"
            )
        if len(texts) > _MAX_KEYS or len({*texts}) < len(texts):
            raise ConfigError(
                f"{origin} has {len(texts)} storage keys, {len({*texts})} of them different; give "
                f"each key once, and at most {_MAX_KEYS}"
            )
        keys = [StorageKey(text) for text in texts]
        self.newest = keys[0]
        self._by_id = {key.id: key for key in keys}

    def find(self, key_id: bytes) -> StorageKey | None:
        """Return the key with this ID, None if it is not in the ring."""
        return self._by_id.get(key_id)


def _hkdf(salt: bytes, info: bytes, size_bytes: int) -> "HKDF":
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), size_bytes, salt or None, info)


_KINDS = {Protection.AUTHENTICATED: 1, Protection.ENCRYPTED: 2}
_SALT_BYTES = 32
_HEAD_NONCE, _TAIL_NONCE = (number.to_bytes(12, "big") for number in (0, 1))
_NO_TAG = bytes(CHECKSUM_BYTES)


class SealedBlocks:
    """See ``dualpath.storage.block_file.BlockCodec``.

    ``random_bytes`` returns n unpredictable bytes; repeated ones would reuse a block's key.
    """

    has_keys = True

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

    def unreadable(self, header: memoryview | bytes) -> str | None:
        """Compare the format version, and look for the storage key."""
        if header_version(header) not in (None, *VERSIONS):
            return OTHER_FORMAT
        found = decode_header(header)
        if found is None or found.seal is None or self._keys.find(found.seal.key_id) is not None:
            return None
        return OTHER_STORAGE_KEY

    def encoded(
        self,
        key: BlockKey,
        payload: Sections,
        origin: BlockOrigin = UNKNOWN_ORIGIN,
        compression: Compression | None = None,
    ) -> list[memoryview]:
        """Seal; ciphertext is in a buffer of this thread, ``payload`` is not changed."""
        seal = Seal(self._kind, self._keys.newest.id, self._random_bytes(_SALT_BYTES))
        secret = self._keys.newest.block_key(self._kind, origin.tenant, seal.salt)
        head, tail = payload.head, payload.tail or ()

        def header(head_tag: bytes, tail_tag: bytes) -> bytes:
            sizes = (payload.size_bytes, Sections(tail).size_bytes)
            tags = (head_tag, tail_tag)
            return packed_header(
                BlockHeader(key, *sizes, self._digest, *tags, origin, seal, compression)
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
        return self._defect(key, header, payload, compressed=False)

    def defect_of_compressed(
        self, key: BlockKey, header: memoryview | bytes, stored: Sections
    ) -> str | None:
        """Verify the tags of the stored bytes and decrypt them."""
        return self._defect(key, header, stored, compressed=True)

    def verifier(self, payload: Sections) -> BlockVerifier:
        """Return a deferred verifier: the block's key depends on the header, read with the rest."""
        return DeferredVerifier(self, payload)

    def _defect(
        self, key: BlockKey, header: memoryview | bytes, payload: Sections, *, compressed: bool
    ) -> str | None:
        found = header_asked_for(key, self._digest, header, payload, compressed=compressed)
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

    def _close(
        self,
        secret: bytes,
        nonce: bytes,
        bound: bytes,
        section: Sequence[Buffer],
        room: Sequence[memoryview],
    ) -> bytes:
        """Return the tag of a section; encrypted blocks are encrypted into ``room``."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

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
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

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
