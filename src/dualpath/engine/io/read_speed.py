"""Measurement of the read rate of an engine's storage before it joins; α depends on it (§A.4).

Blocks of a separate namespace are read as by the read queue: several at a time, each verified.
They are written at the first start and are not removed, so that later starts only read.
"""

import hashlib
import logging
import mmap
import os
import queue

from dualpath.core.blocks import BlockKey
from dualpath.core.errors import StorageError
from dualpath.core.rates import Rate, RateOrigin
from dualpath.engine.threads import Threads
from dualpath.storage.contract import BlockStorage

log = logging.getLogger(__name__)

#: The model name of the namespace of the probe's blocks.
PROBE_MODEL = "dualpath-read-probe"
#: Maximum bytes read, in blocks of the engine's size.
PROBE_BYTES = 64 << 20
MAX_BLOCKS = 64
#: No further read is started after this time.
BUDGET_S = 1.0
#: Time limit of the measurement, writes included.
LIMIT_S = 10.0


def measure(storage: BlockStorage, readers: int, threads: Threads) -> Rate | None:
    """Return the payload per second of ``readers`` concurrent readers, None if it fails.

    ``storage`` has a namespace in which no engine stores KV; it is closed at the end.
    """
    found: list[float] = []

    def probe() -> None:
        try:
            _write(storage)
            found.append(_read(storage, readers, threads))
        except StorageError as error:
            log.warning("the read rate is not measured, no block can be written: %s", error)
        finally:
            storage.close()

    probing = threads.start("read-probe", probe)
    probing.join(LIMIT_S)
    if probing.is_alive():
        log.warning("the read rate is not measured: storage does not respond within %g s", LIMIT_S)
    per_s = found[0] if found else 0.0
    return Rate(per_s, RateOrigin.MEASURED) if per_s > 0 else None


def _keys(storage: BlockStorage) -> list[BlockKey]:
    blocks = min(max(PROBE_BYTES // storage.geometry.full_block_bytes, 2), MAX_BLOCKS)
    return [hashlib.sha256(f"{PROBE_MODEL} {n}".encode()).digest() for n in range(blocks)]


def _write(storage: BlockStorage) -> None:
    content = memoryview(os.urandom(storage.geometry.full_block_bytes))
    keys = _keys(storage)
    storage.write(keys, [content] * len(keys))


def _read(storage: BlockStorage, readers: int, threads: Threads) -> float:
    """Return verified bytes per second."""
    waiting: queue.SimpleQueue[BlockKey] = queue.SimpleQueue()
    for key in _keys(storage):
        waiting.put(key)
    began_ns, read_bytes = threads.now_ns(), []

    def read() -> None:
        with (
            mmap.mmap(-1, storage.geometry.full_block_bytes) as buffer,
            memoryview(buffer) as view,
        ):
            while threads.now_ns() - began_ns < BUDGET_S * 1e9:
                try:
                    outcome = storage.read(waiting.get_nowait(), view)
                except queue.Empty:
                    return
                if outcome.is_good:
                    read_bytes.append(outcome.bytes_read)

    for reader in [threads.start(f"read-probe-{n}", read) for n in range(readers)]:
        reader.join(LIMIT_S)
    return sum(read_bytes) * 1e9 / max(threads.now_ns() - began_ns, 1)
