"""Measure READ and WRITE of Layer Blocks between two processes over NIXL.

    python -m dualpath_lab.benchmarks.transfer_speed [--tls tcp --tls posix,cma,tcp,self] [--rounds
    3]

The target sleeps in a pipe read and makes no calls.  Latency is measured with one transfer at a
time, the rate with four in flight.  The initiator polls every 50 µs.  CPU time is that of both
processes per transferred GB.  Settings are interleaved in each round; the table shows medians.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath.transport.contract import Direction, RegionInfo, Transfer, TransferState
from dualpath.transport.memory import RegisteredMemory, allocate_registered
from dualpath.transport.nixl import NixlTransport

PIECE_BYTES = 48 * 1024
PIECES = 100
POOL_PIECES = 1000
POLL_S = 50e-6


class Setting(NamedTuple):
    """One row of the table."""

    tls: str
    delay_us: int
    direction: str


class Result(NamedTuple):
    """One measurement."""

    small_ms: float
    large_ms: float
    large_p99_ms: float
    gb_per_s: float
    cpu_s_per_gb: float


def open_transport(name: str, delay_us: int) -> tuple[NixlTransport, RegisteredMemory]:
    transport = NixlTransport(name, progress_delay_us=delay_us)
    memory = allocate_registered(2 * POOL_PIECES * PIECE_BYTES)
    memory.array[:] = 1
    region = RegionInfo("kv", memory.address, 2 * PIECE_BYTES, PIECE_BYTES, POOL_PIECES)
    transport.register(region, memory)
    return transport, memory


def peer(control: Connection, delay_us: int) -> None:
    transport, _ = open_transport(f"peer-{os.getpid()}", delay_us)
    control.send(transport.info())
    while control.recv() is not None:
        control.send(time.process_time())
    transport.close()


def finish(transfer: Transfer) -> None:
    while transfer.poll() is TransferState.MOVING:
        time.sleep(POLL_S)
    assert transfer.poll() is TransferState.DONE, transfer.error()
    transfer.release()


def initiator(control: Connection, delay_us: int, peer_control: Connection) -> None:
    transport, _ = open_transport(f"initiator-{os.getpid()}", delay_us)
    info = peer_control.recv()
    transport.connect(info)
    for direction in Direction:
        start = itertools.count()

        def post(pieces: int, direction: Direction = direction) -> Transfer:
            offset = next(start) * 7 % (POOL_PIECES - pieces)  # noqa: B023 - used within the loop
            indices = range(offset, offset + pieces)
            return transport.post(direction, "kv", indices, info.agent, "kv", indices)

        def latencies_ms(pieces: int, repeats: int) -> list[float]:
            found = []
            for _ in range(repeats):
                start_s = time.perf_counter()
                finish(post(pieces))
                found.append((time.perf_counter() - start_s) * 1e3)
            return sorted(found)

        latencies_ms(PIECES, 5)
        small, large = latencies_ms(1, 200), latencies_ms(PIECES, 60)
        control.send((direction.value, small[100], large[30], large[58]))
        control.send(rate(post, peer_control))
    transport.close()
    control.send(None)


def rate(post: "object", peer_control: Connection) -> tuple[float, float]:
    """Return GB/s and CPU s/GB with four transfers in flight."""
    assert callable(post)
    peer_control.send("cpu")
    peer_start_s = peer_control.recv()
    cpu_start_s, start_s = time.process_time(), time.perf_counter()
    moved_bytes, flying = 0, [post(PIECES) for _ in range(4)]
    while time.perf_counter() - start_s < 1.0:
        finish(flying.pop(0))
        moved_bytes += PIECES * PIECE_BYTES
        flying.append(post(PIECES))
    wall_s = time.perf_counter() - start_s
    for transfer in flying:
        finish(transfer)
    own_s = time.process_time() - cpu_start_s
    peer_control.send("cpu")
    gigabytes = moved_bytes / 1e9
    return gigabytes / wall_s, (own_s + peer_control.recv() - peer_start_s) / gigabytes


def run_pair(tls: str, delay_us: int) -> dict[Setting, Result]:
    os.environ["UCX_TLS"] = tls
    if not tls:
        del os.environ["UCX_TLS"]
    spawn = multiprocessing.get_context("spawn")
    peer_here, peer_there = spawn.Pipe()
    here, there = spawn.Pipe()
    target = spawn.Process(target=peer, args=(peer_there, delay_us), daemon=True)
    source = spawn.Process(target=initiator, args=(there, delay_us, peer_here), daemon=True)
    target.start()
    source.start()
    results = {}
    while (latency := here.recv()) is not None:
        direction, small_ms, large_ms, p99_ms = latency
        results[Setting(tls or "(UCX chooses)", delay_us, direction)] = Result(
            small_ms, large_ms, p99_ms, *here.recv()
        )
    source.join()
    peer_here.send(None)
    target.join()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tls", action="append", help="UCX_TLS to measure; repeat; '' = UCX's")
    parser.add_argument("--delay-us", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[Setting, list[Result]] = {}
    for number in range(arguments.rounds):
        for tls, delay_us in itertools.product(
            arguments.tls or ["", "tcp"], arguments.delay_us or [0, 100, 1000]
        ):
            for setting, result in run_pair(tls, delay_us).items():
                found.setdefault(setting, []).append(result)
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    rows = []
    for setting, results in found.items():
        medians = (statistics.median(column) for column in zip(*results, strict=True))
        numbers = (f"{median:.2f}" for median in medians)
        rows.append((setting.tls, str(setting.delay_us), setting.direction, *numbers))
    title = f"{PIECES} pieces of {PIECE_BYTES} bytes"
    columns = (
        *("UCX_TLS", "delay µs", "direction", "1 piece, ms", f"{PIECES}, ms", "p99, ms"),
        *("GB/s", "CPU s/GB"),
    )
    print(markdown.table(Table(title, columns, tuple(rows))))


if __name__ == "__main__":
    main()
