"""Storage to registered DRAM: fio, raw NIXL and the read queue on the same files."""

import os
import queue
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from dualpath.core.blocks import BlockKey, StoreNamespace, block_keys
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError, StorageError
from dualpath.core.request_messages import ReadDone
from dualpath.core.runs import BlockRun, HitRun
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.counters import Counters
from dualpath.engine.read_queue import ReadQueue, ReadTask
from dualpath.engine.threads import OS_THREADS, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.laboratory.experiments.data_plane_settings import DataPlaneSettings, Rate, Reader
from dualpath.laboratory.experiments.raw_nixl import FileRead, RawFileReader
from dualpath.plan.steps import run_reads
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.posix import PosixStorage
from dualpath.transport.memory import PAGE_BYTES, allocate_registered
from dualpath.transport.nixl import NixlTransport

_CLOSE_S = 10.0
_DEADLINE_S = 600.0
#: Two requests read alternately, each into its own slots: blocks of one may still be verified when
#: the first blocks of the next arrive.
_REQUESTS = ("even", "odd")

ReadAll = Callable[[], None]


class StoredBlocks:
    """Full Blocks on the disk."""

    def __init__(self, root: Path, settings: DataPlaneSettings) -> None:
        self.settings = settings
        self.root = root
        geometry = settings.geometry
        namespace = StoreNamespace("data-plane", "bytes", "none", geometry)
        self.storage = PosixStorage(root, namespace, direct_io=True, sync=True)
        tokens = range(geometry.block_tokens * settings.stored_blocks)
        self.keys: list[BlockKey] = block_keys(tokens, geometry.block_tokens)
        payload = np.random.default_rng(0).integers(
            0, 256, geometry.full_block_bytes, dtype=np.uint8
        )
        for key in self.keys:
            payload[: len(key)] = np.frombuffer(key, dtype=np.uint8)
            self.storage.write([key], [payload.data])
        self.paths = [str(self.storage.block_path(key)) for key in self.keys]
        self.file_bytes = HEADER_BYTES + geometry.full_block_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload of all blocks."""
        return len(self.keys) * self.settings.geometry.full_block_bytes

    @property
    def request_blocks(self) -> int:
        """Blocks of a reader's memory: several batches, like a buffer."""
        return min(4 * self.settings.read_batch_blocks, len(self.keys))

    def flat_folder(self) -> Path:
        """Return a folder with links to all blocks, as fio does not read subfolders."""
        folder = self.root / "flat"
        if not folder.exists():
            folder.mkdir()
            for path in self.paths:
                os.link(path, folder / Path(path).name)
        return folder

    def drop_cache(self) -> None:
        """Make the next read of every block come from the disk."""
        for path in self.paths:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure_reads(settings: DataPlaneSettings) -> dict[Reader, list[Rate]]:
    """Return the rates of every reader, one per round; fio is missing if it is not installed.

    Raises ``ConfigError`` for a directory without direct I/O, ``StorageError`` for a bad block.
    """
    Path(settings.storage).mkdir(parents=True, exist_ok=True)
    found: dict[Reader, list[Rate]] = {}
    with tempfile.TemporaryDirectory(dir=settings.storage) as root:
        stored = StoredBlocks(Path(root), settings)
        with _read_queue(stored) as through_queue, _raw_nixl(stored) as through_nixl:
            readers = {Reader.NIXL: through_nixl, Reader.READ_QUEUE: through_queue}
            for read_all in readers.values():  # warm-up, touches all memory
                read_all()
            for _ in range(settings.repeat):
                if shutil.which("fio"):
                    found.setdefault(Reader.FIO, []).append(_fio(stored))
                for reader, read_all in readers.items():
                    found.setdefault(reader, []).append(_timed(stored, read_all))
    return found


def _timed(stored: StoredBlocks, read_all: ReadAll) -> Rate:
    stored.drop_cache()
    before, start_s = _cpu_s(), time.perf_counter()
    read_all()
    wall_s = time.perf_counter() - start_s
    return Rate(stored.payload_bytes / wall_s, (_cpu_s() - before) / stored.payload_bytes * 1e9)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class _FioRead(msgspec.Struct):
    io_bytes: int
    runtime: int
    """ms"""


