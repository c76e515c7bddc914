"""The data plane alone: storage to DRAM, Layer Blocks between engines, with rates and CPU time.

No scheduler, no computation: baselines and dualpath's code transfer the same bytes, interleaved.
"""

import multiprocessing
import os
import queue
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

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
from dualpath_lab.experiments.machine_load import BusyMeter, own_cpu_s
from dualpath_lab.experiments.raw_nixl import FileRead, RawFileReader
from dualpath_lab.experiments.settings import DataPlaneSettings, Leg, Mover, PostCost, Rate, Reader
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Measure,
    P,
    Page,
    Progress,
    RawData,
    Run,
    Stage,
    one_stage,
)

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


class Readers:
    """All ways to read the same stored blocks, warmed up.

    Raises ``ConfigError`` for a directory without direct I/O.
    """

    def __init__(self, settings: DataPlaneSettings) -> None:
        Path(settings.storage).mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        root = self._stack.enter_context(tempfile.TemporaryDirectory(dir=settings.storage))
        self._stored = StoredBlocks(Path(root), settings)
        self._read_all = {
            Reader.READ_QUEUE: self._stack.enter_context(_read_queue(self._stored)),
            Reader.NIXL: self._stack.enter_context(_raw_nixl(self._stored)),
        }
        for read_all in self._read_all.values():  # touches all memory
            read_all()

    def rate(self, reader: Reader) -> Rate:
        """Read all blocks cold; raises ``StorageError`` for a bad block."""
        if reader is Reader.FIO:
            return _fio(self._stored)
        return _timed(self._stored, self._read_all[reader])

    def close(self) -> None:
        """Stop reading and remove the blocks."""
        self._stack.close()


def _timed(stored: StoredBlocks, read_all: ReadAll) -> Rate:
    stored.drop_cache()
    before, start_s = own_cpu_s(), time.perf_counter()
    read_all()
    wall_s = time.perf_counter() - start_s
    return Rate(stored.payload_bytes / wall_s, (own_cpu_s() - before) / stored.payload_bytes * 1e9)


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


# ------------------------------------------------------------------------------------------- runs


class DataPlaneResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one reader or mover did, or the costs of posting.

    ``rates`` are by leg, ``STORAGE`` for a reader; ``busy`` is the busy share of the machine.
    """

    busy: float
    rates: dict[str, Rate] = {}
    posts: tuple[PostCost, ...] = ()


STORAGE = "Storage to registered DRAM"
POSTS = "posted transfers"


def _stages(
    settings: DataPlaneSettings, progress: Progress
) -> Iterator[Stage[Any, DataPlaneResult]]:
    readers = [reader for reader in Reader if reader is not Reader.FIO or shutil.which("fio")]
    yield Stage({reader.value: reader for reader in readers}, lambda: _reading(settings))
    yield from one_stage({mover.value: mover for mover in Mover}, _metered(_move, settings))
    yield from one_stage({POSTS: None}, _metered(_post, settings))


@contextmanager
def _reading(settings: DataPlaneSettings) -> Iterator[Measure[Reader, DataPlaneResult]]:
    """Read in a new process, in which UCX reads ``settings.tls`` and there is no other agent."""
    with _child() as child:
        child.submit(_open_readers, settings).result()

        def read(reader: Reader, _: DataPlaneSettings) -> dict[str, Any]:
            return {"rates": {STORAGE: child.submit(_read, reader).result()}}

        try:
            yield _metered(read, settings)
        finally:
            child.submit(_close_readers).result()


_open: list[Readers] = []
"""The readers of a child process."""


def _open_readers(settings: DataPlaneSettings) -> None:
    _open.append(Readers(settings))


def _read(reader: Reader) -> Rate:
    return _open[0].rate(reader)


def _close_readers() -> None:
    while _open:
        _open.pop().close()


def _move(mover: Mover, settings: DataPlaneSettings) -> dict[str, Any]:
    rates = measure_moves(settings, mover)
    return {"rates": {leg.value: rate for leg, rate in rates.items()}}


def _post(_: None, settings: DataPlaneSettings) -> dict[str, Any]:
    with _child() as child:
        return {"posts": tuple(child.submit(measure_posts, settings).result())}


def _child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _metered(
    measure: Callable[[P, DataPlaneSettings], dict[str, Any]], settings: DataPlaneSettings
) -> Measure[P, DataPlaneResult]:
    """Return a measurement with the busy share of the machine."""

    def run(parameters: P, number: int) -> DataPlaneResult:
        meter = BusyMeter()
        found = measure(parameters, settings)
        return DataPlaneResult(busy=meter.busy(), **found)

    return run


# ------------------------------------------------------------------------------------------- page

_READ_LIMIT, _MOVE_LIMIT = 0.95, 0.90
_CPU_LIMIT_S_PER_GB, _PIECE_LIMIT_US = 0.7, 1.0
#: Tolerances of reruns: ratios of rates on any machine; CPU time and costs on the same processor.
_RATIO_TOLERANCE, _COST_TOLERANCE = 0.1, 0.15

Raw = RawData[DataPlaneSettings, DataPlaneResult]
Rates = Mapping[str, Sequence[Rate]]


def rates_of(raw: Raw, what: str) -> dict[str, list[Rate]]:
    """Return the rates of every reader, or of every mover on a leg, in the order of rounds."""
    found = {
        name: [run.rates[what] for run in raw.of(name) if what in run.rates] for name in raw.cells
    }
    return {name: rates for name, rates in found.items() if rates}


def draw(raw: Raw) -> Page:
    """Draw the page."""
    tables = {what: rates_of(raw, what) for what in (STORAGE, *(leg.value for leg in Leg))}
    tables = {what: rates for what, rates in tables.items() if rates}
    posts = _posts(raw)
    return Page(
        settings=_setting_lines(raw),
        tables=(
            *(_rate_table(what, rates, _own(what)) for what, rates in tables.items()),
            *((_post_table(posts),) if posts else ()),
        ),
        panels=(
            *(_rate_panel(what, rates) for what, rates in tables.items()),
            *((_post_panel(posts),) if posts else ()),
        ),
        results=tuple(_results(raw, tables, posts)),
        discussion=_DISCUSSION,
    )


def _own(what: str) -> str:
    """Return dualpath's own reader or mover."""
    return Reader.READ_QUEUE if what == STORAGE else Mover.TRAFFIC_MANAGER


