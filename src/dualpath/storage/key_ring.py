"""Storage keys: the newest seals what is written, all of them open what is read."""

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dualpath.core.errors import ConfigError
from dualpath.storage.protection import STORAGE_KEY_REMEDY

#: 256 bits in hexadecimal digits.
LEAST_CHARACTERS = 64
_MOST_KEYS = 16


class StorageKey:
    """One key, known on storage by its ``id``, 8 bytes that tell nothing of it."""

    def __init__(self, text: str) -> None:
        self._secret = text.encode()
        self.id = _hkdf(b"", b"dualpath storage key id", 8).derive(self._secret)

    def block_key(self, kind: int, tenant: str, salt: bytes) -> bytes:
        """Return the 32 bytes that one block alone is sealed with.

        ``salt``: 32 bytes, random for every write.  ``kind`` is that of the ``Seal``.
        """
        info = b"dualpath block %d %s" % (kind, tenant.encode())
        return _hkdf(salt, info, 32).derive(self._secret)


class KeyRing:
    """Keys of a text, one a line, the newest first; what follows # is a comment.

    Raises ``ConfigError`` for no key, one that could be guessed, the same twice or too many;
    ``origin`` says where the text is from.
    """

    def __init__(self, text: str, origin: str) -> None:
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        texts = [line for line in lines if line]
        short = min(map(len, texts), default=0)
        if short < LEAST_CHARACTERS:
            raise ConfigError(
                f"a storage key in {origin} has {short} characters, at least {LEAST_CHARACTERS} "
                f"are needed; {STORAGE_KEY_REMEDY}"
            )
        if len(texts) > _MOST_KEYS or len({*texts}) < len(texts):
            raise ConfigError(
                f"{origin} has {len(texts)} storage keys, {len({*texts})} of them different; give "
                f"each once, and {_MOST_KEYS} at most"
            )
        keys = [StorageKey(text) for text in texts]
        self.newest = keys[0]
        self._by_id = {key.id: key for key in keys}

    def find(self, key_id: bytes) -> StorageKey | None:
        """Return the key of that name, None if it is not here."""
        return self._by_id.get(key_id)


def _hkdf(salt: bytes, info: bytes, size_bytes: int) -> HKDF:
    return HKDF(SHA256(), size_bytes, salt or None, info)
