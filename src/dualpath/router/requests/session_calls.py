"""A client's call between two turns, with hints on its session."""

from typing import Any, Protocol

import msgspec

from dualpath.core.blocks import tenant_tag
from dualpath.core.errors import BadRequestError
from dualpath.core.session_hints import HINT_ARGUMENTS, SessionHints, session_hints
from dualpath.core.settings import nearest
from dualpath.router.requests.request import check_salt
from dualpath.router.token_api.statuses import NOT_FOUND, api_error, status_of
from dualpath.router.token_api.wire import ApiError, decode_body

#: The fields of a call's body.
_FIELDS = HINT_ARGUMENTS | {"cache_salt"}


class HintedService(Protocol):
    """The router's service as far as it takes hints."""

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Apply a client's hints on a session while its tool runs; False if it is unknown."""
        ...


async def session_call(
    service: HintedService, session_id: str, body: bytes, *, over: bool
) -> tuple[int, object]:
    """Carry out a call of ``SESSION_PATH``; return the answer's status and JSON.

    ``body``: a JSON object of hints, and ``cache_salt`` where the session's requests have one; it
    may be empty.  ``over``: the session is done.
    """
    try:
        fields = decode_body(body, dict[str, Any]) if body else {}
        if unknown := [name for name in fields if name not in _FIELDS]:
            raise BadRequestError(f"{unknown[0]!r} is no hint; {nearest(unknown[0], _FIELDS)}")
        salt = fields.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise BadRequestError(f"cache_salt is {salt!r}; send text")
        check_salt(salt)
        hints = session_hints(fields, session_id)
    except BadRequestError as error:
        return status_of(error), {"error": api_error(error)}
    if over:
        hints = msgspec.structs.replace(hints, done=True)
    if not await service.hint_session(tenant_tag(salt), session_id, hints):
        message = (
            f"no session {session_id[:80]!r} is known here; it begins with a request that has this "
            "session_id, and the same cache_salt"
        )
        return NOT_FOUND, {"error": ApiError(message, NOT_FOUND)}
    return 200, {"session_id": session_id, "done": over}
