"""Asks a router for roles, without an event loop: for commands and supervisors."""

import http.client
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dualpath.core.errors import BadRequestError, ConfigError, EngineLostError
from dualpath.router.control.role_calls import ROLES_PATH

_TIMEOUT_S = 2.0


def call_roles(endpoint: str, headers: dict[str, str], wish: object = None) -> dict[str, Any]:
    """Return the answer to a wish, or without one how roles stand.

    Raises ``BadRequestError`` if the router refuses, ``EngineLostError`` if it does not answer.
    """
    parts = urlsplit(endpoint)
    if not parts.hostname:
        raise ConfigError(f"{{endpoint}} is {endpoint!r}; write http://host:port")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=_TIMEOUT_S)
    try:
        body = None if wish is None else msgspec.json.encode(wish)
        path = f"{parts.path.rstrip('/')}{ROLES_PATH}"
        connection.request("GET" if body is None else "POST", path, body, headers)
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
