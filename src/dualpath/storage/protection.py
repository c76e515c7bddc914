"""Selects a namespace's block codec by its protection; ``cryptography`` is optional."""

import importlib
from typing import TYPE_CHECKING

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.storage.block_file import BlockCodec, PlainBlocks

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing

#: The environment variable with storage keys, read if no file is given.
STORAGE_KEY_VARIABLE = "DUALPATH_STORAGE_KEY"
STORAGE_KEY_REMEDY = (
    f"create a storage key with `openssl rand -hex 32`; give the same keys to all engines in a "
    f"file (storage_key_file) or in {STORAGE_KEY_VARIABLE}, one key per line, the newest first"
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
    from dualpath.storage.key_ring import KeyRing

    return KeyRing(text, origin)


def block_codec(namespace: StoreNamespace, keys: "KeyRing | None" = None) -> BlockCodec:
    """Return the codec of a namespace's blocks; raises ``ConfigError`` without its keys."""
    digest, protection = namespace.digest(), namespace.protection
    if protection is msgspec.UNSET:
        return PlainBlocks(digest)
    if keys is None:
        raise ConfigError(
            f"blocks must be {protection}, and there is no storage key; {STORAGE_KEY_REMEDY}"
        )
    from dualpath.storage.sealed_blocks import SealedBlocks

    return SealedBlocks(digest, protection, keys)