def _posts(raw: Raw) -> list[PostCost]:
    """Return the median costs of each number of pieces."""
    rounds = [run.posts for run in raw.of(POSTS)]
    return [
        PostCost(
            costs[0].pieces,
            *(
                median(getattr(cost, name) for cost in costs)
                for name in ("check_s", "make_s", "post_s")
            ),
        )
        for costs in zip(*rounds, strict=True)
    ]


_DISCUSSION = """
CPU seconds are those of all participating processes, including kernel time. Reads of dualpath
verify every block (XXH3-128); fio and raw NIXL verify nothing. Over TCP the kernel copies every
byte at both ends, and posting a transfer sends its bytes: therefore the cost of a descriptor is
that of checks and handle, without posting.
"""


def _setting_lines(raw: Raw) -> tuple[str, ...]:
    settings = raw.settings
    return (
        f"Full Blocks of {settings.layers} Layer Blocks of {settings.layer_block_bytes:,} bytes",
        f"storage: {settings.stored_blocks} cold blocks, {settings.read_batch_blocks} at a time, "
        f"by dualpath {settings.parallel_reads}"
        + ("" if raw.of(Reader.FIO) else "; without fio, which is not installed"),
        f"transfers: prompts of {settings.blocks} blocks, two layers in flight, "
        f"UCX_TLS={settings.tls}",
        f"medians of {settings.repeat} interleaved rounds, ratios within a round",
        f"machine at most {max(run.busy for run in raw.results):.0%} busy",
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


def _results(
    raw: Raw, tables: Mapping[str, Rates], posts: Sequence[PostCost]
) -> Iterator[KeyResult]:
    for what, found in tables.items():
        own = found.get(_own(what))
        if own is None:
            continue
        is_read = what == STORAGE
        others = [name for name in found if name != _own(what)]
        for name in others if is_read else [m for m in (Mover.NIXL,) if m in found]:
            yield KeyResult(
                f"storage reads, relative to {name}"
                if is_read
                else f"{what}, relative to raw NIXL",
                _ratio(own, found[name]),
                _READ_LIMIT if is_read else _MOVE_LIMIT,
                tolerance=_RATIO_TOLERANCE,
                any_machine=True,
            )
        if not is_read:
            yield KeyResult(
                f"{what}, CPU s/GB of both ends",
                median(rate.cpu_s_per_gb for rate in own),
                _CPU_LIMIT_S_PER_GB,
                at_least=False,
                tolerance=_COST_TOLERANCE,
            )
    if posts:
        layer = min(posts, key=lambda cost: abs(cost.pieces - raw.settings.blocks))
        yield KeyResult(
            f"checks and handle of one of {layer.pieces:,} descriptors, µs",
            layer.descriptor_us,
            _PIECE_LIMIT_US,
            at_least=False,
            tolerance=_COST_TOLERANCE,
        )


def _published(page: Page, settings: DataPlaneSettings) -> Raw:
    """Convert ``{"settings", "reads": {reader: […]}, "moves": {leg: {mover: […]}}, "posts"}``."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for what, by_name in ({STORAGE: page.data["reads"]} | page.data["moves"]).items():
        for name, rates in by_name.items():
            for number, rate in enumerate(rates):
                found.setdefault((name, number), {})[what] = rate
    results = [(name, number, {"rates": rates}) for (name, number), rates in found.items()]
    results.append((POSTS, 0, {"posts": page.data["posts"]}))
    runs = [
        Run(
            cell=name,
            round=number,
            result=msgspec.convert(result | {"busy": page.data["busy"]}, DataPlaneResult),
        )
        for name, number, result in results
    ]
    known = msgspec.convert(page.data["settings"], DataPlaneSettings)
    return RawData(experiment=DATA_PLANE.name, settings=known, runs=runs)


DATA_PLANE = Experiment(
    name="data-plane",
    title="The data plane alone",
    settings=DataPlaneSettings(),
    result=DataPlaneResult,
    stages=_stages,
    draw=draw,
    summary=lambda result: ", ".join(
        f"{rate.bytes_per_s / 1e6:.0f} MB/s" for rate in result.rates.values()
    ),
    published=_published,
)
