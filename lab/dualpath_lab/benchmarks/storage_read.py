"""Compare methods to read stored Full Blocks into registered memory.

Every method reads the same cold blocks (the page cache is dropped before each pass) and verifies
every checksum, except raw NIXL "not verified".  Methods are interleaved in each round, so that a
noisy disk affects all of them.  With ``liburing`` installed, one thread also reads through
io_uring.
"""

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from dualpath.core.blocks import BlockGeometry, BlockKey, StoreNamespace, block_keys
from dualpath.core.errors import StorageError
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import DEFAULT_PARALLEL_READS
from dualpath.report.model import Table, cell
from dualpath.storage import block_file
from dualpath.storage.block_file import HEADER_BYTES, Sections
from dualpath.storage.posix import PosixStorage
from dualpath.storage.readers import FileReader, KernelReader
from dualpath.transport.memory import RegisteredMemory, allocate_registered
from dualpath.transport.nixl_storage import NixlReader
from dualpath_lab.experiments.machine_load import own_cpu_s
from dualpath_lab.experiments.raw_nixl import FileRead, PosixQueue, RawFileReader
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Measure,
    Page,
    Progress,
    RawData,
    Stage,
)
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table

BATCH_BLOCKS = 32
DEFAULT = f"preadv direct x{DEFAULT_PARALLEL_READS}"
Method = Callable[[], int]


class StorageReadSettings(Settings, frozen=True, kw_only=True):
    """Blocks and threads."""

    directory: Annotated[str, Setting("folder on the disk to measure", metavar="DIR")] = "."
    blocks: Annotated[int, Setting("blocks of each size", ge=1)] = 200
    block_bytes: Annotated[tuple[int, ...], Setting("sizes of a block", ge=1)] = (
        1_474_560,
        2_555_904,
    )
    threads: Annotated[
        tuple[int, ...], Setting("numbers of reading threads", ge=1, le=BATCH_BLOCKS)
    ] = (1, 4, DEFAULT_PARALLEL_READS)
    repeat: Annotated[int, Setting("rounds", ge=1)] = 5


