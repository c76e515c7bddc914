"""The data plane alone: storage to DRAM, Layer Blocks between engines, with rates and CPU time.

No scheduler, no computation: baselines and dualpath's code transfer the same bytes, interleaved.
"""

import multiprocessing
import os
import queue
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
import numpy as np

from dualpath.core.blocks import BlockKey, StoreNamespace, block_keys
from dualpath.core.cluster import Role
from dualpath.core.control import ReadDone
from dualpath.core.errors import ConfigError, StorageError
from dualpath.core.runs import BlockRun, HitRun
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.counters import Counters
from dualpath.engine.io.read_queue import ReadQueue, ReadTask
from dualpath.engine.threads import OS_THREADS, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.plan.steps import run_reads
from dualpath.report.model import Panel, Series, Table
from dualpath.storage.block_file import HEADER_BYTES
from dualpath.storage.posix import PosixStorage
from dualpath.transport.memory import PAGE_BYTES, allocate_registered
from dualpath.transport.nixl import NixlTransport
from dualpath_lab.experiments.data_plane_moves import measure_moves, measure_posts
from dualpath_lab.experiments.machine_load import BusyMeter
from dualpath_lab.experiments.raw_nixl import FileRead, RawFileReader
from dualpath_lab.experiments.report import ExperimentReport, Target
from dualpath_lab.experiments.settings import DataPlaneSettings, Leg, Mover, PostCost, Rate, Reader

# ------------------------------------------------------------------------------ data plane storage
# Storage to registered DRAM: fio, raw NIXL and the read queue on the same files.

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


_READ_LIMIT, _MOVE_LIMIT = 0.95, 0.90
_CPU_LIMIT_S_PER_GB, _PIECE_LIMIT_US = 0.7, 1.0

Rates = Mapping[str, Sequence[Rate]]
_T = TypeVar("_T")


def measure_data_plane(
    settings: DataPlaneSettings, command: str = "dualpath lab bench data-plane"
) -> ExperimentReport:
    """Run all measurements and return the report; takes a minute or two.

    Raises ``ConfigError`` for a storage without direct I/O, ``StorageError`` for a block that is
    read wrong, ``TransportError`` or ``EngineLostError`` if a transfer fails.
    """
    meter = BusyMeter()
    reads = _in_child(measure_reads, settings)
    moves = measure_moves(settings)
    posts = _in_child(measure_posts, settings)
    return data_plane_report(settings, command, reads, moves, posts, meter.busy())


def _in_child(measure: Callable[[DataPlaneSettings], _T], settings: DataPlaneSettings) -> _T:
    """Run in a new process, in which UCX reads ``settings.tls`` and there is no other agent."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as child:
        return child.submit(measure, settings).result()


def data_plane_report(
    settings: DataPlaneSettings,
    command: str,
    reads: Mapping[Reader, Sequence[Rate]],
    moves: Mapping[tuple[Leg, Mover], Sequence[Rate]],
    posts: Sequence[PostCost],
    busy: float,
) -> ExperimentReport:
    """Return the report of the measurements; ``busy`` is the machine's busy share, 0 to 1."""
    legs = {leg: {m.value: moves[leg, m] for m in Mover} for leg in Leg}
    readers = {reader.value: found for reader, found in reads.items()}
    tables = (
        _rate_table("Storage to registered DRAM", readers, Reader.READ_QUEUE),
        *(_rate_table(leg.value, legs[leg], Mover.TRAFFIC_MANAGER) for leg in Leg),
        _post_table(posts),
    )
    return ExperimentReport(
        name="data-plane",
        title="The data plane alone",
        command=command,
        settings=_setting_lines(settings, busy, Reader.FIO in reads),
        tables=tables,
        panels=(
            _rate_panel("Storage to registered DRAM", readers),
            *(_rate_panel(leg.value, legs[leg]) for leg in Leg),
            _post_panel(posts),
        ),
        targets=_targets(settings, readers, legs, posts),
        discussion=_DISCUSSION,
        data={
            # The path of the storage on this machine is left out.
            "settings": msgspec.to_builtins(settings) | {"storage": Path(settings.storage).name},
            "reads": msgspec.to_builtins(readers),
            "moves": {leg.value: msgspec.to_builtins(found) for leg, found in legs.items()},
            "posts": msgspec.to_builtins(posts),
            "busy": busy,
        },
    )