class _FioJob(msgspec.Struct):
    read: _FioRead
    usr_cpu: float
    sys_cpu: float
    """Per cent of the time the job ran."""
    job_runtime: int
    """ms"""


class _FioOutput(msgspec.Struct):
    jobs: list[_FioJob]


def _fio(stored: StoredBlocks) -> Rate:
    """Read the same files with fio, one request per file, ``read_batch_blocks`` at a time."""
    stored.drop_cache()
    done = subprocess.run(
        (
            *("fio", "--name=read", "--rw=read", "--direct=1", "--ioengine=libaio"),
            *(f"--iodepth={stored.settings.read_batch_blocks}", f"--bs={stored.file_bytes}"),
            *(f"--opendir={stored.flat_folder()}", "--readonly", "--output-format=json"),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"fio failed ({done.stderr.strip()[:200]}); repair or uninstall it")
    output = done.stdout[done.stdout.index("{") :]  # messages may precede it
    job = msgspec.json.decode(output, type=_FioOutput).jobs[0]
    payload_share = stored.payload_bytes / (len(stored.paths) * stored.file_bytes)
    payload_bytes = job.read.io_bytes * payload_share
    cpu_s = (job.usr_cpu + job.sys_cpu) / 100 * job.job_runtime / 1000
    return Rate(payload_bytes / job.read.runtime * 1000, cpu_s / payload_bytes * 1e9)


@contextmanager
def _raw_nixl(stored: StoredBlocks) -> Iterator[ReadAll]:
    """Yield reads of ``read_batch_blocks`` at a time, with as much memory as the read queue."""
    batch, slots = stored.settings.read_batch_blocks, stored.request_blocks
    slot_bytes = -(-stored.file_bytes // PAGE_BYTES) * PAGE_BYTES
    memory = allocate_registered(slots * slot_bytes)
    reader = RawFileReader(memory)
    reads = [
        FileRead(path, memory.address + index % slots * slot_bytes, stored.file_bytes)
        for index, path in enumerate(stored.paths)
    ]

    def read_all() -> None:
        for start in range(0, len(reads), batch):
            reader.read(reads[start : start + batch])

    try:
        yield read_all
    finally:
        reader.close()


@contextmanager
def _read_queue(stored: StoredBlocks) -> Iterator[ReadAll]:
    """Yield reads like those of the traffic manager, one request after the other."""
    settings = stored.settings
    answers = [queue.SimpleQueue[ReadDone]() for _ in _REQUESTS]
    request_blocks = stored.request_blocks
    buffer = BlockBuffer(settings.geometry, len(_REQUESTS) * request_blocks, lambda grant: None)
    for request in _REQUESTS:
        buffer.request(request, request_blocks)
    transport = NixlTransport("data-plane-reader", tls=settings.tls)
    transport.register(buffer.region(), buffer.memory)
    trace = TraceRecorder(None, "data-plane")
    reader = ReadQueue(
        *(stored.storage, buffer, Counters(), trace),
        lambda done: answers[_REQUESTS.index(done.request_id)].put(done),
        settings.parallel_reads,
    )
    runs = [
        stored.keys[start : start + request_blocks]
        for start in range(0, len(stored.keys), request_blocks)
    ]

    def read_all() -> None:
        done: list[ReadDone] = []
        for number, keys in enumerate(runs):
            if number >= len(_REQUESTS):  # the slots are free again
                done.append(answers[number % len(_REQUESTS)].get())
            request = _REQUESTS[number % len(_REQUESTS)]
            run = HitRun(Role.DECODE, BlockRun(0, len(keys)), buffer.slots_of(request)[: len(keys)])
            reads = run_reads(settings.geometry, run)
            reader.add(ReadTask(request, reads, keys, trace.now_ns(), _DEADLINE_S))
        for number in range(len(done), len(runs)):
            done.append(answers[number % len(_REQUESTS)].get())
        good_blocks, reasons = sum(d.good_blocks for d in done), [d.reason for d in done]
        if good_blocks != len(stored.keys):
            raise StorageError(
                f"{good_blocks} of {len(stored.keys)} blocks are good ({reasons}); the disk or the "
                "data path is defective"
            )

    try:
        yield read_all
    finally:
        reader.close(TimeLimit(OS_THREADS, _CLOSE_S))
        stored.storage.close()
        transport.close()
