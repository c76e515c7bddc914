"""Measure READ and WRITE of Layer Blocks between two processes, over NIXL and in shared memory.

The target sleeps in a pipe read and makes no calls.  Latency is measured with one transfer at a
time, the rate with four in flight.  The initiator polls every 50 µs.  CPU time is that of both
processes per transferred GB.
"""

import itertools
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from operator import itemgetter
from typing import Annotated, NamedTuple

from dualpath.core.settings import Setting, Settings
from dualpath.node.host_process import has_exited, this_process
from dualpath.report.model import Table, cell
from dualpath.transport.contract import Direction, RegionInfo, Transfer, TransferState, Transport
from dualpath.transport.memory import RegisteredMemory, allocate_registered, allocate_shared
from dualpath.transport.nixl import NixlTransport
from dualpath.transport.shared_memory import SharedMemoryTransport
from dualpath_sim.harness.experiment import Experiment, KeyResult, Page, RawData, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table, numbers_page

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
    """The settings of two processes; ``shared``: no NIXL, one maps the other's memory.

    A transfer has ``pieces`` of ``piece_bytes``, out of ``pool_pieces``; the next transfer begins
    ``step_pieces`` later.
    """

    tls: str = "default"
    delay_us: int = 1000
    shared: bool = False
    piece_bytes: int = PIECE_BYTES
    pieces: int = PIECES
    pool_pieces: int = POOL_PIECES
    step_pieces: int = 7


def open_transport(name: str, pair: Pair, memory: RegisteredMemory) -> Transport:
    """Return a transport with a region of every second piece of ``memory``."""
    transport: Transport = (
        SharedMemoryTransport(name, this_process(), has_exited)
        if pair.shared
        else NixlTransport(name, progress_delay_us=pair.delay_us)
    )
    memory.array[:] = 1
    size = pair.piece_bytes
    transport.register(RegionInfo("kv", memory.address, 2 * size, size, pair.pool_pieces), memory)
    return transport


def peer(control: Connection, pair: Pair) -> None:
    size_bytes = 2 * pair.pool_pieces * pair.piece_bytes
    memory = allocate_shared(size_bytes) if pair.shared else allocate_registered(size_bytes)
    transport = open_transport(f"peer-{os.getpid()}", pair, memory)
    control.send(transport.info())
    while control.recv() is not None:
        control.send(time.process_time())
    transport.close()


def finish(transfer: Transfer) -> None:
    while transfer.poll() is TransferState.MOVING:
        time.sleep(POLL_S)
    assert transfer.poll() is TransferState.DONE, transfer.error()
    transfer.release()


def initiator(control: Connection, pair: Pair, peer_control: Connection) -> None:
    memory = allocate_registered(2 * pair.pool_pieces * pair.piece_bytes)
    transport = open_transport(f"initiator-{os.getpid()}", pair, memory)
    info = peer_control.recv()
    transport.connect(info)
    for direction in Direction:
        start = itertools.count()

        def post(pieces: int, direction: Direction = direction) -> Transfer:
            offset = next(start) * pair.step_pieces % (pair.pool_pieces - pieces)  # noqa: B023 - used within the loop
            indices = range(offset, offset + pieces)
            return transport.post(direction, "kv", indices, info.agent, "kv", indices)

        def latencies_ms(pieces: int, repeats: int) -> list[float]:
            found = []
            for _ in range(repeats):
                start_s = time.perf_counter()
                finish(post(pieces))
                found.append((time.perf_counter() - start_s) * 1e3)
            return sorted(found)

        latencies_ms(pair.pieces, 5)
        small, large = latencies_ms(1, 200), latencies_ms(pair.pieces, 60)
        control.send((direction.value, small[100], large[30], large[58]))
        control.send(rate(post, pair, peer_control))
    transport.close()
    control.send(None)


