"""Ranks of an emulated data-parallel group: they find each other, and end when one of them ends.

Ranks of real engines compute in lock step through collectives, which fail when a rank is gone.
Emulated ones do not wait for each other's passes.  What they share is their beginning and their
end: each holds a connection to the first rank as long as it lives.
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

#: Within it all ranks must have come.
MEET_S = 60.0
_RETRY_S = 0.05
_LINE_BYTES = 1024


def meet(
    settings: EmulatedSettings, lost: Callable[[], None] | None = None, meet_s: float = MEET_S
) -> GroupRank | None:
    """Wait for the other ranks and agree on this start of the group; None for an engine alone.

    ``lost`` is called once, on a thread, when another rank has ended; by default this process then
    ends as after SIGINT.  Raises ``DeadlineError`` if a rank does not come.
    """
    if settings.dp_size == 1:
        return None
    host, _, port = settings.dp_address.rpartition(":")
    end_s = time.monotonic() + meet_s
    try:
        if settings.dp_rank == 0:
            start = f"{settings.engine.engine_id}\t{uuid.uuid4().hex[:12]}"
            ties = _gather((host, int(port)), settings.dp_size - 1, start, end_s)
        else:
            tie, start = _join((host, int(port)), end_s)
            ties = [tie]
    except (OSError, TimeoutError) as error:
        raise DeadlineError(
            f"rank {settings.dp_rank} of {settings.dp_size} has not met the others at "
            f"{settings.dp_address} within {meet_s:g} s ({error}); start all of them"
        ) from error
    _watch(ties, lost or _end)
    group, _, epoch = start.partition("\t")
    return GroupRank(group, epoch, settings.dp_rank, settings.dp_size)


def _gather(
    address: tuple[str, int], others: int, start: str, end_s: float
) -> Sequence[socket.socket]:
    # A connection that passes may have been given the port for its own end.
    with _until(end_s, lambda: socket.create_server(address, backlog=others)) as server:
        ties = []
        for _ in range(others):
            server.settimeout(max(end_s - time.monotonic(), _RETRY_S))
            ties.append(server.accept()[0])
    for tie in ties:
        tie.sendall(f"{start}\n".encode())
    return ties


def _join(address: tuple[str, int], end_s: float) -> tuple[socket.socket, str]:
    tie = _until(end_s, lambda: _connected(address))
    tie.settimeout(max(end_s - time.monotonic(), _RETRY_S))
    line = b""
    while not line.endswith(b"\n"):
        if not (received := tie.recv(_LINE_BYTES)):
            raise OSError("the first rank has ended")
        line += received
    return tie, line.decode().rstrip("\n")


def _connected(address: tuple[str, int]) -> socket.socket:
    tie = socket.create_connection(address, timeout=_RETRY_S)
    if tie.getsockname() == tie.getpeername():
        # Nobody listens yet, and the kernel has chosen this very port for our end.
        tie.close()
        raise ConnectionRefusedError("connected to itself")
    return tie


def _until(end_s: float, opened: Callable[[], socket.socket]) -> socket.socket:
    while True:
        try:
            return opened()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_RETRY_S)


def _watch(ties: Sequence[socket.socket], lost: Callable[[], None]) -> None:
    once = threading.Lock()

    def wait_for_end(tie: socket.socket) -> None:
        with contextlib.suppress(OSError):
            tie.settimeout(None)
            tie.recv(1)  # Nobody says anything more: it is the end.
        if once.acquire(blocking=False):
            lost()
            # Whoever is left of the others learns it from here.
            for each in ties:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    for tie in ties:
        threading.Thread(target=wait_for_end, args=(tie,), name="dp-tie", daemon=True).start()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGINT)
