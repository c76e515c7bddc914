"""Checks of a node's storage: writable, O_DIRECT, read rate, free space."""

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dualpath.engine.settings import DEFAULT_PARALLEL_READS
from dualpath.ops.doctor.finding import Finding, error, mebibytes, ok, warning

CHUNK_BYTES = 1 << 20
#: With less free space, new blocks will soon be dropped.
MIN_FREE_SHARE = 0.05


class StorageMeasurement(msgspec.Struct, frozen=True):
    """A file of ``size_bytes`` written, flushed and read back in chunks by several threads."""

    size_bytes: int
    free_bytes: int
    total_bytes: int
    direct_io: bool
    write_bytes_per_s: float
    read_bytes_per_s: float


def measure(folder: Path, size_bytes: int) -> StorageMeasurement:
    """Write and read a temporary file in ``folder``, created if needed; raises ``OSError``.

    Without O_DIRECT the file is dropped from the page cache before it is read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunks = max(size_bytes // CHUNK_BYTES, 1)
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".dualpath-doctor-")
    try:
        write_s = _write(descriptor, chunks)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        direct_io, reader = _open_for_reading(name)
        try:
            read_s = _read(reader, chunks)
        finally:
            os.close(reader)
    finally:
        os.close(descriptor)
        os.unlink(name)
    space = os.statvfs(folder)
    written_bytes = chunks * CHUNK_BYTES
    return StorageMeasurement(
        size_bytes=written_bytes,
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        direct_io=direct_io,
        write_bytes_per_s=written_bytes / write_s,
        read_bytes_per_s=written_bytes / read_s,
    )


def _write(descriptor: int, chunks: int) -> float:
    """Write incompressible chunks; return the seconds."""
    chunk = os.urandom(CHUNK_BYTES)
    begin_s = time.perf_counter()
    for _ in range(chunks):
        os.write(descriptor, chunk)
    os.fsync(descriptor)
    return time.perf_counter() - begin_s


def _open_for_reading(name: str) -> tuple[bool, int]:
    try:
        return True, os.open(name, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False, os.open(name, os.O_RDONLY)


def _read(descriptor: int, chunks: int) -> float:
    """Read all chunks as an engine reads blocks, ``DEFAULT_PARALLEL_READS`` at a time."""

    def read_every(first: int) -> None:
        with mmap.mmap(-1, CHUNK_BYTES) as buffer:
            for chunk in range(first, chunks, DEFAULT_PARALLEL_READS):
                os.preadv(descriptor, [buffer], chunk * CHUNK_BYTES)

    with ThreadPoolExecutor(DEFAULT_PARALLEL_READS) as pool:
        begin_s = time.perf_counter()
        list(pool.map(read_every, range(DEFAULT_PARALLEL_READS)))
        return time.perf_counter() - begin_s


def storage(measured: StorageMeasurement, expected_bytes_per_s: float = 0.0) -> Sequence[Finding]:
    """Check a measurement; ``expected_bytes_per_s`` is the storage NIC's rate, 0 for any."""
    rate = measured.read_bytes_per_s
    found = f"{rate / 1e6:.0f} MB/s over {mebibytes(measured.size_bytes)}"
    needed = f"{expected_bytes_per_s / 1e6:.0f} MB/s" if expected_bytes_per_s else ""
    if rate < expected_bytes_per_s:
        remedy = (
            "check mount options, NIC and other readers; a larger --storage-bytes averages bursts"
        )
        read = warning("Storage reads", found, needed, remedy)
    else:
        read = ok("Storage reads", found, needed)
    direct = ok("Storage O_DIRECT", "supported")
    if not measured.direct_io:
        remedy = "reads use the page cache, which costs CPU, and the rate above may be the cache's;"
        remedy += " prefer a file system with O_DIRECT"
        direct = warning("Storage O_DIRECT", "not supported", "supported", remedy)
    write = ok("Storage writes", f"{measured.write_bytes_per_s / 1e6:.0f} MB/s, flushed")
    return (read, direct, write, _space(measured))


def _space(measured: StorageMeasurement) -> Finding:
    found = f"{measured.free_bytes / 1e9:.1f} of {measured.total_bytes / 1e9:.1f} GB free"
    needed = f"{MIN_FREE_SHARE:.0%} free"
    if measured.free_bytes < MIN_FREE_SHARE * measured.total_bytes:
        remedy = "remove unused blocks: new ones are dropped when the storage is full"
        return warning("Storage space", found, needed, remedy)
    return ok("Storage space", found, needed)


def unusable(location: str, reason: str) -> Finding:
    """Return the finding of a storage that cannot be written."""
    return error("Storage", f"{location}: {reason}", "writable", "give a writable directory")


def not_measured(location: str) -> Finding:
    """Return the finding of a storage that is not a directory."""
    remedy = "engines check it when they start; benchmarks/s3_read.py measures S3"
    return warning("Storage", f"{location} is not a directory", "measured", remedy)
