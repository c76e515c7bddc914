"""Identifies the weights in a model folder by the SHA-256 of its files.

All bytes are hashed.  A merged adapter or a retrained token changes some tensors in the middle of a
file without changing its size, head or tail, so a digest of samples could miss the change.  The
hub's cache names its files by their SHA-256.  Other files are read once per machine, several in
parallel, and their digests are cached in the cache directory by path, size, inode and times.
"""

import hashlib
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dualpath.engine.cache_directory import cache_directory

log = logging.getLogger(__name__)

_READERS = 8
_SHA256_HEX = 64


class _FileStamp(msgspec.Struct, frozen=True):
    """Path, size, inode and times of a file when its digest was computed."""

    path: str
    size_bytes: int
    inode: int
    modified_ns: int
    changed_ns: int
    sha256: str = ""


def files_digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 over the files' names and contents, in the order of their names.

    Raises ``OSError`` for a file that cannot be read.
    """
    ordered = sorted(files, key=lambda file: file.name)
    with ThreadPoolExecutor(_READERS) as readers:
        digests = list(readers.map(_file_sha256, ordered))
    whole = hashlib.sha256()
    for file, digest in zip(ordered, digests, strict=True):
        whole.update(f"{file.name}\0{digest}\0".encode())
    return whole.hexdigest()


def _file_sha256(file: Path) -> str:
    real = file.resolve()
    if real.parent.name == "blobs" and _is_sha256(real.name):
        return real.name
    stamp = _stamp(real)
    cached = (
        cache_directory() / "weights" / f"{hashlib.sha256(str(real).encode()).hexdigest()}.json"
    )
    if (known := _read(cached)) is not None and msgspec.structs.replace(known, sha256="") == stamp:
        return known.sha256
    log.info("reading %s (%.1f GB) once to identify its weights", real, stamp.size_bytes / 1e9)
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if _stamp(real) == stamp:
        _write(cached, msgspec.structs.replace(stamp, sha256=digest))
    return digest


def _is_sha256(name: str) -> bool:
    return len(name) == _SHA256_HEX and all(digit in "0123456789abcdef" for digit in name)


def _stamp(file: Path) -> _FileStamp:
    status = file.stat()
    return _FileStamp(
        str(file), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    )


def _read(cached: Path) -> _FileStamp | None:
    """Return the cached stamp with its digest, None if there is none that can be read."""
    try:
        return msgspec.json.decode(cached.read_bytes(), type=_FileStamp)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def _write(cached: Path, stamp: _FileStamp) -> None:
    """Write a digest to the cache; if that fails, the next start reads the file again."""
    temporary = cached.with_suffix(f".{os.getpid()}")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(stamp))
        temporary.replace(cached)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s); the next start reads the weights again", cached, error
        )
