"""How blocks of a namespace are protected, and with which keys; ``cryptography`` is optional."""

import importlib
from typing import TYPE_CHECKING

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.storage.block_file import BlockForm, PlainBlocks

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing

#: Where storage keys are looked for if no file is given.
STORAGE_KEY_VARIABLE = "DUALPATH_STORAGE_KEY"
STORAGE_KEY_REMEDY = (
    f"`openssl rand -hex 32` makes a storage key; give the same to all engines in a file "
    f"(storage_key_file) or in {STORAGE_KEY_VARIABLE}, one key a line, the newest first"
)


def key_ring(text: str, origin: str) -> "KeyRing":
    """Return the keys of a text; raises ``ConfigError`` as ``KeyRing``, or without a library."""
    try:
        importlib.import_module("cryptography")
    except ImportError as error:
        raise ConfigError(
            f"storage keys need the package cryptography ({error}); "
            f"{extra('sealed').remedy}, or give no storage key"
        ) from error
    from dualpath.storage.key_ring import KeyRing

    return KeyRing(text, origin)


def block_form(namespace: StoreNamespace, keys: "KeyRing | None" = None) -> BlockForm:
    """Return how blocks of a namespace are written; raises ``ConfigError`` without its keys."""
    digest, protection = namespace.digest(), namespace.protection
    if protection is msgspec.UNSET:
        return PlainBlocks(digest)
    if keys is None:
        raise ConfigError(
            f"blocks are to be {protection}, and there is no storage key; {STORAGE_KEY_REMEDY}"
        )
    from dualpath.storage.sealed_blocks import SealedBlocks

    return SealedBlocks(digest, protection, keys)
