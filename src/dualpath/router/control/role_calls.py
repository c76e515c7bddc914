"""Calls about roles: ``GET`` says how it stands, ``POST`` asks for another role or size."""

from typing import Annotated, Protocol

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.router.control.groups import MAX_RANKS
from dualpath.router.control.roles import Roles
from dualpath.router.token_api.statuses import api_error, status_of
from dualpath.router.token_api.wire import decode_body

ROLES_PATH = "/dualpath/v1/roles"


class RoledService(Protocol):
    """The router's service as far as engines change their role in it."""

    @property
    def roles(self) -> Roles:
        """The switches."""
        ...


class RoleWish(msgspec.Struct):
    """Body of the POST; without ``engine_id`` it is the engine that is empty soonest.

    Without ``role`` a group keeps its own, and has ``ranks`` afterwards.
    """

    role: Role | None = None
    engine_id: str | None = None
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] | None = None


def roles_call(service: RoledService, body: bytes | None) -> tuple[int, object]:
    """Return status and JSON of a call; ``body`` of a POST, None for a GET."""
    if body is None:
        return 200, service.roles.report()
    try:
        wish = decode_body(body, RoleWish)
        switch = service.roles.ask(wish.role, wish.engine_id, ranks=wish.ranks)
    except BadRequestError as error:
        return status_of(error), {"error": api_error(error)}
    return 200, msgspec.to_builtins(switch)