class Bench:
    """Stored blocks of one size and a buffer of ``BATCH_BLOCKS`` slots to read them into."""

    def __init__(self, root: Path, block_bytes: int, blocks: int) -> None:
        self.geometry = BlockGeometry.uniform(
            layers=1, block_tokens=64, layer_block_bytes=block_bytes
        )
        self.namespace = StoreNamespace("benchmark", "bfloat16", "NHD", self.geometry)
        self.digest = self.namespace.digest()
        self.root = root
        self.keys: list[BlockKey] = block_keys(range(64 * blocks), 64)
        self.slot_bytes = HEADER_BYTES + block_bytes
        self.memory: RegisteredMemory = allocate_registered(BATCH_BLOCKS * self.slot_bytes)
        self.headers = [
            self.memory.view(i * self.slot_bytes, HEADER_BYTES) for i in range(BATCH_BLOCKS)
        ]
        self.slots = [
            self.memory.view(i * self.slot_bytes + HEADER_BYTES, block_bytes)
            for i in range(BATCH_BLOCKS)
        ]
        self.writer = PosixStorage(root, self.namespace, sync=True)
        payload = np.random.default_rng(0).integers(0, 256, block_bytes, dtype=np.uint8)
        for key in self.keys:
            payload[:32] = np.frombuffer(key, dtype=np.uint8)
            self.writer.write([key], [payload.data])

    def drop_cache(self) -> None:
        """Make the next read of every block come from the disk."""
        for key in self.keys:
            descriptor = os.open(self.writer.block_path(key), os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def batches(self) -> list[list[BlockKey]]:
        """Split the keys into runs that fit the buffer."""
        return [self.keys[i : i + BATCH_BLOCKS] for i in range(0, len(self.keys), BATCH_BLOCKS)]

    def posix(self, *, direct: bool, threads: int, reader: FileReader | None = None) -> Method:
        """Read through ``PosixStorage`` like engines: ``threads``, each one block at a time."""
        storage = PosixStorage(self.root, self.namespace, direct_io=direct, reader=reader)

        def read_every(thread: int) -> int:
            keys = self.keys[thread::threads]
            return sum(storage.read(key, self.slots[thread]).is_good for key in keys)

        def read_all() -> int:
            with ThreadPoolExecutor(threads) as pool:
                return sum(pool.map(read_every, range(threads)))

        return read_all

    def uring(self, depth: int) -> Method:
        """Read with one thread through io_uring, ``depth`` blocks at a time, and verify each."""
        from dualpath_lab.benchmarks.storage_uring import UringReader

        slots = [self.memory.view(i * self.slot_bytes, self.slot_bytes) for i in range(depth)]
        reader = UringReader(slots, lambda key: str(self.writer.block_path(key)), self.is_good)
        return lambda: reader.read_all(self.keys)

    def is_good(self, key: BlockKey, slot: int) -> bool:
        """Verify the block in a slot."""
        payload = Sections([self.slots[slot]])
        return block_file.defect(key, self.digest, self.headers[slot], payload) is None

    def nixl(self, queue: PosixQueue, *, direct: bool = True, verified: bool = True) -> Method:
        """Read header and payload as one NIXL request per batch, then verify."""
        name = f"bench-{queue}-{direct}-{verified}-{self.slot_bytes}"
        reader = RawFileReader(self.memory, name=name, queue=queue, direct=direct)

        def read_batch(batch: list[BlockKey]) -> int:
            paths = [str(self.writer.block_path(key)) for key in batch]
            slots = [self.memory.address + i * self.slot_bytes for i in range(len(batch))]
            reader.read(
                [FileRead(p, slot, self.slot_bytes) for p, slot in zip(paths, slots, strict=True)]
            )
            return sum(not verified or self.is_good(key, i) for i, key in enumerate(batch))

        return lambda: sum(read_batch(batch) for batch in self.batches())


def measure(bench: Bench, method: Method) -> Numbers:
    """Read all blocks cold with one method."""
    total_bytes = len(bench.keys) * bench.geometry.full_block_bytes
    bench.drop_cache()
    start_cpu_s, start_s = own_cpu_s(), time.perf_counter()
    good = method()
    wall_s, used_s = time.perf_counter() - start_s, own_cpu_s() - start_cpu_s
    if good != len(bench.keys):
        raise StorageError(f"{good} of {len(bench.keys)} blocks are good; the disk is defective")
    return {"mb_per_s": total_bytes / wall_s / 1e6, "cpu_s_per_gb": used_s / total_bytes * 1e9}


Open = Callable[[Bench], Method]


def methods_of(readers: Sequence[int]) -> dict[str, Open]:
    """Return all methods available here by name; ``readers``: numbers of threads."""
    most = DEFAULT_PARALLEL_READS
    methods: dict[str, Open] = {
        f"preadv {'direct' if direct else 'cached'} x{threads}": partial(
            Bench.posix, direct=direct, threads=threads
        )
        for direct in (True, False)
        for threads in readers
    }
    methods[f"preadv direct x{most}, whole blocks"] = lambda bench: bench.posix(
        direct=True, threads=most, reader=KernelReader(piece_bytes=1 << 30)
    )
    if importlib.util.find_spec("liburing"):
        methods["io_uring direct x1"] = partial(Bench.uring, depth=most)
    queues: tuple[PosixQueue, ...] = ("aio", "uring")
    for queue in queues:
        methods[f"NixlReader {queue} direct x{most}"] = lambda bench, queue=queue: bench.posix(
            direct=True, threads=most, reader=NixlReader("POSIX", {f"use_{queue}": "true"})
        )  # type: ignore[misc]
        methods[f"nixl {queue} direct"] = partial(Bench.nixl, queue=queue)
        not_verified = partial(Bench.nixl, queue=queue, verified=False)
        methods[f"nixl {queue} direct, not verified"] = not_verified
    methods["nixl aio cached"] = partial(Bench.nixl, queue="aio", direct=False)
    return methods


class Read(NamedTuple):
    """A method for blocks of one size."""

    method: str
    block_bytes: int

    @property
    def name(self) -> str:
        """Name of its runs."""
        return f"{self.method}, {self.block_bytes} bytes"


def _stages(settings: StorageReadSettings, progress: Progress) -> Iterator[Stage[Read, Numbers]]:
    methods = methods_of(sorted({*settings.threads, DEFAULT_PARALLEL_READS}))
    for block_bytes in settings.block_bytes:
        cells = [Read(method, block_bytes) for method in methods]
        opened = partial(_bench, settings, methods, block_bytes)
        yield Stage({read.name: read for read in cells}, opened)


@contextmanager
def _bench(
    settings: StorageReadSettings, methods: Mapping[str, Open], block_bytes: int
) -> Iterator[Measure[Read, Numbers]]:
    Path(settings.directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.directory) as root:
        bench = Bench(Path(root), block_bytes, settings.blocks)
        opened: dict[str, Method] = {}

        def run(read: Read, number: int) -> Numbers:
            if read.method not in opened:
                opened[read.method] = methods[read.method](bench)
                measure(bench, opened[read.method])  # warms up
            return measure(bench, opened[read.method])

        yield run


_COLUMNS = [
    Column("MB/s", "mb_per_s", "{:.0f}"),
    Column("min", "mb_per_s", "{:.0f}", of=min),
    Column("max", "mb_per_s", "{:.0f}", of=max),
    Column("CPU s/GB", "cpu_s_per_gb", "{:.3f}", tolerance=0.15),
]


def draw(raw: RawData[StorageReadSettings, Numbers]) -> Page:
    """Draw rates and CPU time, and the ratios to the default within a round."""
    ratios = [
        KeyResult(
            f"{read.name}: rate / default",
            raw.ratio(read.name, Read(DEFAULT, size).name, lambda one: one["mb_per_s"]),
            tolerance=0.1,
            any_machine=True,
        )
        for size in raw.settings.block_bytes
        for read in (Read(name.rpartition(f", {size}")[0], size) for name in raw.cells)
        if read.name in raw.cells and read.method != DEFAULT
    ]
    rows = tuple((one.what, cell(one.measured, "{:.2f}")) for one in ratios)
    return Page(
        settings=(f"{raw.settings.blocks} blocks of each size, read cold.",),
        tables=(
            number_table(raw, "Reads into registered memory", _COLUMNS, "method"),
            Table("Relative to the default, within a round", ("method", "ratio"), rows),
        ),
        results=(*key_results(raw, _COLUMNS), *ratios),
    )


STORAGE_READ = Experiment(
    name="storage-read",
    title="Methods to read stored Full Blocks",
    settings=StorageReadSettings(),
    result=Numbers,
    stages=_stages,
    draw=draw,
    summary=lambda found: f"{found['mb_per_s']:.0f} MB/s",
    packages=("dualpath", "nixl-cu12", "nixl-cu13", "liburing"),
)
