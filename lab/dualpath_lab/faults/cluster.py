"""The cluster under test: a router and engines as processes, with TCP relays between them.

Clients connect to the router, engines to its control socket, and the router to every engine through
a relay for each, so that any of these connections can be reset.  Restarts do not change ports.
"""

import asyncio
import contextlib
import ctypes
import enum
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import DeadlineError
from dualpath.launch.commands import DpRank, engine_id
from dualpath.launch.ports import claim_port
from dualpath.launch.process import LocalProcess, Supervisor, all_processes, local
from dualpath.router.scheduler.role_calls import ROLES_PATH
from dualpath_lab.faults.engine_kinds import EngineLaunch, EnginesUnderTest, router_limits
from dualpath_lab.faults.matrix import Component, ProcessNames, follower_name
from dualpath_lab.faults.settings import ChaosSettings, LoadSettings
from dualpath_lab.faults.tested_process import ProcessSettings

# ----------------------------------------------------------------------------------- cluster calls
# HTTP requests of a campaign to its router and front ends; a missing answer is no error.

_ANSWER_S = 2.0

Status = dict[str, Any]


class ClusterClient:
    """``router`` is the router's URL, ``clients`` the one that clients use."""

    def __init__(self, http: aiohttp.ClientSession, router: str, clients: str) -> None:
        self._http = http
        self._router = router
        self._clients = clients

    async def status(self) -> Status | None:
        """Return the router's status, None if it does not answer."""
        answer = await self._response("GET", f"{self._router}/dualpath/v1/status")
        try:
            return None if answer is None else msgspec.json.decode(answer, type=Status)
        except msgspec.DecodeError:
            return None

    async def request_role(self, engine_id: str, role: Role) -> bool:
        """Request another role for an engine; return whether the router accepts."""
        body = {"role": role.value, "engine_id": engine_id}
        return await self._response("POST", f"{self._router}{ROLES_PATH}", body) is not None

    async def serves_clients(self) -> bool:
        """Whether a router or front end serves clients."""
        return await self._response("GET", f"{self._clients}/health") is not None

    async def _response(self, method: str, url: str, body: object = None) -> bytes | None:
        """Return the body of a response with status 200, None for any other or no response."""
        try:
            async with (
                asyncio.timeout(_ANSWER_S),
                self._http.request(method, url, json=body) as response,
            ):
                return await response.read() if response.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None


# ----------------------------------------------------------------------------------------- packets
# The kernel drops the packets that arrive for a TCP port, as a firewall does.  A filter of a socket
# needs no privilege, and a process may set it on the sockets of processes that it could trace.

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_PIDFD_GETFD = 438
#: One instruction of a classic BPF program: return 0, which accepts no byte of a packet.
_instruction = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
_DROP_ALL = struct.pack("@HP", 1, ctypes.addressof(_instruction))
_libc = ctypes.CDLL(None, use_errno=True)
_RESCAN_S = 0.05


def port_sockets(pid: int, port: int) -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of a process that has ``port`` as its local port.

    It is closed when the next one is asked for.  Raises ``OSError`` if this process may not trace
    that one.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if not os.readlink(entry).startswith("socket:"):
                    continue
                found = _libc.syscall(_PIDFD_GETFD, process, int(entry.name), 0)
                if found < 0:
                    raise OSError(ctypes.get_errno(), f"cannot copy a socket of process {pid}")
                with socket.socket(fileno=found) as copy:
                    internet = copy.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and copy.getsockname()[1] == port:
                        yield copy
    except (FileNotFoundError, ProcessLookupError):
        pass  # the process has ended
    finally:
        os.close(process)


@contextlib.asynccontextmanager
async def dropped_packets(processes: Callable[[], Iterable[int]], port: int) -> AsyncIterator[None]:
    """Drop every packet that arrives at ``port`` of these processes, until the context ends.

    So connections to it cannot be opened, and on open ones the peer gets no acknowledgement.
    """

    def change(option: int, content: bytes | int) -> None:
        for pid in processes():
            for found in port_sockets(pid, port):
                with contextlib.suppress(FileNotFoundError):  # it has no filter
                    found.setsockopt(socket.SOL_SOCKET, option, content)

    async def rescan() -> None:
        while True:  # a connection that was accepted later has no filter yet
            change(_SO_ATTACH_FILTER, _DROP_ALL)
            await asyncio.sleep(_RESCAN_S)

    change(_SO_ATTACH_FILTER, _DROP_ALL)
    rescanning = asyncio.create_task(rescan())
    try:
        yield
    finally:
        rescanning.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await rescanning
        change(_SO_DETACH_FILTER, 0)


