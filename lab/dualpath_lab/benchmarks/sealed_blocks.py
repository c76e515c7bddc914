"""Cost of sealing stored blocks: CPU seconds per GB.

First table: functions that could authenticate or encrypt a block, on one block in memory.  Second:
blocks written and read through ``PosixStorage``, plain, authenticated and encrypted, interleaved in
every round; medians.  The default directory is in memory, so that only CPU time counts; writes
include creating the files.
"""

import hashlib
import hmac
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import blake3
import msgspec
import numpy as np
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dualpath.core.blocks import BlockGeometry, Protection, StoreNamespace, block_keys
from dualpath.core.settings import Setting, Settings
from dualpath.report.model import Table, cell
from dualpath.storage.posix import PosixStorage
from dualpath.storage.sealed_blocks import KeyRing
from dualpath.transport.memory import allocate_registered
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Measure,
    Page,
    RawData,
    Stage,
    one_stage,
)
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table

BLOCK_BYTES = 2_555_904
BLOCKS = 32
KEY = bytes(range(32))
KEYS = KeyRing(KEY.hex(), "the benchmark")
NAMESPACE = StoreNamespace(
    "benchmark", "bfloat16", "NHD", BlockGeometry.uniform(39, 64, BLOCK_BYTES // 39)
)


PLAIN = "plain blocks"


class SealedSettings(Settings, frozen=True, kw_only=True):
    """Where blocks are stored."""

    directory: Annotated[str, Setting("folder of the blocks; in memory, CPU time alone counts")] = (
        "/dev/shm"
    )
    repeat: Annotated[int, Setting("rounds", ge=1)] = 7


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


def _functions(settings: SealedSettings) -> Stage[Any, Numbers]:
    content = np.random.default_rng(0).bytes(BLOCK_BYTES)

    def cost(run: Callable[[], object], number: int) -> Numbers:
        return {"s_per_gb": cpu_s_per_gb(lambda: [run() for _ in range(10)], 10 * BLOCK_BYTES)}

    return one_stage(functions(content), cost)[0]


class Kind:
    """Blocks of one kind, written and read once per round."""

    def __init__(self, root: Path, protection: Protection | None) -> None:
        namespace = NAMESPACE
        if protection is not None:
            namespace = msgspec.structs.replace(NAMESPACE, protection=protection)
        self.storage = PosixStorage(root, namespace, keys=KEYS)

    def measure(self, number: int, source: memoryview, into: memoryview) -> Numbers:
        """Write and read blocks once, then remove them."""
        keys = block_keys([number] * BLOCKS * 64, 64)
        size_bytes = BLOCKS * BLOCK_BYTES
        sources = [source] * BLOCKS
        found = {
            "write_s_per_gb": cpu_s_per_gb(lambda: self.storage.write(keys, sources), size_bytes),
            "read_s_per_gb": cpu_s_per_gb(lambda: self._read(keys, into), size_bytes),
        }
        assert into == source
        for key in keys:
            self.storage.block_path(key).unlink()
        return found

    def _read(self, keys: list[bytes], into: memoryview) -> None:
        assert all(self.storage.read(key, into).is_good for key in keys)


def _stored(settings: SealedSettings) -> Stage[Any, Numbers]:
    @contextmanager
    def open_storages() -> Iterator[Measure[Protection | None, Numbers]]:
        memory = allocate_registered(2 * BLOCK_BYTES)
        source, into = memory.view(0, BLOCK_BYTES), memory.view(BLOCK_BYTES, BLOCK_BYTES)
        source[:] = np.random.default_rng(0).bytes(BLOCK_BYTES)
        with tempfile.TemporaryDirectory(dir=settings.directory) as root:
            kinds = {kind: Kind(Path(root), kind) for kind in (None, *Protection)}
            for kind in kinds.values():  # touches memory for the first time
                kind.measure(settings.repeat, source, into)

            def run(protection: Protection | None, number: int) -> Numbers:
                into[:] = bytes(BLOCK_BYTES)
                return kinds[protection].measure(number, source, into)

            yield run

    names = {PLAIN: None} | {f"{kind.value} blocks": kind for kind in Protection}
    return Stage(names, open_storages)


def draw(raw: RawData[SealedSettings, Numbers]) -> Page:
    """Draw the functions alone, and the blocks relative to plain ones."""
    function = [Column("CPU s/GB", "s_per_gb", "{:.3f}", tolerance=0.15)]
    blocks = [
        Column("write, CPU s/GB", "write_s_per_gb", "{:.3f}", tolerance=0.25),
        Column("read, CPU s/GB", "read_s_per_gb", "{:.3f}", tolerance=0.25),
    ]
    ratios = [
        KeyResult(
            f"{name}: {what} / plain", raw.ratio(name, PLAIN, lambda one, key=number: one[key]),  # type: ignore[misc]
            tolerance=0.15, any_machine=True,
        )
        for name in raw.cells
        if name != PLAIN and "write_s_per_gb" in raw.of(name)[0]
        for what, number in (("write", "write_s_per_gb"), ("read", "read_s_per_gb"))
    ]  # fmt: skip
    relative = tuple((one.what, cell(one.measured, "{:.2f}")) for one in ratios)
    return Page(
        tables=(
            number_table(raw, f"One block of {BLOCK_BYTES} bytes", function, "function"),
            number_table(raw, f"{BLOCKS} blocks of {BLOCK_BYTES} bytes as files", blocks, "blocks"),
            Table("Relative to plain, within a round", ("blocks", "ratio"), relative),
        ),
        results=(*key_results(raw, [*function, *blocks]), *ratios),
    )


SEALED_CPU = Experiment(
    name="sealed-cpu",
    title="CPU time of sealing stored blocks",
    settings=SealedSettings(),
    result=Numbers,
    stages=lambda settings, progress: [_functions(settings), _stored(settings)],
    draw=draw,
)
