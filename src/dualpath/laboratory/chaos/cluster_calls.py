"""HTTP requests of a campaign to its router and front ends; a missing answer is no error."""

import asyncio
from typing import Any

import aiohttp
import msgspec

from dualpath.core.cluster import Role
from dualpath.router.control.role_calls import ROLES_PATH

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
