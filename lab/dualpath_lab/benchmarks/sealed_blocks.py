"""Cost of sealing stored blocks: CPU seconds per GB.

    python -m dualpath_lab.benchmarks.sealed_blocks [--directory DIR] [--rounds 7]

First table: functions that could authenticate or encrypt a block, on one block in memory.  Second:
blocks written and read through ``PosixStorage``, plain, authenticated and encrypted, interleaved in
every round; medians.  The default directory is in memory, so that only CPU time counts; writes
include creating the files.
"""

import argparse
import hashlib
import hmac
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import blake3
import msgspec
import numpy as np
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dualpath.core.blocks import BlockGeometry, Protection, StoreNamespace, block_keys
from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath.storage.posix import PosixStorage
from dualpath.storage.sealed_blocks import KeyRing
from dualpath.transport.memory import allocate_registered

BLOCK_BYTES = 2_555_904
BLOCKS = 32
KEY = bytes(range(32))
KEYS = KeyRing(KEY.hex(), "the benchmark")
NAMESPACE = StoreNamespace(
    "benchmark", "bfloat16", "NHD", BlockGeometry.uniform(39, 64, BLOCK_BYTES // 39)
)


def functions(content: bytes) -> dict[str, Callable[[], object]]:
    """Return functions that authenticate or encrypt ``content``."""
    aes, nonce, into = AESGCM(KEY), bytes(12), bytearray(len(content) + 16)
    return {
        "XXH3-128 (no key)": lambda: xxhash.xxh3_128_digest(content),
        "GMAC": lambda: aes.encrypt(nonce, b"", content),
        "BLAKE3 keyed": lambda: blake3.blake3(content, key=KEY).digest(),
        "HMAC-SHA256": lambda: hmac.digest(KEY, content, "sha256"),
        "BLAKE2b keyed": lambda: hashlib.blake2b(content, key=KEY).digest(),
        "AES-256-GCM": lambda: aes.encrypt_into(nonce, content, b"", into),
    }


def cpu_s_per_gb(run: Callable[[], object], size_bytes: int) -> float:
    start_s = time.process_time()
    run()
    return (time.process_time() - start_s) / size_bytes * 1e9


def alone(rounds: int) -> Table:
    content = np.random.default_rng(0).bytes(BLOCK_BYTES)
    candidates = functions(content)
    costs: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            for_all = cpu_s_per_gb(lambda run=run: [run() for _ in range(10)], 10 * BLOCK_BYTES)
            costs[name].append(for_all)
    rows = tuple((name, f"{statistics.median(found):.3f}") for name, found in costs.items())
    return Table(f"one block of {BLOCK_BYTES} bytes", ("function", "CPU s/GB"), rows)


class Kind:
    """Blocks of one kind, written and read once per round."""

    def __init__(self, root: Path, protection: Protection | None) -> None:
        self.name = "plain" if protection is None else protection.value
        namespace = NAMESPACE
        if protection is not None:
            namespace = msgspec.structs.replace(NAMESPACE, protection=protection)
        self.storage = PosixStorage(root, namespace, keys=KEYS)
        self.writes: list[float] = []
        self.reads: list[float] = []

    def measure(self, number: int, source: memoryview, into: memoryview) -> None:
        """Write and read blocks once, then remove them."""
        keys = block_keys([number] * BLOCKS * 64, 64)
        size_bytes = BLOCKS * BLOCK_BYTES
        sources = [source] * BLOCKS
        self.writes.append(cpu_s_per_gb(lambda: self.storage.write(keys, sources), size_bytes))
        self.reads.append(cpu_s_per_gb(lambda: self._read(keys, into), size_bytes))
        assert into == source
        for key in keys:
            self.storage.block_path(key).unlink()

    def _read(self, keys: list[bytes], into: memoryview) -> None:
        assert all(self.storage.read(key, into).is_good for key in keys)


def stored(rounds: int, directory: Path) -> Table:
    memory = allocate_registered(2 * BLOCK_BYTES)
    source, into = memory.view(0, BLOCK_BYTES), memory.view(BLOCK_BYTES, BLOCK_BYTES)
    source[:] = np.random.default_rng(0).bytes(BLOCK_BYTES)
    with tempfile.TemporaryDirectory(dir=directory) as root:
        kinds = [Kind(Path(root), protection) for protection in (None, *Protection)]
        for number in range(rounds + 1):
            for kind in kinds:
                into[:] = bytes(BLOCK_BYTES)
                kind.measure(number, source, into)
    plain, *_ = kinds
    rows = []
    for kind in kinds:
        cells = [kind.name]
        for costs, base in ((kind.writes, plain.writes), (kind.reads, plain.reads)):
            # The first round, which touches memory for the first time, is left out.
            ratios = [one / other for one, other in zip(costs[1:], base[1:], strict=True)]
            cells += [f"{statistics.median(costs[1:]):.3f}", f"{statistics.median(ratios):.2f}"]
        rows.append(tuple(cells))
    columns = ("blocks", "write, CPU s/GB", "/ plain", "read, CPU s/GB", "/ plain")
    return Table(f"{BLOCKS} blocks of {BLOCK_BYTES} bytes as files", columns, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for table in (alone(arguments.rounds), stored(arguments.rounds, arguments.directory)):
        print(markdown.table(table))


if __name__ == "__main__":
    main()
