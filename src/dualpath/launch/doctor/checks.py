"""Runs all checks of a node, in the order in which they are printed."""

import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.extras import extra
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import DEFAULT_PARALLEL_READS, DEFAULT_PARALLEL_WRITES, BufferBytes
from dualpath.launch.doctor import network, software
from dualpath.launch.doctor.finding import Finding, error, mebibytes, ok, warning
from dualpath.launch.doctor.node import Node
from dualpath.node.output_files import not_creatable
from dualpath.storage.compression import chosen_codec, find_zstd, measure_codec
from dualpath.storage.factory import directory_of

# ----------------------------------------------------------------------------------------- machine
# Checks of the node's memory, limits and clock.

#: A router has about two connections for each of its 4096 concurrent requests.
NEEDED_DESCRIPTORS = 2 * 4096 + 256
#: Enough for an engine with storage, control connection and some peers; with less it fails.
MIN_DESCRIPTORS = 512


def memory(available_bytes: int, buffer_bytes: int) -> Finding:
    """Check the memory available for the PE or DE buffer."""
    found = f"{mebibytes(available_bytes)} available"
    needed = f"buffer of {mebibytes(buffer_bytes)}"
    if available_bytes < buffer_bytes:
        return error("Memory", found, needed, "make the buffer smaller (buffer_bytes)")
    return ok("Memory", found, needed)


def huge_pages(transparent: str) -> Finding:
    """Check transparent huge pages; ``transparent`` is like ``always [madvise] never`` or empty."""
    check, needed = "Huge pages", "transparent: always or madvise"
    chosen = transparent.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return ok(check, f"transparent: {chosen}", needed)
    remedy = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled: buffers pin fewer pages"
    return warning(check, f"transparent: {chosen or 'unknown'}", needed, remedy)


def locked_memory(limit_bytes: int | None, buffer_bytes: int, has_rdma: bool) -> Finding:
    """Check RLIMIT_MEMLOCK (None: unlimited): RDMA pins the whole buffer.

    Every rank of an engine pins all of it, within its own limit.
    """
    check, needed = "Locked memory", f"buffer of {mebibytes(buffer_bytes)} per rank, with RDMA"
    if limit_bytes is None:
        return ok(check, "unlimited", needed)
    found = f"limit of {mebibytes(limit_bytes)}"
    if limit_bytes >= buffer_bytes:
        return ok(check, found, needed)
    remedy = "ulimit -l unlimited (limits.conf: memlock; containers: --ulimit memlock=-1)"
    if has_rdma:
        return error(check, found, needed, remedy)
    return ok(check, f"{found}, not needed without RDMA", needed)


def shared_memory(refusal: str, buffer_bytes: int) -> Finding:
    """Check memory shared by ranks of an engine and by engines of this machine.

    ``refusal``: why it cannot be shared, empty if it can.
    """
    check, needed = (
        "Shared memory",
        f"buffer of {mebibytes(buffer_bytes)} for several ranks or engines",
    )
    if not refusal:
        return ok(check, "memfd, mapped by a second descriptor", needed)
    remedy = (
        "allow memfd_create and /proc/PID/fd in this container, raise ulimit -f and its memory "
        "limit, or serve with --tensor-parallel-size 1 and --transport nixl"
    )
    return warning(check, refusal, needed, remedy)


def file_descriptors(soft: int, hard: int) -> Finding:
    """Check the soft and hard limit of open files per process."""
    check, needed = "File descriptors", f"{NEEDED_DESCRIPTORS} for a router at full load"
    found = f"limit of {soft}, at most {hard}"
    remedy = f"ulimit -n {NEEDED_DESCRIPTORS}"
    if soft < MIN_DESCRIPTORS:
        return error(check, found, f"at least {MIN_DESCRIPTORS}", remedy)
    if soft < NEEDED_DESCRIPTORS:
        return warning(check, found, needed, remedy)
    return ok(check, found, needed)


def clock(synchronised: bool | None) -> Finding:
    """Check whether the kernel's clock is synchronised; None if the kernel does not answer."""
    if synchronised:
        return ok("Clock", "synchronised")
    found = "not synchronised" if synchronised is False else "unknown"
    remedy = "run chrony or systemd-timesyncd: timestamps of several nodes' logs must be comparable"
    return warning("Clock", found, "synchronised", remedy)


# ----------------------------------------------------------------------------------------- storage
# Checks of a node's storage: writable, O_DIRECT, read rate, free space.

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
    """Write and read a temporary file in ``folder``, which must exist; raises ``OSError``.

    Without O_DIRECT the file is dropped from the page cache before it is read.
    """
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
    return (read, direct, write, storage_codec(rate), _space(measured))


#: A block of a model of 39 layers with 64 KiB each, by which compression is judged here; an engine
#: takes its own.
_SAMPLE = StoreNamespace("doctor", "bfloat16", "NHD", BlockGeometry.uniform(39, 64, 1 << 16))


