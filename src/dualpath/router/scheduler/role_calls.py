"""HTTP calls about roles: ``GET`` returns the state, ``POST`` requests another role or size."""

import http.client
import ssl
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from dualpath.core.addresses import checked_http_url
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, EngineLostError
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


def open_connection(
    url: SplitResult, timeout_s: float, tls: ssl.SSLContext | None
) -> http.client.HTTPConnection:
    """Return a connection to the server of an HTTP or HTTPS URL, for one call."""
    if url.scheme == "https":
        return http.client.HTTPSConnection(url.netloc, timeout=timeout_s, context=tls)
    return http.client.HTTPConnection(url.netloc, timeout=timeout_s)


def call_roles(
    endpoint: str,
    headers: dict[str, str],
    request: object = None,
    tls: ssl.SSLContext | None = None,
    path: str = ROLES_PATH,
) -> dict[str, Any]:
    """Return the answer to a ``RoleRequest``, or without one the state; needs no event loop.

    ``path`` may be that of other calls that show a state and begin something.  ``tls`` checks the
    certificate of an ``https://`` endpoint, None: by the system's authorities.
    Raises ``BadRequestError`` if the router refuses, ``EngineLostError`` if it does not answer.
    """
    parts = urlsplit(checked_http_url(endpoint, "endpoint"))
    connection = open_connection(parts, _TIMEOUT_S, tls)
    try:
        body = None if request is None else msgspec.json.encode(request)
        where = f"{parts.path.rstrip('/')}{path}"
        sent = {**headers, "Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", where, body, sent)
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
