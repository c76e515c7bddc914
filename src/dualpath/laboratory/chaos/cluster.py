"""The cluster under test: a router and emulated engines as processes, relays between all of them.

Clients reach the router, engines the router's control socket, and the router every engine through a
relay of its own, so that any of these connections can be reset.  Ports stay the same over restarts.
"""

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import DeadlineError
from dualpath.laboratory.chaos.matrix import Cast, Component
from dualpath.laboratory.chaos.proxy import Relay
from dualpath.laboratory.chaos.settings import ChaosSettings, LoadSettings
from dualpath.laboratory.chaos.victim import VictimSettings
from dualpath.ops.launch.local_cluster import claim_port
from dualpath.ops.launch.process import ManagedProcess, SpawnedProcess, Supervisor

ROUTER = "router"
#: Of the catalog; sizes are the campaign's own.
_MODEL = "qwen2.5-32b"
_POLL_S = 0.1
_START_S = 60.0
_STATUS_S = 2.0

Status = dict[str, Any]


class ChaosCluster:
    """Processes and relays within ``async with``; ``folder`` gets logs, tallies and the sockets."""

    def __init__(
        self, settings: ChaosSettings, load: LoadSettings, folder: Path, gates: Path
    ) -> None:
        self.settings = settings
        self.cast = Cast(
            ROUTER,
            tuple(f"pe-{i}" for i in range(settings.prefill)),
            tuple(f"de-{i}" for i in range(settings.decode)),
        )
        self.storage = Path(settings.storage or folder / "kv").absolute()
        self.tallies = folder / "tallies"
        self._load = load
        self._folder = folder
        self._gates = gates
        self._supervisor = Supervisor()
        self._stack = AsyncExitStack()
        self._ports = {name: claim_port() for name in (ROUTER, *self.engines)}
        self._control_port = claim_port()
        self.clients = Relay(self._ports[ROUTER])
        self.control = {name: Relay(self._control_port) for name in self.engines}
        self.http = {name: Relay(self._ports[name]) for name in self.engines}

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of all engines."""
        return (*self.cast.prefill, *self.cast.decode)

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"http://{self.clients.address}"

    async def __aenter__(self) -> Self:
        self.storage.mkdir(parents=True, exist_ok=True)
        self.tallies.mkdir(parents=True, exist_ok=True)
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        for relay in (self.clients, *self.control.values(), *self.http.values()):
            await self._stack.enter_async_context(relay)
        try:
            for name in (ROUTER, *self.engines):
                self.start(name)
            await self.all_there(_START_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._supervisor.end, hard=True)
        await self._stack.aclose()

    # ------------------------------------------------------------------ processes

    def start(self, name: str) -> ManagedProcess:
        """Start a process, for the first time or again."""
        # From this thread: processes die with the thread that started them.
        return self._supervisor.add(
            SpawnedProcess(
                name,
                (sys.executable, "-m", "dualpath.laboratory.chaos.victim", *self._command(name)),
                self.log(name),
                os.environ,
            )
        )

    def process(self, name: str) -> ManagedProcess:
        """Return the running process of that name."""
        return self._supervisor.process(name)

    def log(self, name: str) -> Path:
        """Return the log of all lives of a process."""
        return self._folder / f"{name}.log"

    async def ended(self, name: str, timeout_s: float) -> int | None:
        """Wait for the end of a process; return its exit code, None after the timeout."""
        process = self.process(name)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while process.alive and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S / 2)
        return process.exit_code

    def _command(self, name: str) -> list[str]:
        component = self._component(name)
        victim = VictimSettings(
            process=name,
            component=component,
            socket=str(self._gates),
            tallies=str(self.tallies.absolute()),
            seed=self.settings.seed,
        )
        if component is Component.ROUTER:
            return [victim.argument(), ROUTER, *self._router_arguments()]
        role = Role.PREFILL if component is Component.PREFILL else Role.DECODE
        return [victim.argument(), role.value, *self._engine_arguments(name)]

    def _component(self, name: str) -> Component:
        if name == ROUTER:
            return Component.ROUTER
        return Component.PREFILL if name in self.cast.prefill else Component.DECODE

    def _router_arguments(self) -> list[str]:
        given = {
            "port": self._ports[ROUTER],
            "control-port": self._control_port,
            "request-deadline-s": self._load.request_deadline_s,
            "read-deadline-s": self._load.request_deadline_s / 6,
            "read-margin-s": self._load.request_deadline_s / 10,
            "engine-wait-s": self._load.request_deadline_s,
        }
        return _flags(given)

    def _engine_arguments(self, name: str) -> list[str]:
        settings = self.settings
        memory = int(settings.buffer_blocks * settings.block_tokens * settings.kv_bytes_per_token)
        given = {
            "engine-id": name,
            "router": f"tcp://{self.control[name].address}",
            "port": self._ports[name],
            "api-url": f"http://{self.http[name].address}",
            "storage": self.storage,
            "model": _MODEL,
            "layers": settings.layers,
            "kv-bytes-per-token": settings.kv_bytes_per_token,
            "block-tokens": settings.block_tokens,
            "speedup": settings.speedup,
            "buffer-bytes": memory,
            "hbm-bytes": memory,
            "verify": "full",
        }
        return _flags(given)

    # ------------------------------------------------------------------ what it says

    async def status(self) -> Status | None:
        """Return the router's status, None if it does not answer."""
        url = f"http://127.0.0.1:{self._ports[ROUTER]}/dualpath/v1/status"
        try:
            async with asyncio.timeout(_STATUS_S), self._session.get(url) as response:
                return msgspec.json.decode(await response.read(), type=Status)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError):
            return None

    async def epoch(self, name: str) -> str | None:
        """Return the epoch under which the router knows a live engine."""
        return live_epochs(await self.status()).get(name)

    async def joined(self, name: str, old_epoch: str | None, timeout_s: float) -> bool:
        """Wait until an engine is there under another epoch than ``old_epoch``."""
        return await self._until(lambda live: live.get(name) not in (None, old_epoch), timeout_s)

    async def all_there(self, timeout_s: float) -> None:
        """Wait until all engines are.

        Raises ``EngineLostError`` if a process ends meanwhile, ``DeadlineError`` after the timeout.
        """
        if not await self._until(lambda live: live.keys() >= set(self.engines), timeout_s):
            self._supervisor.check_alive()
            raise DeadlineError(f"engines are not back after {timeout_s:g} s; see {self._folder}")

    async def _until(self, there: Any, timeout_s: float) -> bool:  # noqa: ANN401 - a predicate
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not there(live_epochs(await self.status())):
            if asyncio.get_running_loop().time() > deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True


def live_epochs(status: Status | None) -> dict[str, str]:
    """Return the live engines of a status with their epochs."""
    engines = status["engines"] if status else []
    return {e["engine_id"]: e["epoch"] for e in engines if e["alive"]}


def _flags(given: dict[str, Any]) -> list[str]:
    return [word for flag, value in given.items() for word in (f"--{flag}", str(value))]