# ------------------------------------------------------------------------------------------- proxy
# A TCP relay between two processes of a cluster that can reset its connections or be silent.

_CHUNK_BYTES = 1 << 16
#: Closing with this linger option sends RST and drops unsent bytes, as a failing network does.
_RESET = struct.pack("ii", 1, 0)


class Direction(enum.Enum):
    """Where bytes go that a relay forwards."""

    TO_SERVER = enum.auto()
    TO_CLIENT = enum.auto()


class Relay:
    """Listens on a free loopback port and forwards to ``port``; a server need not listen there."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._open: set[asyncio.StreamWriter] = set()
        self._passes = {direction: asyncio.Event() for direction in Direction}
        for passes in self._passes.values():
            passes.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self.reset()

    def reset(self) -> int:
        """Reset every connection at both ends; return the number of connections."""
        writers = list(self._open)
        for writer in writers:
            _reset(writer)
        return len(writers) // 2

    @contextlib.contextmanager
    def silent(self, directions: Collection[Direction]) -> Iterator[None]:
        """Accept connections and hold all bytes in these directions, until the context ends."""
        for direction in directions:
            self._passes[direction].clear()
        try:
            yield
        finally:
            for direction in directions:
                self._passes[direction].set()

    def drop_packets(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Drop all packets of clients, until the context ends."""
        return dropped_packets(lambda: (os.getpid(),), int(self.address.rpartition(":")[2]))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled only when the event loop ends.
        with contextlib.suppress(asyncio.CancelledError):
            await self._forward(reader, writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            _reset(writer)  # as a refused connection to the process itself
            return
        ends = (writer, onward)
        self._open.update(ends)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, onward, self._passes[Direction.TO_SERVER]))
                both.create_task(_copy(onward_reader, writer, self._passes[Direction.TO_CLIENT]))
        except* OSError:
            pass
        finally:
            self._open.difference_update(ends)
            for end in ends:
                end.close()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event
) -> None:
    while received := await reader.read(_CHUNK_BYTES):
        await passes.wait()
        writer.write(received)
        await writer.drain()
    if writer.can_write_eof() and not writer.is_closing():
        with contextlib.suppress(OSError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


ROUTER = "router"
#: All front ends listen at the same port.
_FRONT_ENDS = "front ends"
_POLL_S = 0.02
_START_S = 300.0
_ENGINE = {Role.PREFILL: Component.PREFILL, Role.DECODE: Component.DECODE}


class ChaosCluster:
    """Processes and relays within ``async with``; ``folder`` gets logs, block counts, sockets."""

    def __init__(
        self,
        settings: ChaosSettings,
        load: LoadSettings,
        engines: EnginesUnderTest,
        folder: Path,
        gates: Path,
    ) -> None:
        self._engines = engines
        self.settings = settings
        self.process_names = ProcessNames(
            ROUTER,
            tuple(engine_id(Role.PREFILL, i) for i in range(settings.prefill)),
            tuple(engine_id(Role.DECODE, i) for i in range(settings.decode)),
            self._ranks(Role.PREFILL),
            self._ranks(Role.DECODE),
            front_ends=tuple(f"front-end-{i}" for i in range(settings.front_ends)),
        )
        #: Roles of the engines that have another role than the one in their name.
        self.current_roles: dict[str, Role] = {}
        self.storage = Path(settings.storage or folder / "kv").absolute()
        self.tallies = folder / "tallies"
        self._load = load
        self._folder = folder
        self._gates = gates
        self._supervisor = Supervisor()
        self._stack = AsyncExitStack()
        self.routers = tuple(f"{ROUTER}-{i}" for i in range(settings.routers))
        self._ports = {name: claim_port() for name in (ROUTER, _FRONT_ENDS, *self.engines)}
        self._rendezvous_ports = {name: claim_port() for name in self.engines}
        self._control_port = claim_port()
        self._front_ends_port = claim_port() if settings.front_ends else None
        front_ends = self.process_names.front_ends
        self.clients = Relay(self._ports[_FRONT_ENDS if settings.front_ends else ROUTER])
        #: Of engines and front ends to the scheduler.
        self.control = {name: Relay(self._control_port) for name in self.engines}
        self.control |= {name: Relay(self._front_ends_port or 0) for name in front_ends}
        self.http = {name: Relay(self._ports[name]) for name in self.engines}

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of all engines."""
        return (*self.process_names.prefill, *self.process_names.decode)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all processes; one router leads, the others stand by."""
        return (*self.routers, *self.process_names.front_ends, *self.engines)

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"http://{self.clients.address}"

    async def __aenter__(self) -> Self:
        self.storage.mkdir(parents=True, exist_ok=True)
        self.tallies.mkdir(parents=True, exist_ok=True)
        http = await self._stack.enter_async_context(aiohttp.ClientSession())
        for relay in (self.clients, *self.control.values(), *self.http.values()):
            await self._stack.enter_async_context(relay)
        self._calls = ClusterClient(http, f"http://127.0.0.1:{self._ports[ROUTER]}", self.url)
        try:
            for name in self.names:
                self.start(name)
            await self._wait_started()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._supervisor.end, hard=True)
        await self._stack.aclose()

    # ------------------------------------------------------------------ processes

    def start(self, name: str) -> LocalProcess:
        """Start a process, for the first time or again."""
        # In this thread: a process is killed when the thread that started it ends.
        return self._supervisor.add(self._launch(name))

    def group(self, name: str) -> tuple[str, ...]:
        """Return a process and the processes that end and start with it, by rank."""
        if name not in self.engines:
            return (name,)
        role, names = self._role(name)
        size = self.settings.ranks(role)
        first = names.index(name) // size * size
        return names[first : first + size]

    def set_role(self, name: str, role: Role) -> None:
        """Start an engine and its group in this role from the next start on."""
        for rank in self.group(name):
            self.current_roles.pop(rank, None)
            if role is not self._role(rank)[0]:
                self.current_roles[rank] = role

    def role(self, name: str) -> Role:
        """Return the role in an engine's name."""
        return self._role(name)[0]

    def process(self, name: str) -> LocalProcess:
        """Return the running process of that name."""
        return local(self._supervisor.process(name))

    def unexpected_exits(self, busy: Collection[Component]) -> list[tuple[str, int | None]]:
        """Return ended processes, with exit codes, of components without a current fault."""
        return [
            (process.name, process.exit_code)
            for process in self._supervisor.processes
            if not process.alive and self._component(process.name) not in busy
        ]

    def owner_of(self, pid: int) -> LocalProcess:
        """Return the process with this ``pid``, or the one that has started it."""
        group = os.getpgid(pid)
        return next(p for p in map(local, self._supervisor.processes) if p.pid == group)

    def drop_http(self, name: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Drop all packets to the port at which an engine is called, until the context ends."""
        if self._engines.http_relayed:
            return self.http[name].drop_packets()

        def group() -> list[int]:
            leader = self.process(name).pid
            return [pid for pid, stat in all_processes() if stat.group == leader]

        return dropped_packets(group, self._ports[name])

    async def group_ended(self, group: int, timeout_s: float) -> bool:
        """Wait until all processes of a process group, such as an engine's ranks, have ended."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while any(s.group == group and not s.is_zombie for _, s in all_processes()):
            if asyncio.get_running_loop().time() > deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def log(self, name: str) -> Path:
        """Return the log of a process over all its restarts."""
        return self._folder / f"{name}.log"

    async def wait_ended(self, name: str, timeout_s: float) -> int | None:
        """Wait for the end of a process; return its exit code, None after the timeout."""
        process = self.process(name)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while process.alive and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return process.exit_code

    def _ranks(self, role: Role) -> tuple[str, ...]:
        """Return the names of the ranks of a role's engines, except for their first."""
        engines = self.settings.prefill if role is Role.PREFILL else self.settings.decode
        return tuple(
            follower_name(engine_id(role, i), rank)
            for i in range(engines)
            for rank in range(1, self._engines.ranks(role))
        )

    def _launch(self, name: str) -> LocalProcess:
        component = self._component(name)
        if name in self.current_roles:
            component = _ENGINE[self.current_roles[name]]
        process = ProcessSettings(
            process=name,
            # The router that leads is the one that passes the steps of a router.
            failpoint_name=ROUTER if component is Component.ROUTER else name,
            kind=self._engines.kind,
            component=component,
            socket=str(self._gates),
            tallies=str(self.tallies.absolute()),
            seed=self.settings.seed,
        )
        limits = router_limits(
            *(self._load.request_deadline_s, self._control_port, self._folder / "router.lock"),
            self._front_ends_port,
        )
        if component is Component.ROUTER:
            return self._engines.router(process, self._ports[ROUTER], limits, self.log(name))
        if component is Component.FRONT_END:
            link = f"tcp://{self.control[name].address}"
            return self._engines.front_end(
                process, self._ports[_FRONT_ENDS], link, limits, self.log(name)
            )
        role, names = self._role(name)
        group = self.group(name)
        launch = EngineLaunch(
            role=self.current_roles.get(name, role),
            named_as=role,
            index=names.index(name),
            name=name,
            port=self._ports[name],
            api_url=f"http://{self.http[name].address}",
            control_port=int(self.control[name].address.rpartition(":")[2]),
            storage=self.storage,
            dp=DpRank(group.index(name), len(group), self._rendezvous_ports[group[0]])
            if len(group) > 1
            else None,
        )
        return self._engines.engine(process, launch, self.log(name))

    def _role(self, name: str) -> tuple[Role, tuple[str, ...]]:
        """Return an engine's role, and all engines of it."""
        if name in self.process_names.prefill:
            return Role.PREFILL, self.process_names.prefill
        return Role.DECODE, self.process_names.decode

    def _component(self, name: str) -> Component:
        if name in self.routers:
            return Component.ROUTER
        if name in self.process_names.front_ends:
            return Component.FRONT_END
        return _ENGINE[self._role(name)[0]]

    # ------------------------------------------------------------------ its state

    async def status(self) -> Status | None:
        """Return the router's status, None if it does not answer."""
        return await self._calls.status()

    async def request_role(self, name: str, role: Role, timeout_s: float) -> bool:
        """Request another role for an engine until the router accepts."""
        return await _until(lambda: self._calls.request_role(name, role), timeout_s)

    async def serves_clients(self, timeout_s: float) -> bool:
        """Wait until a router or front end serves clients."""
        return await _until(self._calls.serves_clients, timeout_s)

    async def epoch(self, name: str) -> str | None:
        """Return the epoch with which a live engine is registered."""
        status = await self.status()
        return None if status is None else live_epochs(status).get(name)

    async def joined(self, name: str, old_epoch: str | None, timeout_s: float) -> bool:
        """Wait until an engine has registered with a new epoch, or has ended."""
        return await self._until(
            lambda live: live.get(name) not in (None, old_epoch) or not self.process(name).alive,
            timeout_s,
        )

    async def router_answers(self, timeout_s: float) -> bool:
        """Wait until a router answers."""
        return await self._until(lambda live: True, timeout_s)

    async def all_registered(self, timeout_s: float) -> bool:
        """Wait until all engines have registered."""
        return await self._until(lambda live: live.keys() >= set(self.engines), timeout_s)

    async def _wait_started(self) -> None:
        """Wait for the first start; raises ``EngineLostError`` if a process ends instead."""

        def started(live: dict[str, str]) -> bool:
            self._supervisor.check_alive()
            return live.keys() >= set(self.engines)

        if not await self._until(started, _START_S):
            raise DeadlineError(
                f"engines have not registered within {_START_S:g} s; see the logs in {self._folder}"
            )

    async def _until(self, reached: Callable[[dict[str, str]], bool], timeout_s: float) -> bool:
        async def poll() -> bool:
            status = await self.status()
            return status is not None and reached(live_epochs(status))

        return await _until(poll, timeout_s)


async def _until(poll: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not await poll():
        if asyncio.get_running_loop().time() > deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def live_epochs(status: Status) -> dict[str, str]:
    """Return the epochs of the live engines in a status."""
    return {e["engine_id"]: e["epoch"] for e in status["engines"] if e["alive"]}
