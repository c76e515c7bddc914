"""Runs one emulated engine as a process: data plane, emulated GPU and HTTP server."""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from dualpath.core.addresses import HostPort, host_and_port
from dualpath.core.cluster import GroupRank, Role
from dualpath.core.errors import DeadlineError
from dualpath.engine.control.surroundings import LIVE, Surroundings
from dualpath.node.certificates import serving
from dualpath.node.sockets import engine_url, listening_socket
from dualpath.router.http.server import serving_app, until_signal
from dualpath.router.requests.limits import allow_many_streams
from dualpath_lab.emulated.data_plane import DataPlane
from dualpath_lab.emulated.decode import DecodeEngine
from dualpath_lab.emulated.emulated_gpu import follow, start_thread_ranks
from dualpath_lab.emulated.engine_server import EngineServer
from dualpath_lab.emulated.lock_step import FirstRank, LockStep, NoLockStep, OtherRank
from dualpath_lab.emulated.prefill import PrefillEngine
from dualpath_lab.emulated.rank_processes import rank_processes
from dualpath_lab.emulated.ranks import LeaderRank
from dualpath_lab.emulated.settings import EmulatedSettings

# ------------------------------------------------------------------------------------------- group
# Ranks of an emulated data-parallel group: they start together, and all end when one ends.
#
# Ranks of real engines compute in lock step with collectives, which fail when a rank ends.
# Emulated ranks wait for each other's passes with ``dp_lock_step`` only.  Each has a connection to
# the first rank as long as it runs, through which they start together and detect that a rank has
# ended.

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
    first = host_and_port(settings.dp_address)
    end_s = time.monotonic() + timeout_s
    try:
        if settings.dp_rank == 0:
            start = f"{settings.engine.engine_id}\t{uuid.uuid4().hex[:12]}"
            peers = _accept_ranks(first, settings.dp_size - 1, start, end_s)
        else:
            peer, start = _connect_to_first(first, end_s)
            peers = [peer]
    except (OSError, TimeoutError) as error:
        raise DeadlineError(
            f"rank {settings.dp_rank} of {settings.dp_size} could not connect to the others at "
            f"{settings.dp_address} within {timeout_s:g} s ({error}); start all of them"
        ) from error
    _watch(peers, lost or _end)
    group, _, epoch = start.partition("\t")
    return GroupRank(group, epoch, settings.dp_rank, settings.dp_size)


def open_lock_step(settings: EmulatedSettings, timeout_s: float = JOIN_TIMEOUT_S) -> LockStep:
    """Return the lock step of a group that has joined; raises ``DeadlineError`` as that does."""
    if settings.dp_size == 1 or not settings.dp_lock_step:
        return NoLockStep()
    first, end_s = host_and_port(settings.dp_address), time.monotonic() + timeout_s
    try:
        if settings.dp_rank == 0:
            # The others connect again: each got the group's name when all of them were accepted.
            return FirstRank(_accept_ranks(first, settings.dp_size - 1, "lock step", end_s))
        return OtherRank(_connect_to_first(first, end_s)[0])
    except (OSError, TimeoutError) as error:
        raise DeadlineError(
            f"rank {settings.dp_rank} of {settings.dp_size} could not connect to the others at "
            f"{settings.dp_address} within {timeout_s:g} s ({error}) for the lock step; start all "
            "of them with {dp_lock_step} or none"
        ) from error


def _accept_ranks(
    address: HostPort, others: int, start: str, end_s: float
) -> Sequence[socket.socket]:
    # Retried, because a short-lived connection may use the port as its local port.
    with _retry_until(end_s, lambda: _listener(address, others)) as server:
        peers = []
        for _ in range(others):
            server.settimeout(max(end_s - time.monotonic(), _RETRY_S))
            peers.append(server.accept()[0])
    for peer in peers:
        peer.sendall(f"{start}\n".encode())
    return peers


def _listener(address: HostPort, others: int) -> socket.socket:
    return listening_socket(*address, backlog=others, share=False)


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


class EmulatedEngine:
    """A running engine; ``api_url`` is the URL of its HTTP server."""

    def __init__(self, plane: DataPlane, api_url: str) -> None:
        self.plane = plane
        self.api_url = api_url


@asynccontextmanager
async def emulated_engine(
    settings: EmulatedSettings,
    surroundings: Surroundings = LIVE,
    ranks: LeaderRank | None = None,
) -> AsyncIterator[EmulatedEngine]:
    """Run an engine in the block; it registers with the router in the background.

    ``ranks`` connects to its other ranks; without it, they are threads of this process.  Raises
    ``ConfigError`` (value, limit, remedy) if it cannot be started with these settings,
    ``EngineLostError`` if one of its ranks cannot be started.
    """
    tls = serving(settings.ssl_certfile, settings.ssl_keyfile)
    leading = ranks or start_thread_ranks(settings, surroundings)
    try:
        plane = await asyncio.to_thread(DataPlane, settings, surroundings, leading)
    except BaseException:
        leading.end()
        raise
    prefills = settings.engine.role is Role.PREFILL
    engine: PrefillEngine | DecodeEngine = PrefillEngine(plane) if prefills else DecodeEngine(plane)
    try:
        app = EngineServer(plane, engine).app()
        async with serving_app(app, settings.host, settings.port, tls=tls) as port:
            api_url = settings.engine.api_url or engine_url(
                settings.host, port, settings.engine.router, tls=tls is not None
            )
            engine.start()
            dp = await asyncio.to_thread(join_group, settings)
            if isinstance(engine, PrefillEngine):
                engine.lock_step = await asyncio.to_thread(open_lock_step, settings)
            plane.membership.join(api_url, dp=dp)
            try:
                yield EmulatedEngine(plane, api_url)
            finally:
                await asyncio.to_thread(engine.close)
    finally:
        await asyncio.to_thread(plane.close)


async def drain(plane: DataPlane) -> None:
    """Stop accepting requests; return when all have ended, or after ``drain_timeout_s``."""
    loop, drained = asyncio.get_running_loop(), asyncio.Event()

    def on_drained() -> None:
        loop.call_soon_threadsafe(drained.set)

    plane.membership.drain("its process got SIGTERM", on_drained)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(plane.settings.engine.drain_timeout_s):
            await drained.wait()


def run_engine(settings: EmulatedSettings) -> None:
    """Run an engine until SIGINT, or until it has drained after SIGTERM.

    Its other ranks are forked as processes, so this process must have no threads yet.  Raises what
    ``emulated_engine`` raises.
    """
    follower = functools.partial(follow, settings)
    with rank_processes(settings.tensor_parallel_size, follower) as ranks:
        asyncio.run(_serve(settings, ranks))


async def _serve(settings: EmulatedSettings, ranks: LeaderRank) -> None:
    allow_many_streams()
    async with emulated_engine(settings, ranks=ranks) as engine:
        name, role = settings.engine.engine_id, settings.engine.role.value
        print(
            f"dualpath emulated {role} engine {name}: {engine.api_url}, buffer of "
            f"{engine.plane.manager.buffer_tokens} tokens, HBM of "
            f"{engine.plane.manager.hbm_tokens}",
            flush=True,
        )
        await until_signal(functools.partial(drain, engine.plane))
