"""Calls of a simulated scheduler to a store of leases, with faults."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from dualpath.laboratory.chaos.simulation.lease_server import LeaseServer, Response
from dualpath.laboratory.chaos.simulation.world import Process, World

_DELAYS_S = (0.0005, 0.002, 0.02)
#: Longer than a holder waits for an answer.
_SLOW_S = (0.05, 0.2, 0.6)


class LeaseFaults:
    """Current probabilities that calls are ``slow``, ``doubled`` or ``unanswered``.

    Calls of processes in ``cut`` do not arrive, and no calls if the store is ``unreachable``.
    """

    def __init__(self) -> None:
        self.slow = self.doubled = self.unanswered = 0.0
        self.unreachable = False
        self.cut: set[str] = set()


class LeaseResponse:
    """The part of aiohttp's response that the clients use."""

    def __init__(self, response: Response) -> None:
        self.status, self._content = response

    async def json(self, content_type: str | None) -> dict[str, Any]:
        """Return the decoded body."""
        return self._content


class LeaseSession:
    """The part of ``aiohttp.ClientSession`` that the clients use.

    A cancelled call has its effect all the same, perhaps later.
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
    ) -> AsyncIterator[LeaseResponse]:
        """Send a request; raises ``OSError`` if the connection is reset."""
        answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        body = msgspec.json.encode(json or {})
        self._later(functools.partial(self._arrive, method, url, body, answered))
        yield LeaseResponse(await answered)

    def post(self, url: str, json: dict[str, Any]) -> Any:  # noqa: ANN401
        """Send a POST request."""
        return self.request("POST", url, json)

    async def close(self) -> None:
        """Nothing to close."""

    def _arrive(
        self, method: str, url: str, body: bytes, answered: "asyncio.Future[Response]"
    ) -> None:
        self._world.maybe_fault()
        if self._faults.unreachable or self._process.name in self._faults.cut:
            self._break_off(answered)
            return
        response = self._server.answer(method, url, msgspec.json.decode(body))
        if self._happens(self._faults.doubled):
            response = self._server.answer(method, url, msgspec.json.decode(body))
        if self._happens(self._faults.unanswered):
            self._break_off(answered)
            return
        status, content = response[0], msgspec.json.encode(response[1])
        self._reply(answered, lambda: answered.set_result((status, msgspec.json.decode(content))))

    def _break_off(self, answered: "asyncio.Future[Response]") -> None:
        """Reset the connection, or never answer, as when packets are dropped."""
        if self._world.chance.random() < 0.5:
            self._reply(answered, lambda: answered.set_exception(ConnectionResetError("reset")))

    def _reply(self, answered: "asyncio.Future[Response]", how: Callable[[], None]) -> None:
        def reply() -> None:
            if not answered.done():
                how()

        self._later(lambda: self._process.step(reply))

    def _later(self, call: Callable[[], object]) -> None:
        slow = self._happens(self._faults.slow)
        self._world.after(self._world.pick(_SLOW_S if slow else _DELAYS_S), call)

    def _happens(self, often: float) -> bool:
        return bool(often) and self._world.chance.random() < often