_DISCUSSION = """
CPU seconds are those of all participating processes, including kernel time. Reads of dualpath
verify every block (XXH3-128); fio and raw NIXL verify nothing. Over TCP the kernel copies every
byte at both ends, and posting a transfer sends its bytes: therefore the cost of a descriptor is
that of checks and handle, without posting.
"""


def _setting_lines(settings: DataPlaneSettings, busy: float, fio: bool) -> tuple[str, ...]:
    return (
        f"Full Blocks of {settings.layers} Layer Blocks of {settings.layer_block_bytes:,} bytes",
        f"storage: {settings.stored_blocks} cold blocks, {settings.read_batch_blocks} at a time, "
        f"by dualpath {settings.parallel_reads}"
        + ("" if fio else "; without fio, which is not installed"),
        f"transfers: prompts of {settings.blocks} blocks, two layers in flight, "
        f"UCX_TLS={settings.tls}",
        f"medians of {settings.repeat} interleaved rounds, ratios within a round",
        f"{os.cpu_count()} cores, {busy:.0%} busy",
    )


def _rate_table(title: str, found: Rates, ours: str) -> Table:
    rows = []
    for name, rates in found.items():
        speeds = [rate.bytes_per_s / 1e6 for rate in rates]
        cost = median(rate.cpu_s_per_gb for rate in rates)
        rows.append(
            (
                name,
                f"{median(speeds):.0f}",
                f"{min(speeds):.0f} to {max(speeds):.0f}",
                f"{cost:.2f}",
                f"{_ratio(found[ours], rates):.2f}",
            )
        )
    columns = ("method", "MB/s", "range", "CPU s/GB", "dualpath / this")
    return Table(title, columns, tuple(rows))


def _ratio(ours: Sequence[Rate], others: Sequence[Rate]) -> float:
    """Return the median ratio of rates taken in the same round."""
    pairs = zip(ours, others, strict=True)
    return median(own.bytes_per_s / other.bytes_per_s for own, other in pairs)


def _post_table(posts: Sequence[PostCost]) -> Table:
    rows = tuple(
        (
            f"{cost.pieces:,}",
            *(f"{s / cost.pieces * 1e6:.2f}" for s in (cost.check_s, cost.make_s, cost.post_s)),
            f"{cost.descriptor_us:.2f}",
        )
        for cost in posts
    )
    columns = ("pieces", "checks", "handle", "post, bytes included", "checks and handle")
    return Table("One posted transfer, µs per piece", columns, rows)


def _rate_panel(title: str, found: Rates) -> Panel:
    series = tuple(
        Series(name, ("median",), (median(rate.bytes_per_s for rate in rates) / 1e6,))
        for name, rates in found.items()
    )
    return Panel(title, "grouped", "", "MB/s", series)


def _post_panel(posts: Sequence[PostCost]) -> Panel:
    pieces = tuple(f"{cost.pieces:,}" for cost in posts)
    costs = tuple(cost.descriptor_us for cost in posts)
    return Panel(
        "Cost of a descriptor: checks and handle",
        "grouped",
        "pieces of one posted transfer",
        "µs per piece",
        (Series("dualpath", pieces, costs),),
        limit_y=_PIECE_LIMIT_US,
    )


def _targets(
    settings: DataPlaneSettings,
    readers: Rates,
    legs: Mapping[Leg, Rates],
    posts: Sequence[PostCost],
) -> tuple[Target, ...]:
    own_read = readers[Reader.READ_QUEUE]
    targets = [
        Target(
            f"storage reads, relative to {name}",
            _ratio(own_read, rates),
            _READ_LIMIT,
            at_least=True,
        )
        for name, rates in readers.items()
        if name != Reader.READ_QUEUE
    ]
    for leg, found in legs.items():
        own = found[Mover.TRAFFIC_MANAGER]
        share = _ratio(own, found[Mover.NIXL])
        targets.append(
            Target(f"{leg.value}, relative to raw NIXL", share, _MOVE_LIMIT, at_least=True)
        )
        cost = median(rate.cpu_s_per_gb for rate in own)
        what = f"{leg.value}, CPU s/GB of both ends"
        targets.append(Target(what, cost, _CPU_LIMIT_S_PER_GB, at_least=False))
    layer = min(posts, key=lambda cost: abs(cost.pieces - settings.blocks))
    what = f"checks and handle of one of {layer.pieces:,} descriptors, µs"
    return (*targets, Target(what, layer.descriptor_us, _PIECE_LIMIT_US, at_least=False))
