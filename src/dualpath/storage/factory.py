"""From one setting to a storage backend."""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.storage.contract import BlockStorage
from dualpath.storage.lengths import ORACLE, LengthOnlyStorage
from dualpath.storage.memory import MemoryStorage
from dualpath.storage.memory_objects import MemoryObjects
from dualpath.storage.objects import ObjectTree
from dualpath.storage.posix import DirectIo, PosixStorage
from dualpath.storage.posix_objects import PosixObjects
from dualpath.storage.s3 import S3Storage
from dualpath.storage.s3_client import S3Client
from dualpath.storage.s3_connection import Patience
from dualpath.storage.s3_credentials import with_credentials
from dualpath.storage.s3_location import parse_location
from dualpath.storage.s3_objects import S3Objects
from dualpath.storage.throttle import ThrottledStorage

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing

_memory_storages: dict[tuple[str, str], MemoryStorage] = {}
_memory_trees: dict[str, MemoryObjects] = {}
_memory_lock = threading.Lock()


def open_storage(
    location: str | Path,
    namespace: StoreNamespace,
    *,
    mode: Mode = Mode.DUALPATH,
    read_bytes_per_s: float | None = None,
    direct_io: DirectIo = "auto",
    sync: bool = False,
    keys: "KeyRing | None" = None,
) -> BlockStorage:
    """Open the storage at ``location``: a path, ``file://``, ``s3://`` or ``memory://``.

    ``s3://bucket/prefix?endpoint_url=…&region=…`` is explained at ``s3_location.parse_location``.
    ``memory://name`` is one storage per name within this process, for tests.  ``read_bytes_per_s``
    throttles reads to a SNIC's rate (None: unthrottled).  In ``Mode.ORACLE`` the storage keeps
    lengths only, apart from real blocks, in a directory.  ``direct_io`` and ``sync`` are
    ``PosixStorage``'s, ``keys`` those of a namespace whose blocks are sealed.

    Raises ``ConfigError`` for an unknown scheme, an unusable directory or bucket.
    """
    scheme, rest = _parted(location)
    if mode is Mode.ORACLE:
        if scheme != "file":
            raise ConfigError(f"storage {location} in mode oracle: give a directory instead")
        return LengthOnlyStorage(rest, msgspec.structs.replace(namespace, mode=ORACLE))
    storage: BlockStorage
    if scheme == "memory":
        storage = memory_storage(rest, namespace, keys)
    elif scheme == "s3":
        place = with_credentials(parse_location(str(location)))
        storage = S3Storage(place, namespace, keys=keys)
    else:
        storage = PosixStorage(rest, namespace, direct_io=direct_io, sync=sync, keys=keys)
    return storage if read_bytes_per_s is None else ThrottledStorage(storage, read_bytes_per_s)


def _parted(location: str | Path) -> tuple[str, str]:
    scheme, separator, rest = str(location).partition("://")
    if not separator:
        scheme, rest = "file", str(location)
    if scheme not in ("file", "memory", "s3") or not rest:
        raise ConfigError(
            f"storage location {str(location)!r} is none of PATH, file://PATH, "
            "s3://BUCKET/PREFIX, memory://NAME"
        )
    return scheme, rest


def open_tree(location: str | Path) -> ObjectTree:
    """Open everything that lies at a storage's ``location``, whatever namespace it is of.

    Raises ``ConfigError`` for a scheme without one; ``memory://`` has a tree apart from its blocks.
    """
    scheme, rest = _parted(location)
    if scheme == "s3":
        return S3Objects(S3Client(with_credentials(parse_location(str(location))), Patience()))
    if scheme == "memory":
        with _memory_lock:
            return _memory_trees.setdefault(rest, MemoryObjects(time.time))
    return PosixObjects(rest)


def memory_storage(
    name: str, namespace: StoreNamespace, keys: "KeyRing | None" = None
) -> MemoryStorage:
    """Return this process's memory storage of that name and namespace, created on first use."""
    with _memory_lock:
        key = (name, namespace.digest())
        if key not in _memory_storages:
            _memory_storages[key] = MemoryStorage(namespace, keys=keys)
        return _memory_storages[key]
