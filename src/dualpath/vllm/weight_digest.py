"""Which weights a model folder holds: the SHA-256 of its files.

All bytes count.  A merged adapter or a retrained token changes some tensors in the middle of a
file, keeps its size and may keep its head and tail, so that samples would call it the same.  The
hub's cache names its files by their SHA-256; others are read once per machine, many at a time, and
their digests kept in the cache directory by path, size, inode and times.
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


class _Seen(msgspec.Struct, frozen=True):
    """A file as it was when its digest was made; all that changes with its bytes."""

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
    seen = _seen(real)
    kept = cache_directory() / "weights" / f"{hashlib.sha256(str(real).encode()).hexdigest()}.json"
    if (known := _read(kept)) is not None and msgspec.structs.replace(known, sha256="") == seen:
        return known.sha256
    log.info("reading %s (%.1f GB) once, to know its weights again", real, seen.size_bytes / 1e9)
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if _seen(real) == seen:
        _write(kept, msgspec.structs.replace(seen, sha256=digest))
    return digest


def _is_sha256(name: str) -> bool:
    return len(name) == _SHA256_HEX and all(digit in "0123456789abcdef" for digit in name)


def _seen(file: Path) -> _Seen:
    status = file.stat()
    return _Seen(str(file), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def _read(kept: Path) -> _Seen | None:
    """Return what is kept, None for nothing or nothing that can be read."""
    try:
        return msgspec.json.decode(kept.read_bytes(), type=_Seen)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def _write(kept: Path, seen: _Seen) -> None:
    """Keep a digest if the place can be written to; otherwise the next start reads again."""
    fresh = kept.with_suffix(f".{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.json.encode(seen))
        fresh.replace(kept)
    except OSError as error:
        log.warning("%s cannot be kept (%s); the next start reads the weights again", kept, error)