def rate(post: "object", pair: Pair, peer_control: Connection) -> tuple[float, float]:
    """Return GB/s and CPU s/GB with four transfers in flight."""
    assert callable(post)
    peer_control.send("cpu")
    peer_start_s = peer_control.recv()
    cpu_start_s, start_s = time.process_time(), time.perf_counter()
    moved_bytes, flying = 0, [post(pair.pieces) for _ in range(4)]
    while time.perf_counter() - start_s < 1.0:
        finish(flying.pop(0))
        moved_bytes += pair.pieces * pair.piece_bytes
        flying.append(post(pair.pieces))
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
    target = spawn.Process(target=peer, args=(peer_there, pair), daemon=True)
    source = spawn.Process(target=initiator, args=(there, pair, peer_here), daemon=True)
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


# ------------------------------------------------------------------------- engines of one machine

#: Bytes of a transfer, and of the pieces that transfers are taken from.
_TRANSFER_BYTES, _POOL_BYTES = 8 << 20, 128 << 20
_KIB = 1024
_CPU = "CPU s/GB"


class OneMachineSettings(Settings, frozen=True, kw_only=True):
    """Sizes of pieces."""

    piece_kib: Annotated[tuple[int, ...], Setting("sizes of a piece in KiB", ge=1, le=4096)] = (
        64,
        1024,
    )
    repeat: Annotated[int, Setting("rounds", ge=1)] = 7


def _one_machine_cells(settings: OneMachineSettings) -> dict[str, Pair]:
    return {
        name: Pair(
            shared=shared,
            piece_bytes=kib * _KIB,
            pieces=_TRANSFER_BYTES // (kib * _KIB),
            pool_pieces=_POOL_BYTES // (kib * _KIB),
            # No transfer has bytes of the one before, which caches may still have.
            step_pieces=_TRANSFER_BYTES // (kib * _KIB),
        )
        for kib in settings.piece_kib
        for shared, name in ((False, _nixl(kib)), (True, _shared(kib)))
    }


def _nixl(kib: int) -> str:
    return f"NIXL, {kib} KiB"


def _shared(kib: int) -> str:
    return f"shared memory, {kib} KiB"


_ONE_MACHINE_COLUMNS = [
    Column(f"{direction.value} {head}", f"{direction.value} {number}", tolerance=tolerance)
    for direction in Direction
    for head, number, tolerance in (
        (f"{_TRANSFER_BYTES >> 20} MiB, ms", "large_ms", None),
        ("GB/s", "gb_per_s", None),
        (_CPU, "cpu_s_per_gb", 0.2),
    )
]


def _draw_one_machine(raw: RawData[OneMachineSettings, Numbers]) -> Page:
    """Draw rates and processor time, and shared memory relative to NIXL within a round."""
    ratios = {
        (kib, direction.value, head): raw.ratio(
            _shared(kib), _nixl(kib), itemgetter(f"{direction.value} {number}")
        )
        for kib in raw.settings.piece_kib
        for direction in Direction
        for head, number in (("GB/s", "gb_per_s"), (_CPU, "cpu_s_per_gb"))
    }
    relative = tuple(
        (f"{kib} KiB", f"{direction} {head}", cell(ratio, "{:.2f}"))
        for (kib, direction, head), ratio in ratios.items()
    )
    # Rates depend on what else the machine does, so that a rerun is compared by its CPU time.
    results = [
        KeyResult(
            f"{kib} KiB: {direction} {head}, shared memory / NIXL",
            ratio,
            tolerance=0.25,
            any_machine=True,
        )
        for (kib, direction, head), ratio in ratios.items()
        if head == _CPU
    ]
    return Page(
        settings=(
            f"Transfers of {_TRANSFER_BYTES >> 20} MiB between two processes, four in flight; UCX "
            "chooses its transports; medians of all rounds.",
        ),
        tables=(
            number_table(raw, "Between two processes of one machine", _ONE_MACHINE_COLUMNS, "path"),
            Table(
                "Shared memory to NIXL, within a round",
                ("pieces", "number", "ratio"),
                relative,
                align="llr",
            ),
        ),
        results=(*key_results(raw, _ONE_MACHINE_COLUMNS), *results),
    )


ONE_MACHINE = Experiment(
    name="one-machine",
    title="Transfers between engines of one machine: shared memory beside NIXL",
    settings=OneMachineSettings(),
    result=Numbers,
    stages=lambda settings, progress: one_stage(_one_machine_cells(settings), run_pair),
    draw=_draw_one_machine,
    packages=("dualpath", "nixl-cu12"),
)
