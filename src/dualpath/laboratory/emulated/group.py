"""Ranks of an emulated data-parallel group: they start together, and all end when one ends.

Ranks of real engines compute in lock step with collectives, which fail when a rank ends.  Emulated
ranks do not wait for each other's passes.  Each has a connection to the first rank as long as it
runs, through which they start together and detect that a rank has ended.
"""

import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from dualpath.core.cluster import GroupRank
from dualpath.core.errors import DeadlineError
from dualpath.laboratory.emulated.settings import EmulatedSettings

#: Seconds within which all ranks must connect.
JOIN_TIMEOUT_S = 60.0
_RETRY_S = 0.05
_LINE_BYTES = 1024


def join_group(
    settings: EmulatedSettings,
    lost: Callable[[], None] | None = None,
    timeout_s: float = JOIN_TIMEOUT_S,
) -> GroupRank | None:
    """Wait for the other ranks and agree on the group's name and epoch; None without a group.

    ``lost`` is called once, on a thread, when another rank has ended; by default it sends SIGINT to
    this process.  Raises ``DeadlineError`` if a rank does not connect in time.
    """
    if settings.dp_size == 1:
        return None
    host, _, port = settings.dp_address.rpartition(":")
    end_s = time.monotonic() + timeout_s
    try:
        if settings.dp_rank == 0:
            start = f"{settings.engine.engine_id}\t{uuid.uuid4().hex[:12]}"
            peers = _accept_ranks((host, int(port)), settings.dp_size - 1, start, end_s)
        else:
            peer, start = _connect_to_first((host, int(port)), end_s)
            peers = [peer]
    except (OSError, TimeoutError) as error:
        raise DeadlineError(
            f"rank {settings.dp_rank} of {settings.dp_size} could not connect to the others at "
            f"{settings.dp_address} within {timeout_s:g} s ({error}); start all of them"
        ) from error
    _watch(peers, lost or _end)
    group, _, epoch = start.partition("\t")
    return GroupRank(group, epoch, settings.dp_rank, settings.dp_size)


def _accept_ranks(
    address: tuple[str, int], others: int, start: str, end_s: float
) -> Sequence[socket.socket]:
    # Retried, because a short-lived connection may use the port as its local port.
    with _retry_until(end_s, lambda: socket.create_server(address, backlog=others)) as server:
        peers = []
        for _ in range(others):
            server.settimeout(max(end_s - time.monotonic(), _RETRY_S))
            peers.append(server.accept()[0])
    for peer in peers:
        peer.sendall(f"{start}\n".encode())
    return peers


def _connect_to_first(address: tuple[str, int], end_s: float) -> tuple[socket.socket, str]:
    peer = _retry_until(end_s, lambda: _connect(address))
    peer.settimeout(max(end_s - time.monotonic(), _RETRY_S))
    line = b""
    while not line.endswith(b"\n"):
        if not (received := peer.recv(_LINE_BYTES)):
            raise OSError("the first rank has ended")
        line += received
    return peer, line.decode().rstrip("\n")


def _connect(address: tuple[str, int]) -> socket.socket:
    peer = socket.create_connection(address, timeout=_RETRY_S)
    if peer.getsockname() == peer.getpeername():
        # TCP self-connect: no server listens yet, and the kernel chose this port as local port.
        peer.close()
        raise ConnectionRefusedError("connected to itself")
    return peer


def _retry_until(end_s: float, open_socket: Callable[[], socket.socket]) -> socket.socket:
    while True:
        try:
            return open_socket()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_RETRY_S)


def _watch(peers: Sequence[socket.socket], lost: Callable[[], None]) -> None:
    once = threading.Lock()

    def wait_for_end(peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer.settimeout(None)
            peer.recv(1)  # Peers send nothing: it returns when the peer's process has ended.
        if once.acquire(blocking=False):
            lost()
            # Closing the connections makes the remaining ranks detect the loss, too.
            for each in peers:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    for peer in peers:
        threading.Thread(target=wait_for_end, args=(peer,), name="dp-peer", daemon=True).start()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGINT)
