"""HTTP calls about roles: ``GET`` returns the state, ``POST`` requests another role or size."""

import http.client
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, ConfigError, EngineLostError
from dualpath.router.scheduler.registry import MAX_RANKS
from dualpath.router.scheduler.roles import Roles
from dualpath.router.token_api.statuses import api_error, status_of
from dualpath.router.token_api.wire import decode_body

ROLES_PATH = "/dualpath/v1/roles"


class RoleRequest(msgspec.Struct):
    """Body of the POST; without ``engine_id`` the engine that is empty soonest is chosen.

    Without ``role`` a group has the same role and ``ranks`` ranks afterwards.
    """

    role: Role | None = None
    engine_id: str | None = None
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] | None = None


def roles_call(roles: Roles, body: bytes | None) -> tuple[int, object]:
    """Return status and JSON of a call; ``body`` of a POST, None for a GET."""
    if body is None:
        return 200, roles.report()
    try:
        asked = decode_body(body, RoleRequest)
        switch = roles.request(asked.role, asked.engine_id, ranks=asked.ranks)
    except BadRequestError as error:
        return status_of(error), {"error": api_error(error)}
    return 200, msgspec.to_builtins(switch)


_TIMEOUT_S = 2.0


def call_roles(endpoint: str, headers: dict[str, str], request: object = None) -> dict[str, Any]:
    """Return the answer to a ``RoleRequest``, or without one the state; needs no event loop.

    Raises ``BadRequestError`` if the router refuses, ``EngineLostError`` if it does not answer.
    """
    parts = urlsplit(endpoint)
    if not parts.hostname:
        raise ConfigError(f"{{endpoint}} is {endpoint!r}; write http://host:port")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=_TIMEOUT_S)
    try:
        body = None if request is None else msgspec.json.encode(request)
        path = f"{parts.path.rstrip('/')}{ROLES_PATH}"
        sent = {**headers, "Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, sent)
        response = connection.getresponse()
        answer = response.read()
        if response.status == 200:
            return msgspec.json.decode(answer, type=dict[str, Any])
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise EngineLostError(
            f"no router answers at {endpoint} ({error}); name it with --endpoint, or start it"
        ) from error
    finally:
        connection.close()
    text = answer.decode(errors="replace")[:500]
    raise BadRequestError(f"the router at {endpoint} answered {response.status}: {text}")
