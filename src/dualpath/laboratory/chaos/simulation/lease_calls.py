"""Calls of a simulated scheduler to a store of leases, and what goes wrong on their way."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from dualpath.laboratory.chaos.simulation.lease_server import LeaseServer, Said
from dualpath.laboratory.chaos.simulation.world import Process, World

_DELAYS_S = (0.0005, 0.002, 0.02)
#: More than a holder waits for an answer.
_SLOW_S = (0.05, 0.2, 0.6)


class LeaseFaults:
    """How often calls are ``slow``, ``doubled`` on their way or go ``unanswered`` now.

    Those of processes that are ``cut`` off, all if the store is ``unreachable``, do not arrive.
    """

    def __init__(self) -> None:
        self.slow = self.doubled = self.unanswered = 0.0
        self.unreachable = False
        self.cut: set[str] = set()


class LeaseAnswer:
    """As much of aiohttp's answer as clients of stores use."""

    def __init__(self, said: Said) -> None:
        self.status, self._said = said

    async def json(self, content_type: str | None) -> dict[str, Any]:
        """Return what was said."""
        return self._said


class LeaseSession:
    """As much of ``aiohttp.ClientSession`` as clients of stores use.

    A call that its process gives up has its effect all the same, perhaps later.
    """

    def __init__(self, process: Process, server: LeaseServer, faults: LeaseFaults) -> None:
        self._process = process
        self._world: World = process.world
        self._server = server
        self._faults = faults

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        json: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[LeaseAnswer]:
        """Call; raises ``OSError`` where the connection breaks."""
        answered: asyncio.Future[Said] = asyncio.get_running_loop().create_future()
        body = msgspec.json.encode(json or {})
        self._later(functools.partial(self._arrive, method, url, body, answered))
        yield LeaseAnswer(await answered)

    def post(self, url: str, json: dict[str, Any]) -> Any:  # noqa: ANN401
        """Call with POST."""
        return self.request("POST", url, json)

    async def close(self) -> None:
        """Nothing is open."""

    def _arrive(self, method: str, url: str, body: bytes, answered: "asyncio.Future[Said]") -> None:
        self._world.moment()
        if self._faults.unreachable or self._process.name in self._faults.cut:
            self._break_off(answered)
            return
        said = self._server.answer(method, url, msgspec.json.decode(body))
        if self._happens(self._faults.doubled):
            said = self._server.answer(method, url, msgspec.json.decode(body))
        if self._happens(self._faults.unanswered):
            self._break_off(answered)
            return
        status, content = said[0], msgspec.json.encode(said[1])
        self._tell(answered, lambda: answered.set_result((status, msgspec.json.decode(content))))

    def _break_off(self, answered: "asyncio.Future[Said]") -> None:
        """Break the connection, or say nothing, as where packets are dropped."""
        if self._world.chance.random() < 0.5:
            self._tell(answered, lambda: answered.set_exception(ConnectionResetError("reset")))

    def _tell(self, answered: "asyncio.Future[Said]", how: Callable[[], None]) -> None:
        def tell() -> None:
            if not answered.done():
                how()

        self._later(lambda: self._process.step(tell))

    def _later(self, call: Callable[[], object]) -> None:
        slow = self._happens(self._faults.slow)
        self._world.after(self._world.pick(_SLOW_S if slow else _DELAYS_S), call)

    def _happens(self, often: float) -> bool:
        return bool(often) and self._world.chance.random() < often
