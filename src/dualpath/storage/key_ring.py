"""Storage keys: writes are sealed with the newest key, reads accept all keys."""

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dualpath.core.errors import ConfigError
from dualpath.storage.protection import STORAGE_KEY_REMEDY

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


def _hkdf(salt: bytes, info: bytes, size_bytes: int) -> HKDF:
    return HKDF(SHA256(), size_bytes, salt or None, info)
