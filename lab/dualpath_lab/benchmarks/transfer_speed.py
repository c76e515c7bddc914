"""Measure READ and WRITE of Layer Blocks between two processes over NIXL.

The target sleeps in a pipe read and makes no calls.  Latency is measured with one transfer at a
time, the rate with four in flight.  The initiator polls every 50 µs.  CPU time is that of both
processes per transferred GB.
"""

import itertools
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Annotated, NamedTuple

from dualpath.core.settings import Setting, Settings
from dualpath.transport.contract import Direction, RegionInfo, Transfer, TransferState
from dualpath.transport.memory import RegisteredMemory, allocate_registered
from dualpath.transport.nixl import NixlTransport
from dualpath_sim.harness.experiment import Experiment, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, numbers_page

PIECE_BYTES = 48 * 1024
PIECES = 100
POOL_PIECES = 1000
POLL_S = 50e-6


class TransferSettings(Settings, frozen=True, kw_only=True):
    """UCX transports, and pauses of the progress thread."""

    tls: Annotated[tuple[str, ...], Setting("UCX_TLS to measure; default: UCX's choice")] = (
        "default",
        "tcp",
    )
    delay_us: Annotated[tuple[int, ...], Setting("pauses of the progress thread", ge=0)] = (
        0,
        100,
        1000,
    )
    repeat: Annotated[int, Setting("rounds", ge=1)] = 3


class Pair(NamedTuple):
    """The settings of two processes."""

    tls: str
    delay_us: int


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


def run_pair(pair: Pair, number: int) -> Numbers:
    """Measure both directions between two new processes."""
    os.environ["UCX_TLS"] = pair.tls
    if pair.tls == "default":
        del os.environ["UCX_TLS"]
    spawn = multiprocessing.get_context("spawn")
    peer_here, peer_there = spawn.Pipe()
    here, there = spawn.Pipe()
    target = spawn.Process(target=peer, args=(peer_there, pair.delay_us), daemon=True)
    source = spawn.Process(target=initiator, args=(there, pair.delay_us, peer_here), daemon=True)
    target.start()
    source.start()
    found: Numbers = {}
    while (latency := here.recv()) is not None:
        direction, *milliseconds = latency
        names = ("small_ms", "large_ms", "large_p99_ms", "gb_per_s", "cpu_s_per_gb")
        numbers = zip(names, (*milliseconds, *here.recv()), strict=True)
        found |= {f"{direction} {name}": value for name, value in numbers}
    source.join()
    peer_here.send(None)
    target.join()
    return found


_COLUMNS = [
    Column(f"{direction.value} {head}", f"{direction.value} {number}", tolerance=tolerance)
    for direction in Direction
    for head, number, tolerance in (
        ("1 piece, ms", "small_ms", None),
        (f"{PIECES}, ms", "large_ms", None),
        ("p99, ms", "large_p99_ms", None),
        ("GB/s", "gb_per_s", 0.1),
        ("CPU s/GB", "cpu_s_per_gb", 0.15),
    )
]
TRANSFERS = Experiment(
    name="transfers",
    title="READ and WRITE of Layer Blocks between two processes over NIXL",
    settings=TransferSettings(),
    result=Numbers,
    stages=lambda settings, progress: one_stage(
        {
            f"{tls}, {delay_us} µs": Pair(tls, delay_us)
            for tls in settings.tls
            for delay_us in settings.delay_us
        },
        run_pair,
    ),
    draw=numbers_page(f"{PIECES} pieces of {PIECE_BYTES} bytes", _COLUMNS, "UCX_TLS, delay"),
    packages=("dualpath", "nixl-cu12", "nixl-cu13"),
)
