"""How fast this engine reads its storage, measured before it joins: α follows from it (§A.4).

Blocks of a namespace of their own are read as the read queue reads: several at a time, each
verified.  They are written at the first start and stay, so that another start only reads.
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

#: Name of the model whose blocks these would be.
PROBE_MODEL = "dualpath-read-probe"
#: Bytes read at most, in blocks of the engine's size.
PROBE_BYTES = 64 << 20
MOST_BLOCKS = 64
#: No further block is begun after these seconds.
BUDGET_S = 1.0
#: A storage that takes longer, the writing included, is not waited for.
LIMIT_S = 10.0


def measure(storage: BlockStorage, readers: int, threads: Threads) -> Rate | None:
    """Return the payload that so many readers get in a second, None if it cannot be said.

    ``storage``, which this closes, is of a namespace in which no engine stores KV.
    """
    found: list[float] = []

    def probe() -> None:
        try:
            _write(storage)
            found.append(_read(storage, readers, threads))
        except StorageError as error:
            log.warning("reading is not measured, no block can be written: %s", error)
        finally:
            storage.close()

    probing = threads.start("read-probe", probe)
    probing.join(LIMIT_S)
    if probing.is_alive():
        log.warning("reading is not measured: storage does not answer within %g s", LIMIT_S)
    per_s = found[0] if found else 0.0
    return Rate(per_s, RateOrigin.MEASURED) if per_s > 0 else None


def _keys(storage: BlockStorage) -> list[BlockKey]:
    blocks = min(max(PROBE_BYTES // storage.geometry.full_block_bytes, 2), MOST_BLOCKS)
    return [hashlib.sha256(f"{PROBE_MODEL} {n}".encode()).digest() for n in range(blocks)]


def _write(storage: BlockStorage) -> None:
    content = memoryview(os.urandom(storage.geometry.full_block_bytes))
    keys = _keys(storage)
    storage.write(keys, [content] * len(keys))


def _read(storage: BlockStorage, readers: int, threads: Threads) -> float:
    """Return good bytes per second."""
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
