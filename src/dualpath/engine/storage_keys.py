"""The source of the storage keys of engines and of commands that manage a storage."""

from typing import TYPE_CHECKING

from dualpath.storage.protection import STORAGE_KEY_REMEDY, STORAGE_KEY_VARIABLE, key_ring
from dualpath.transport.secret_file import read_secret

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing


def load_storage_keys(file: str) -> "KeyRing | None":
    """Return the keys in ``file``, otherwise those of the environment, otherwise None.

    Raises ``ConfigError`` for a file that cannot be read and for weak keys.
    """
    found = read_secret(
        file,
        setting="storage_key_file",
        variable=STORAGE_KEY_VARIABLE,
        remedy=STORAGE_KEY_REMEDY,
    )
    return None if found is None else key_ring(*found)
