"""The cluster under test: a router and engines as processes, relays between all of them.

Clients reach the router, engines the router's control socket, and the router every engine through a
relay of its own, so that any of these connections can be reset.  Ports stay the same over restarts.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import aiohttp

from dualpath.core.cluster import Role
from dualpath.core.errors import DeadlineError
from dualpath.laboratory.chaos.cluster_calls import ClusterCalls, Status
from dualpath.laboratory.chaos.kinds import EngineAt, Victims, limits_of
from dualpath.laboratory.chaos.matrix import Cast, Component, follower_name
from dualpath.laboratory.chaos.proxy import Relay
from dualpath.laboratory.chaos.settings import ChaosSettings, LoadSettings
from dualpath.laboratory.chaos.victim import VictimSettings
from dualpath.ops.launch.commands import DpRank, engine_id
from dualpath.ops.launch.ports import claim_port
from dualpath.ops.launch.process import LocalProcess, Supervisor, all_processes, local

ROUTER = "router"
#: The address of all front ends.
_FRONT_DOOR = "front door"
_POLL_S = 0.02
_START_S = 300.0
_ENGINE = {Role.PREFILL: Component.PREFILL, Role.DECODE: Component.DECODE}


class ChaosCluster:
    """Processes and relays within ``async with``; ``folder`` gets logs, tallies and the sockets."""

    def __init__(
        self,
        settings: ChaosSettings,
        load: LoadSettings,
        victims: Victims,
        folder: Path,
        gates: Path,
    ) -> None:
        self._victims = victims
        self.settings = settings
        self.cast = Cast(
            ROUTER,
            tuple(engine_id(Role.PREFILL, i) for i in range(settings.prefill)),
            tuple(engine_id(Role.DECODE, i) for i in range(settings.decode)),
            self._ranks(Role.PREFILL),
            self._ranks(Role.DECODE),
            front_ends=tuple(f"front-end-{i}" for i in range(settings.front_ends)),
        )
        #: Of engines that have another role at present than that of their name.
        self.now_roles: dict[str, Role] = {}
        self.storage = Path(settings.storage or folder / "kv").absolute()
        self.tallies = folder / "tallies"
        self._load = load
        self._folder = folder
        self._gates = gates
        self._supervisor = Supervisor()
        self._stack = AsyncExitStack()
        self.routers = tuple(f"{ROUTER}-{i}" for i in range(settings.routers))
        self._ports = {name: claim_port() for name in (ROUTER, _FRONT_DOOR, *self.engines)}
        self._meeting_ports = {name: claim_port() for name in self.engines}
        self._control_port = claim_port()
        self._front_ends_port = claim_port() if settings.front_ends else None
        self.clients = Relay(self._ports[_FRONT_DOOR if settings.front_ends else ROUTER])
        self.control = {name: Relay(self._control_port) for name in self.engines}
        self.http = {name: Relay(self._ports[name]) for name in self.engines}

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of all engines."""
        return (*self.cast.prefill, *self.cast.decode)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all processes; those of ``ROUTER`` take turns."""
        return (*self.routers, *self.cast.front_ends, *self.engines)

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"http://{self.clients.address}"

    async def __aenter__(self) -> Self:
        self.storage.mkdir(parents=True, exist_ok=True)
        self.tallies.mkdir(parents=True, exist_ok=True)
        http = await self._stack.enter_async_context(aiohttp.ClientSession())
        for relay in (self.clients, *self.control.values(), *self.http.values()):
            await self._stack.enter_async_context(relay)
        self._calls = ClusterCalls(http, f"http://127.0.0.1:{self._ports[ROUTER]}", self.url)
        try:
            for name in self.names:
                self.start(name)
            await self._up()
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
        # From this thread: processes die with the thread that started them.
        return self._supervisor.add(self._started(name))

    def group(self, name: str) -> tuple[str, ...]:
        """Return a process and those that end and start with it, by rank."""
        if name not in self.engines:
            return (name,)
        role, names = self._role(name)
        size = self.settings.ranks(role)
        first = names.index(name) // size * size
        return names[first : first + size]

    def give_role(self, name: str, role: Role) -> None:
        """Let an engine and its group have this role when they are started again."""
        for rank in self.group(name):
            self.now_roles.pop(rank, None)
            if role is not self._role(rank)[0]:
                self.now_roles[rank] = role

    def role(self, name: str) -> Role:
        """Return the role that an engine has by its name."""
        return self._role(name)[0]

    def process(self, name: str) -> LocalProcess:
        """Return the running process of that name."""
        return local(self._supervisor.process(name))

    def ended_alone(self, busy: Collection[Component]) -> list[tuple[str, int | None]]:
        """Return what has ended, with exit codes, of components to which nothing is being done."""
        return [
            (process.name, process.exit_code)
            for process in self._supervisor.processes
            if not process.alive and self._component(process.name) not in busy
        ]

    def owner_of(self, pid: int) -> LocalProcess:
        """Return the process that has started ``pid``, or is it."""
        group = os.getpgid(pid)
        return next(p for p in map(local, self._supervisor.processes) if p.pid == group)

    async def nothing_left_of(self, group: int, timeout_s: float) -> bool:
        """Wait until no process of an ended one's group is left, such as a rank of an engine."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while any(s.group == group and not s.is_zombie for _, s in all_processes()):
            if asyncio.get_running_loop().time() > deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def log(self, name: str) -> Path:
        """Return the log of all lives of a process."""
        return self._folder / f"{name}.log"

    async def ended(self, name: str, timeout_s: float) -> int | None:
        """Wait for the end of a process; return its exit code, None after the timeout."""
        process = self.process(name)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while process.alive and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return process.exit_code

    def _ranks(self, role: Role) -> tuple[str, ...]:
        """Return the names of the ranks of a role's engines, but for their first."""
        engines = self.settings.prefill if role is Role.PREFILL else self.settings.decode
        return tuple(
            follower_name(engine_id(role, i), rank)
            for i in range(engines)
            for rank in range(1, self._victims.ranks(role))
        )

    def _started(self, name: str) -> LocalProcess:
        component = self._component(name)
        if name in self.now_roles:
            component = _ENGINE[self.now_roles[name]]
        victim = VictimSettings(
            process=name,
            # Whoever's turn it is passes the steps of a router.
            passes_as=ROUTER if component is Component.ROUTER else name,
            kind=self._victims.kind,
            component=component,
            socket=str(self._gates),
            tallies=str(self.tallies.absolute()),
            seed=self.settings.seed,
        )
        limits = limits_of(
            *(self._load.request_deadline_s, self._control_port, self._folder / "router.lock"),
            self._front_ends_port,
        )
        if component is Component.ROUTER:
            return self._victims.router(victim, self._ports[ROUTER], limits, self.log(name))
        if component is Component.FRONT_END:
            return self._victims.front_end(victim, self._ports[_FRONT_DOOR], limits, self.log(name))
        role, names = self._role(name)
        group = self.group(name)
        at = EngineAt(
            role=self.now_roles.get(name, role),
            named_as=role,
            index=names.index(name),
            name=name,
            port=self._ports[name],
            api_url=f"http://{self.http[name].address}",
            control_port=int(self.control[name].address.rpartition(":")[2]),
            storage=self.storage,
            dp=DpRank(group.index(name), len(group), self._meeting_ports[group[0]])
            if len(group) > 1
            else None,
        )
        return self._victims.engine(victim, at, self.log(name))

    def _role(self, name: str) -> tuple[Role, tuple[str, ...]]:
        """Return an engine's role, and all engines of it."""
        if name in self.cast.prefill:
            return Role.PREFILL, self.cast.prefill
        return Role.DECODE, self.cast.decode

    def _component(self, name: str) -> Component:
        if name in self.routers:
            return Component.ROUTER
        if name in self.cast.front_ends:
            return Component.FRONT_END
        return _ENGINE[self._role(name)[0]]

    # ------------------------------------------------------------------ what it says

    async def status(self) -> Status | None:
        """Return the router's status, None if it does not answer."""
        return await self._calls.status()

    async def ask_for_role(self, name: str, role: Role, timeout_s: float) -> bool:
        """Ask the router for an engine in another role until it agrees."""
        return await _until(lambda: self._calls.agrees(name, role), timeout_s)

    async def serves_clients(self, timeout_s: float) -> bool:
        """Wait until somebody does."""
        return await _until(self._calls.serves_clients, timeout_s)

    async def epoch(self, name: str) -> str | None:
        """Return the epoch under which the router knows a live engine."""
        status = await self.status()
        return None if status is None else live_epochs(status).get(name)

    async def joined(self, name: str, old_epoch: str | None, timeout_s: float) -> bool:
        """Wait until an engine is there under another epoch than ``old_epoch``, or has ended."""
        return await self._until(
            lambda live: live.get(name) not in (None, old_epoch) or not self.process(name).alive,
            timeout_s,
        )

    async def answers(self, timeout_s: float) -> bool:
        """Wait until a router answers."""
        return await self._until(lambda live: True, timeout_s)

    async def all_there(self, timeout_s: float) -> bool:
        """Wait until the router knows all engines."""
        return await self._until(lambda live: live.keys() >= set(self.engines), timeout_s)

    async def _up(self) -> None:
        """Wait for the first start; raises ``EngineLostError`` if a process ends instead."""

        def there(live: dict[str, str]) -> bool:
            self._supervisor.check_alive()
            return live.keys() >= set(self.engines)

        if not await self._until(there, _START_S):
            raise DeadlineError(f"engines are not there after {_START_S:g} s; see {self._folder}")

    async def _until(self, there: Callable[[dict[str, str]], bool], timeout_s: float) -> bool:
        async def look() -> bool:
            status = await self.status()
            return status is not None and there(live_epochs(status))

        return await _until(look, timeout_s)


async def _until(look: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not await look():
        if asyncio.get_running_loop().time() > deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def live_epochs(status: Status) -> dict[str, str]:
    """Return the live engines of a status with their epochs."""
    return {e["engine_id"]: e["epoch"] for e in status["engines"] if e["alive"]}
