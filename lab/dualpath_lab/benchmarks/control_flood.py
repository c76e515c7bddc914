"""How much memory unregistered peers can make a router's control socket use, on this machine.

    .venv/bin/python -m dualpath_lab.benchmarks.control_flood parts --mib 48
    .venv/bin/python -m dualpath_lab.benchmarks.control_flood frames --mib 512

`parts` sends one endless message of empty parts over one connection, `frames` half of a frame of
8 MiB over each of many connections.  Prints the peak memory of the socket's process.
"""

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import resource
import socket
import time

from dualpath.router.refusals import ControlRefusals
from dualpath.router.scheduler.control_socket import ZmqControlSocket

ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY_BODY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
READY = b"\x04" + bytes([len(READY_BODY)]) + READY_BODY
HALF_BYTES = 4 << 20
LONG_FRAME = ZMTP_GREETING + b"\x06" + (2 * HALF_BYTES - 1).to_bytes(8, "big")


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


def main() -> None:
    """Run one attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("parts", "frames"))
    parser.add_argument("--mib", type=int, default=48)
    args = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=router, args=(theirs,))
    process.start()
    port = int(str(ours.recv()).rpartition(":")[2])
    sent = attack(args.kind, port, args.mib)
    ours.send("end")
    before, most, refused = ours.recv()
    process.terminate()
    print(f"{args.kind}: {sent / 2**20:.0f} MiB sent, {before:.0f} -> {most:.0f} MiB, {refused}")


if __name__ == "__main__":
    main()
