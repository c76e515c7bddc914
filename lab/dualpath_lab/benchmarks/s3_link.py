"""How well one node uses a shaped SNIC to a real S3 server, in its own lab.

    python -m dualpath_lab.benchmarks.s3_link [--mb-per-s 50 200] [--rounds 3]        (root, rclone)

A process on the node reads Full Blocks through ``S3Storage`` for some seconds, with several threads
like an engine, and verifies each.  Rate: payload over wall time; CPU: user and system time of the
reader and of the server.  Shown are the median of the rounds and the range of the rates.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.engine.settings import DEFAULT_PARALLEL_READS
from dualpath.launch.process import all_processes
from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath.storage.factory import open_storage
from dualpath.transport.memory import allocate_registered
from dualpath_lab.experiments.machine_load import process_cpu_s
from dualpath_lab.nodes.cluster import (
    LabState,
    enter_node,
    lab_nodes,
    node_environment,
    storage_url,
)
from dualpath_lab.nodes.janitor import temporary_lab
from dualpath_lab.nodes.settings import LabSettings, StorageServer
from dualpath_lab.nodes.steps import server_marker

BLOCK_BYTES = 2_555_904
BLOCKS = 32
SECONDS = 4.0
LAB = "s3link"


def read_blocks(url: str, threads: int) -> dict[str, float]:
    """Write the blocks if they are missing, then read them repeatedly for ``SECONDS``."""
    geometry = BlockGeometry.uniform(layers=1, block_tokens=64, layer_block_bytes=BLOCK_BYTES)
    storage = open_storage(url, StoreNamespace("benchmark", "bfloat16", "NHD", geometry))
    keys = block_keys(range(64 * BLOCKS), 64)
    content = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    for key in keys:
        storage.write([key], [content.data])
    memory = allocate_registered(threads * BLOCK_BYTES)
    storage.read(keys[0], memory.view(0, BLOCK_BYTES))
    start_cpu_s, start_s = cpu_s(), time.perf_counter()

    def read_on(thread: int) -> int:
        slot = memory.view(thread * BLOCK_BYTES, BLOCK_BYTES)
        read_bytes = 0
        for key in itertools.cycle(keys[thread:] + keys[:thread]):
            if time.perf_counter() - start_s >= SECONDS:
                break
            outcome = storage.read(key, slot)
            if not outcome.is_good:
                raise SystemExit(f"read ended: {outcome.reason}")
            read_bytes += outcome.bytes_read
        return read_bytes

    with ThreadPoolExecutor(threads) as pool:
        read_bytes = sum(pool.map(read_on, range(threads)))
    wall_s, used_s = time.perf_counter() - start_s, cpu_s() - start_cpu_s
    storage.close()
    return {"bytes": read_bytes, "wall_s": wall_s, "cpu_s": used_s}


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def server_cpu_s() -> float:
    """Return the CPU time of the lab's S3 server so far."""
    marker = server_marker(LAB).encode()
    for process_id, _ in all_processes():
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
            if marker in arguments:
                return process_cpu_s(process_id)
    raise SystemExit("the server has exited")


def measure(state: LabState, threads: int) -> tuple[float, float, float]:
    """Run one round; return bytes/s, and CPU seconds per GB of reader and server."""
    before_s = server_cpu_s()
    done = subprocess.run(
        enter_node(
            state,
            lab_nodes(state)[0],
            (sys.executable, __file__, "--read", storage_url(state), "--threads", str(threads)),
        ),
        env={**os.environ, **node_environment(state)},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    gigabytes = found["bytes"] / 1e9
    served_s = server_cpu_s() - before_s
    return found["bytes"] / found["wall_s"], found["cpu_s"] / gigabytes, served_s / gigabytes


def row(mb_per_s: float, rounds: int, threads: int) -> tuple[str, ...]:
    """Measure one rate of the link and return its row."""
    lab = LabSettings(name=LAB, snic_bytes_per_s=mb_per_s * 1e6, storage_server=StorageServer.S3)
    with temporary_lab(lab) as state:
        found = [measure(state, threads) for _ in range(rounds + 1)][1:]
    rates = [rate / (mb_per_s * 1e6) for rate, _, _ in found]
    reader, server = (statistics.median(round_[i] for round_ in found) for i in (1, 2))
    return (
        f"{mb_per_s:.0f}",
        str(threads),
        *(f"{rate:.1%}" for rate in (statistics.median(rates), min(rates), max(rates))),
        f"{reader:.2f}",
        f"{server:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mb-per-s", type=float, nargs="+", default=[50, 200])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=DEFAULT_PARALLEL_READS, help="blocks read at a time"
    )
    parser.add_argument("--read", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(read_blocks(arguments.read, arguments.threads)))
        return
    columns = ("SNIC MB/s", "threads", "of link", "min", "max", "reader CPU s/GB", "server")
    rows = [row(mb_per_s, arguments.rounds, arguments.threads) for mb_per_s in arguments.mb_per_s]
    print(markdown.table(Table("", columns, tuple(rows))))


if __name__ == "__main__":
    main()
