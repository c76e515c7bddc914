"""Opens the storage backend of a location."""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.node.home import with_home
from dualpath.storage.compression import Compressor
from dualpath.storage.contract import BlockStorage
from dualpath.storage.memory import MemoryStorage
from dualpath.storage.objects import MemoryObjects, ObjectTree, PosixObjects
from dualpath.storage.posix import ORACLE, DirectIo, LengthOnlyStorage, PosixStorage
from dualpath.storage.readers import OpenPlugin, refuse_plugins
from dualpath.storage.s3 import S3Objects, S3Storage
from dualpath.storage.s3_client import (
    RetryPolicy,
    S3Client,
    S3Location,
    parse_location,
    with_credentials,
)
from dualpath.storage.wrapping import ThrottledStorage

if TYPE_CHECKING:
    from dualpath.storage.sealed_blocks import KeyRing

# ---------------------------------------------------------------------------------------- location
# Parses a storage location: the kind of storage, and its path or bucket.

#: NIXL's file plugins, by URL scheme.
FILE_PLUGINS = {
    "nixl+gds": "GDS",
    "nixl+gds_mt": "GDS_MT",
}
DIRECTORIES = frozenset({"file", *FILE_PLUGINS})
BUCKET = "s3"
MEMORY = "memory"
#: Schemes of NIXL plugins that were not faster, and the scheme that has the same blocks.
_REMOVED = {"nixl+posix": "file", "nixl+hf3fs": "file", "nixl+obj": BUCKET}


def split_location(location: str | Path) -> tuple[str, str]:
    """Return scheme and path of a location, with ``~`` expanded.

    The path of ``file://`` and of the plugins is absolute: ``file://localhost/PATH`` is ``/PATH``
    (RFC 8089), and other hosts are refused.  Raises ``ConfigError`` for these and for an unknown
    scheme.
    """
    scheme, separator, rest = str(location).partition("://")
    if not separator:
        scheme, rest = "file", with_home(str(location))
    elif scheme in DIRECTORIES:
        rest = _local_path(str(location), rest)
    if scheme in _REMOVED:
        raise ConfigError(
            f"storage location {str(location)!r}: {scheme}:// is no longer supported; give "
            f"{_REMOVED[scheme]}://{rest}, which has the same blocks"
        )
    if scheme not in {MEMORY, BUCKET, *DIRECTORIES} or not rest:
        plugins = ", ".join(f"{name}://PATH" for name in FILE_PLUGINS)
        raise ConfigError(
            f"storage location {str(location)!r} is none of PATH, file://PATH, "
            f"s3://BUCKET/PREFIX, {plugins}"
        )
    return scheme, rest


def directory_of(location: str) -> Path | None:
    """Return the directory of a storage, None if the storage is not a directory.

    Raises ``ConfigError``: see ``split_location``.
    """
    scheme, rest = split_location(location)
    return Path(rest) if scheme in DIRECTORIES else None


def _local_path(location: str, rest: str) -> str:
    """Return the path of a URL, without the host if that is this machine."""
    host, slash, path = rest.partition("/")
    if host and (host.lower() != "localhost" or not slash):
        raise ConfigError(
            f"storage location {location!r} names the host {host!r}; give "
            f"{location.partition('://')[0]}:///PATH, or for a relative directory the path alone"
        )
    return f"{slash}{path}"


def check_location(location: str) -> None:
    """Raise ``ConfigError`` for a location that no storage can have; connects to nothing."""
    scheme, rest = split_location(location)
    if scheme == BUCKET:
        parse_location(f"s3://{rest}")


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
    compressor: Compressor | None = None,
    open_plugin: OpenPlugin = refuse_plugins,
) -> BlockStorage:
    """Open the storage at ``location``: a path or a URL.

    ``s3://bucket/prefix?endpoint_url=…&region=…`` is described in ``s3_location.parse_location``.
    ``FILE_PLUGINS`` (``nixl+gds://``) are directories read through a NIXL plugin, which
    ``open_plugin`` opens.  ``memory://name`` is one storage per name within this process: for tests
    and simulations, not for users.
    ``read_bytes_per_s`` throttles reads to a SNIC's rate (None: unthrottled).  In ``Mode.ORACLE``
    the storage is a directory of block lengths, apart from real blocks.  ``direct_io`` and
    ``sync``: see ``PosixStorage``; ``keys``: storage keys of a namespace with sealed blocks.
    ``compressor`` compresses written blocks, None leaves them as they are.

    Raises ``ConfigError`` for an unknown scheme, an unusable directory, bucket or plugin.
    """
    scheme, rest = split_location(location)
    if mode is Mode.ORACLE:
        if scheme not in DIRECTORIES:
            raise ConfigError(f"storage {location} in mode oracle: give a directory instead")
        return LengthOnlyStorage(rest, msgspec.structs.replace(namespace, mode=ORACLE))
    storage: BlockStorage
    if scheme == MEMORY:
        storage = memory_storage(rest, namespace, keys)
    elif scheme == BUCKET:
        storage = S3Storage(_bucket(rest), namespace, keys=keys, compressor=compressor)
    else:
        reader = open_plugin(plugin) if (plugin := FILE_PLUGINS.get(scheme)) else None
        storage = PosixStorage(
            rest,
            namespace,
            direct_io=direct_io,
            sync=sync,
            keys=keys,
            compressor=compressor,
            reader=reader,
        )
    return storage if read_bytes_per_s is None else ThrottledStorage(storage, read_bytes_per_s)


def _bucket(rest: str) -> S3Location:
    return with_credentials(parse_location(f"s3://{rest}"))


def open_tree(location: str | Path) -> ObjectTree:
    """Open a storage's ``location`` as a tree of objects, over all namespaces.

    Raises ``ConfigError`` for an unknown scheme.  The tree of ``memory://`` has none of its blocks.
    """
    scheme, rest = split_location(location)
    if scheme == BUCKET:
        return S3Objects(S3Client(_bucket(rest), RetryPolicy()))
    if scheme == MEMORY:
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
