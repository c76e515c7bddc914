"""Compare ways to read stored Full Blocks into registered memory, side by side in one run.

    python benchmarks/storage_read.py --directory DIR [--blocks 200] [--rounds 5]

Every method reads the same cold blocks (the page cache is dropped before each pass) and verifies
every checksum.  Methods take turns in each round, so that a noisy disk hits all of them; the table
shows the median rate, its range, CPU seconds per GB and the ratio to the default.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dualpath.core.blocks import BlockGeometry, BlockKey, StoreNamespace, block_keys
from dualpath.engine.settings import DEFAULT_PARALLEL_READS
from dualpath.laboratory.experiments.raw_nixl import FileRead, RawFileReader
from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath.storage import block_file
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.posix import PosixStorage
from dualpath.storage.reading import FileReader
from dualpath.storage.sections import Sections
from dualpath.transport.memory import RegisteredMemory, allocate_registered
from dualpath.transport.nixl_storage import NixlReader

BATCH_BLOCKS = 32
Method = Callable[[], int]


class Bench:
    """Stored blocks of one size and a buffer of ``BATCH_BLOCKS`` slots to read them into."""

    def __init__(self, root: Path, block_bytes: int, blocks: int) -> None:
        self.geometry = BlockGeometry.uniform(
            layers=1, block_tokens=64, layer_block_bytes=block_bytes
        )
        self.namespace = StoreNamespace("benchmark", "bfloat16", "NHD", self.geometry)
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
        """Read through ``PosixStorage`` as engines do: ``threads``, each block after block."""
        storage = PosixStorage(self.root, self.namespace, direct_io=direct, reader=reader)

        def read_every(thread: int) -> int:
            keys = self.keys[thread::threads]
            return sum(storage.read(key, self.slots[thread]).is_good for key in keys)

        def read_all() -> int:
            with ThreadPoolExecutor(threads) as pool:
                return sum(pool.map(read_every, range(threads)))

        return read_all

    def nixl(self, *, direct: bool) -> Method:
        """Read header and payload as one NIXL request per batch, then verify."""
        name = f"bench-{direct}-{self.slot_bytes}"
        reader = RawFileReader(self.memory, name=name, direct=direct)
        digest = self.namespace.digest()

        def read_batch(batch: list[BlockKey]) -> int:
            paths = [str(self.writer.block_path(key)) for key in batch]
            slots = [self.memory.address + i * self.slot_bytes for i in range(len(batch))]
            reader.read(
                [FileRead(p, slot, self.slot_bytes) for p, slot in zip(paths, slots, strict=True)]
            )
            return sum(
                block_file.defect(key, digest, self.headers[i], Sections([self.slots[i]])) is None
                for i, key in enumerate(batch)
            )

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
    default = statistics.median(rates[f"preadv direct x{DEFAULT_PARALLEL_READS}"])
    rows = []
    for name, found in rates.items():
        median = statistics.median(found)
        numbers = (f"{rate:.0f}" for rate in (median, min(found), max(found)))
        cost = statistics.median(costs[name])
        rows.append((name, *numbers, f"{cost:.2f}", f"{median / default:.2f}"))
    title = f"{len(bench.keys)} blocks of {bench.geometry.full_block_bytes} bytes"
    columns = ("method", "MB/s", "min", "max", "CPU s/GB", "ratio")
    print(markdown.table(Table(title, columns, tuple(rows))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[1_474_560, 2_555_904])
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for block_bytes in arguments.block_bytes:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
            bench = Bench(Path(root), block_bytes, arguments.blocks)
            methods = {
                f"preadv {'direct' if direct else 'cached'} x{threads}": bench.posix(
                    direct=direct, threads=threads
                )
                for direct in (True, False)
                for threads in (1, 4, DEFAULT_PARALLEL_READS)
            }
            threads = DEFAULT_PARALLEL_READS
            reader = NixlReader("POSIX", {})
            methods[f"nixl+posix direct x{threads}"] = bench.posix(
                direct=True, threads=threads, reader=reader
            )
            methods["nixl aio direct"] = bench.nixl(direct=True)
            methods["nixl aio cached"] = bench.nixl(direct=False)
            measure(bench, methods, arguments.rounds)


if __name__ == "__main__":
    main()
