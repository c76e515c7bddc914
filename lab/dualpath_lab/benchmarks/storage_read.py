"""Compare methods to read stored Full Blocks into registered memory.

    python -m dualpath_lab.benchmarks.storage_read --directory DIR [--blocks 200] [--rounds 5]

Every method reads the same cold blocks (the page cache is dropped before each pass) and verifies
every checksum, except raw NIXL "not verified".  Methods are interleaved in each round, so that a
noisy disk affects all of them; the table shows the median rate, its range, CPU seconds per GB and
the median ratio to the default within a round.  With ``liburing`` installed, one thread also reads
through io_uring.  ``--only`` selects methods, ``--threads`` sets the numbers of threads.
"""

import argparse
import importlib.util
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dualpath.core.blocks import BlockGeometry, BlockKey, StoreNamespace, block_keys
from dualpath.engine.settings import DEFAULT_PARALLEL_READS
from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath.storage import block_file
from dualpath.storage.block_file import HEADER_BYTES, Sections
from dualpath.storage.posix import PosixStorage
from dualpath.storage.readers import FileReader, KernelReader
from dualpath.transport.memory import RegisteredMemory, allocate_registered
from dualpath.transport.nixl_storage import NixlReader
from dualpath_lab.experiments.raw_nixl import FileRead, PosixQueue, RawFileReader

BATCH_BLOCKS = 32
DEFAULT = f"preadv direct x{DEFAULT_PARALLEL_READS}"
Method = Callable[[], int]


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
        from storage_uring import UringReader

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


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(bench: Bench, methods: dict[str, Method], rounds: int) -> None:
    total_bytes = len(bench.keys) * bench.geometry.full_block_bytes
    rates: dict[str, list[float]] = {name: [] for name in methods}
    costs: dict[str, list[float]] = {name: [] for name in methods}
    for round_number in range(rounds + 1):
        for name, method in methods.items():
            bench.drop_cache()
            start_cpu_s, start_s = cpu_s(), time.perf_counter()
            good = method()
            wall_s = time.perf_counter() - start_s
            if good != len(bench.keys):
                raise SystemExit(f"{name}: {good} of {len(bench.keys)} blocks are good")
            if round_number:  # the first round warms up
                rates[name].append(total_bytes / wall_s / 1e6)
                costs[name].append((cpu_s() - start_cpu_s) / total_bytes * 1e9)
        print(f"round {round_number} of {rounds}", file=sys.stderr)
    default = rates[DEFAULT]
    rows = []
    for name, found in rates.items():
        median = statistics.median(found)
        numbers = (f"{rate:.0f}" for rate in (median, min(found), max(found)))
        cost = statistics.median(costs[name])
        ratio = statistics.median(rate / of for rate, of in zip(found, default, strict=True))
        rows.append((name, *numbers, f"{cost:.3f}", f"{ratio:.2f}"))
    title = f"{len(bench.keys)} blocks of {bench.geometry.full_block_bytes} bytes"
    columns = ("method", "MB/s", "min", "max", "CPU s/GB", "ratio")
    print(markdown.table(Table(title, columns, tuple(rows))))


def methods_of(bench: Bench, readers: Sequence[int]) -> dict[str, Method]:
    """Return all methods available here by name; ``readers``: numbers of threads."""
    most = DEFAULT_PARALLEL_READS
    methods = {
        f"preadv {'direct' if direct else 'cached'} x{threads}": bench.posix(
            direct=direct, threads=threads
        )
        for direct in (True, False)
        for threads in readers
    }
    at_once = KernelReader(piece_bytes=1 << 30)
    methods[f"preadv direct x{most}, whole blocks"] = bench.posix(
        direct=True, threads=most, reader=at_once
    )
    if importlib.util.find_spec("liburing"):
        methods["io_uring direct x1"] = bench.uring(most)
    queues: tuple[PosixQueue, ...] = ("aio", "uring")
    for queue in queues:
        reader = NixlReader("POSIX", {f"use_{queue}": "true"})
        through = bench.posix(direct=True, threads=most, reader=reader)
        methods[f"NixlReader {queue} direct x{most}"] = through
        methods[f"nixl {queue} direct"] = bench.nixl(queue)
        methods[f"nixl {queue} direct, not verified"] = bench.nixl(queue, verified=False)
    methods["nixl aio cached"] = bench.nixl("aio", direct=False)
    return methods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[1_474_560, 2_555_904])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, DEFAULT_PARALLEL_READS])
    parser.add_argument("--only", default="", help="only methods with names that contain this")
    arguments = parser.parse_args()
    if not all(1 <= threads <= BATCH_BLOCKS for threads in arguments.threads):
        parser.error(f"--threads {arguments.threads}: each must be between 1 and {BATCH_BLOCKS}")
    readers = sorted({*arguments.threads, DEFAULT_PARALLEL_READS})
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for block_bytes in arguments.block_bytes:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
            bench = Bench(Path(root), block_bytes, arguments.blocks)
            methods = {
                name: method
                for name, method in methods_of(bench, readers).items()
                if arguments.only in name or name == DEFAULT
            }
            measure(bench, methods, arguments.rounds)


if __name__ == "__main__":
    main()
