"""What a campaign asks of its router and front ends over HTTP; that nobody answers is an answer."""

import asyncio
from typing import Any

import aiohttp
import msgspec

from dualpath.core.cluster import Role
from dualpath.router.control.role_calls import ROLES_PATH

_ANSWER_S = 2.0

Status = dict[str, Any]


class ClusterCalls:
    """``router`` and ``clients`` are where the router and clients are served."""

    def __init__(self, http: aiohttp.ClientSession, router: str, clients: str) -> None:
        self._http = http
        self._router = router
        self._clients = clients

    async def status(self) -> Status | None:
        """Return the router's status, None if it does not answer."""
        answer = await self._asked("GET", f"{self._router}/dualpath/v1/status")
        try:
            return None if answer is None else msgspec.json.decode(answer, type=Status)
        except msgspec.DecodeError:
            return None

    async def agrees(self, engine_id: str, role: Role) -> bool:
        """Ask for an engine in another role; True if it shall be."""
        wish = {"role": role.value, "engine_id": engine_id}
        return await self._asked("POST", f"{self._router}{ROLES_PATH}", wish) is not None

    async def serves_clients(self) -> bool:
        """Whether somebody does."""
        return await self._asked("GET", f"{self._clients}/health") is not None

    async def _asked(self, method: str, url: str, body: object = None) -> bytes | None:
        """Return a good answer, None for any other and where none comes."""
        try:
            async with (
                asyncio.timeout(_ANSWER_S),
                self._http.request(method, url, json=body) as response,
            ):
                return await response.read() if response.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None