def storage_codec(storage_bytes_per_s: float) -> Finding:
    """Report whether blocks would be compressed with ``storage_codec`` auto."""
    check = "Storage codec"
    if find_zstd() is None:
        return ok(check, f"not measured: {extra('zstd').remedy} for compressed blocks")
    measured = measure_codec(_SAMPLE, DEFAULT_PARALLEL_READS, DEFAULT_PARALLEL_WRITES)
    choice = chosen_codec(measured, storage_bytes_per_s)
    auto = "off" if choice.codec == "off" else "on"
    return ok(check, f"storage_codec auto would be {auto}: {choice.reason}")


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


def missing(folder: Path) -> Finding:
    """Return the finding of a storage directory that does not exist: the check creates none."""
    found = f"{folder} does not exist"
    if (reason := not_creatable(folder)) is not None:
        remedy = "correct --storage, or give a directory that the engines' user can create"
        return error("Storage", f"{found} and cannot be created: {reason}", "writable", remedy)
    remedy = "correct --storage, or create the directory to have it measured; engines create it too"
    return warning("Storage", found, "measured", remedy)


def not_measured(location: str) -> Finding:
    """Return the finding of a storage that is not a directory."""
    remedy = "engines check it when they start; lab/dualpath_lab/benchmarks/s3_read.py measures S3"
    return warning("Storage", f"{location} is not a directory", "measured", remedy)


VLLM = "vllm"
NIXL = "nixl"
#: Checks that may be skipped: they take seconds, or do not apply to a node.
PARTS = (VLLM, NIXL)


class CheckSettings(Settings, frozen=True, kw_only=True):
    """Requirements of the node; storage, ports and the router are checked only if given."""

    storage: Annotated[str, Setting("measure this storage", metavar="PATH")] = ""
    storage_bytes: Annotated[int, Setting("size of the temporary file to measure with", ge=1)] = (
        256 << 20
    )
    snic_bytes_per_s: Annotated[
        float, Setting("read rate that the storage should reach; 0: any", ge=0)
    ] = 0.0
    buffer_bytes: BufferBytes = 1 << 30
    host: Annotated[str, Setting("address on which the ports must be free", host=True)] = (
        "127.0.0.1"
    )
    ports: Annotated[tuple[int, ...], Setting("ports that must be free", metavar="PORT,…")] = ()
    router: Annotated[
        str, Setting("the router's address, which must be reachable", metavar="TCP-ADDRESS")
    ] = ""
    interface: Annotated[
        str,
        Setting(
            "interface of the compute network; empty: that of the default route", metavar="NAME"
        ),
    ] = ""
    skip: Annotated[tuple[Literal["vllm", "nixl"], ...], Setting("skip these imports")] = ()


def examine(settings: CheckSettings, node: Node) -> Iterator[Finding]:
    """Yield the findings of all checks, one after the other."""
    yield software.python_version(node.python_version())
    yield from _vllm(settings, node)
    if NIXL not in settings.skip:
        yield from software.nixl(node.run_module("dualpath.transport.nixl_probe"))
    yield from _network(settings, node)
    yield from _machine(settings, node)
    if settings.storage:
        yield from _storage(settings)
    for number in settings.ports:
        yield network.port(number, node.port_refusal(settings.host, number))
    if settings.router:
        yield network.control_address(settings.router, node.connection_refusal(settings.router))


def _vllm(settings: CheckSettings, node: Node) -> Iterator[Finding]:
    installed = node.vllm_distributions()
    yield software.vllm_version(installed)
    if installed and VLLM not in settings.skip:
        yield software.vllm_hooks(node.run_module("dualpath.vllm.hooks"))
        yield software.vllm_plugin(node.vllm_plugins(), node.environment.get("VLLM_PLUGINS"))


def _network(settings: CheckSettings, node: Node) -> Iterator[Finding]:
    ports = node.rdma_ports()
    has_rdma = any(port.is_active for port in ports)
    yield network.rdma(ports)
    if has_rdma:
        yield network.nics_of_gpus(node.nics_of_gpus())
    yield network.ucx_environment(node.environment)
    yield network.kv_lane(node.environment, has_rdma)
    interface = settings.interface or node.default_interface()
    if interface and not has_rdma:
        yield network.shaping(interface, node.queueing_disciplines(interface))


def _machine(settings: CheckSettings, node: Node) -> Iterator[Finding]:
    has_rdma = any(port.is_active for port in node.rdma_ports())
    yield memory(node.available_bytes(), settings.buffer_bytes)
    yield shared_memory(node.sharing_refusal(settings.buffer_bytes), settings.buffer_bytes)
    yield huge_pages(node.transparent_huge_pages())
    yield locked_memory(node.locked_memory_bytes(), settings.buffer_bytes, has_rdma)
    yield file_descriptors(*node.file_descriptors())
    yield clock(node.clock_synchronised())


def _storage(settings: CheckSettings) -> Iterator[Finding]:
    folder = directory_of(settings.storage)
    if folder is None:
        yield not_measured(settings.storage)
        return
    try:
        if not folder.exists():
            yield missing(folder)
            return
        measured = measure(folder, settings.storage_bytes)
    except OSError as failure:
        yield unusable(str(folder), failure.strerror or str(failure))
        return
    yield from storage(measured, settings.snic_bytes_per_s)
