"""How much memory unregistered peers can make a router's control socket use, on this machine.

`parts` sends one endless message of empty parts over one connection, `frames` half of a frame of
8 MiB over each of many connections.  Measured is the peak memory of the socket's process.
"""

import asyncio
import multiprocessing
import multiprocessing.connection
import resource
import socket
import time
from typing import Annotated, NamedTuple

import msgspec

from dualpath.core.settings import Setting, Settings
from dualpath.report.model import Table
from dualpath.router.refusals import ControlRefusals
from dualpath.router.scheduler.control_socket import ZmqControlSocket
from dualpath_sim.harness.experiment import Experiment, KeyResult, Page, RawData, one_stage

ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY_BODY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
READY = b"\x04" + bytes([len(READY_BODY)]) + READY_BODY
HALF_BYTES = 4 << 20
LONG_FRAME = ZMTP_GREETING + b"\x06" + (2 * HALF_BYTES - 1).to_bytes(8, "big")


class FloodSettings(Settings, frozen=True, kw_only=True):
    """Amounts that are sent."""

    repeat: Annotated[int, Setting("rounds", ge=1)] = 1
    parts_mib: Annotated[int, Setting("MiB of empty parts", ge=1)] = 48
    frames_mib: Annotated[int, Setting("MiB of half frames", ge=1)] = 512


class Flood(NamedTuple):
    """What is sent, up to ``mib``."""

    kind: str
    mib: int


class FloodResult(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in MiB; ``refused`` counts connections by reason."""

    sent_mib: float
    before_mib: float
    most_mib: float
    refused: dict[str, int]


def peak_mib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def router(pipe: "multiprocessing.connection.Connection[object, object]") -> None:
    """Serve until a message arrives in the pipe; send the port, later memory before and peak."""

    async def serve() -> None:
        control, refusals = ZmqControlSocket(), ControlRefusals()
        pipe.send(await control.open("127.0.0.1", 0, None, refusals))
        before = peak_mib()
        receiving = asyncio.create_task(forever(control))
        await asyncio.to_thread(pipe.recv)
        pipe.send((before, peak_mib(), {str(k): v for k, v in refusals.totals().items() if v}))
        receiving.cancel()

    asyncio.run(serve())


async def forever(control: ZmqControlSocket) -> None:
    """Receive messages."""
    while True:
        await control.receive()


def send(peer: socket.socket, data: bytes) -> int:
    """Send; return the number of bytes, 0 if the other end has closed the connection."""
    try:
        peer.sendall(data)
    except OSError:
        return 0
    return len(data)


def attack(kind: str, port: int, mib: int) -> int:
    """Send up to ``mib``; return the bytes sent."""
    sent, wanted = 0, mib << 20
    peers = []
    while sent < wanted:
        peer = socket.create_connection(("127.0.0.1", port))
        peer.settimeout(2.0)
        peers.append(peer)
        if kind == "frames":
            sent += send(peer, LONG_FRAME + bytes(HALF_BYTES)) or HALF_BYTES
            continue
        send(peer, ZMTP_GREETING + READY)
        peer.recv(
            len(ZMTP_GREETING) + 2 + 41, socket.MSG_WAITALL
        )  # of the other end, which is ready
        while sent < wanted and (more := send(peer, b"\x01\x00" * (1 << 19))):
            sent += more
        break
    time.sleep(2)  # until the other end has read everything
    for peer in peers:
        peer.close()
    return sent


def _run(flood: Flood, number: int) -> FloodResult:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=router, args=(theirs,))
    process.start()
    port = int(str(ours.recv()).rpartition(":")[2])
    sent = attack(flood.kind, port, flood.mib)
    ours.send("end")
    before, most, refused = ours.recv()
    process.terminate()
    return FloodResult(sent_mib=sent / 2**20, before_mib=before, most_mib=most, refused=refused)


def draw(raw: RawData[FloodSettings, FloodResult]) -> Page:
    """Draw the peak memory."""
    rows = tuple(
        (
            run.cell,
            *(f"{mib:.0f}" for mib in (run.result.sent_mib, run.result.before_mib)),
            f"{run.result.most_mib:.0f}",
            ", ".join(f"{why}: {times}" for why, times in run.result.refused.items()),
        )
        for run in raw.runs
    )
    columns = ("kind", "MiB sent", "memory before, MiB", "peak, MiB", "refused")
    return Page(
        tables=(Table("Peak memory of the socket's process", columns, rows),),
        results=tuple(
            KeyResult(
                f"{name}: peak, MiB",
                raw.median(name, lambda r: r.most_mib),
                tolerance=0.25,
                any_machine=True,
            )
            for name in raw.cells
        ),
    )


CONTROL_FLOOD = Experiment(
    name="control-flood",
    title="Memory that unregistered peers can make a control socket use",
    settings=FloodSettings(),
    result=FloodResult,
    stages=lambda settings, progress: one_stage(
        {
            "parts": Flood("parts", settings.parts_mib),
            "frames": Flood("frames", settings.frames_mib),
        },
        _run,
    ),
    draw=draw,
    summary=lambda result: f"{result.before_mib:.0f} -> {result.most_mib:.0f} MiB",
)
