"""Where the storage keys of an engine, and of who looks after a storage, are from."""

from typing import TYPE_CHECKING

from dualpath.storage.protection import STORAGE_KEY_REMEDY, STORAGE_KEY_VARIABLE, key_ring
from dualpath.transport.secret_file import read_secret

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing


def load_storage_keys(file: str) -> "KeyRing | None":
    """Return the keys in ``file``, or else the environment's, or else None.

    Raises ``ConfigError`` for a file that cannot be read and for keys that could be guessed.
    """
    found = read_secret(
        file,
        setting="storage_key_file",
        variable=STORAGE_KEY_VARIABLE,
        remedy=STORAGE_KEY_REMEDY,
    )
    return None if found is None else key_ring(*found)
