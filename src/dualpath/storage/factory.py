"""From one setting to a storage backend."""

import threading
from pathlib import Path

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.storage.contract import BlockStorage
from dualpath.storage.lengths import ORACLE, LengthOnlyStorage
from dualpath.storage.memory import MemoryStorage
from dualpath.storage.posix import DirectIo, PosixStorage
from dualpath.storage.s3 import S3Storage
from dualpath.storage.s3_credentials import with_credentials
from dualpath.storage.s3_location import parse_location
from dualpath.storage.throttle import ThrottledStorage

_memory_storages: dict[tuple[str, str], MemoryStorage] = {}
_memory_lock = threading.Lock()


def open_storage(
    location: str | Path,
    namespace: StoreNamespace,
    *,
    mode: Mode = Mode.DUALPATH,
    read_bytes_per_s: float | None = None,
    direct_io: DirectIo = "auto",
    sync: bool = False,
) -> BlockStorage:
    """Open the storage at ``location``: a path, ``file://``, ``s3://`` or ``memory://``.

    ``s3://bucket/prefix?endpoint_url=…&region=…`` is explained at ``s3_location.parse_location``.
    ``memory://name`` is one storage per name within this process, for tests.  ``read_bytes_per_s``
    throttles reads to a SNIC's rate (None: unthrottled).  In ``Mode.ORACLE`` the storage keeps
    lengths only, apart from real blocks, in a directory.  ``direct_io`` and ``sync`` are
    ``PosixStorage``'s.

    Raises ``ConfigError`` for an unknown scheme, an unusable directory or bucket.
    """
    scheme, separator, rest = str(location).partition("://")
    if not separator:
        scheme, rest = "file", str(location)
    if scheme not in ("file", "memory", "s3") or not rest:
        raise ConfigError(
            f"storage location {str(location)!r} is none of PATH, file://PATH, "
            "s3://BUCKET/PREFIX, memory://NAME"
        )
    if mode is Mode.ORACLE:
        if scheme != "file":
            raise ConfigError(f"storage {location} in mode oracle: give a directory instead")
        return LengthOnlyStorage(rest, msgspec.structs.replace(namespace, mode=ORACLE))
    storage: BlockStorage
    if scheme == "memory":
        storage = memory_storage(rest, namespace)
    elif scheme == "s3":
        place = with_credentials(parse_location(str(location)))
        storage = S3Storage(place, namespace)
    else:
        storage = PosixStorage(rest, namespace, direct_io=direct_io, sync=sync)
    return storage if read_bytes_per_s is None else ThrottledStorage(storage, read_bytes_per_s)


def memory_storage(name: str, namespace: StoreNamespace) -> MemoryStorage:
    """Return this process's memory storage of that name and namespace, created on first use."""
    with _memory_lock:
        key = (name, namespace.digest())
        if key not in _memory_storages:
            _memory_storages[key] = MemoryStorage(namespace)
        return _memory_storages[key]
