"""What a client may say of the agent's session that a turn belongs to.

All of it is a hint: a wrong one costs time or memory, never correctness.  Clients send hints where
vLLM takes custom arguments, ``vllm_xargs`` of a request (``extra_body`` of the ``openai`` client);
the session's name also as ``session_id`` of the request or as header ``X-Session-ID``.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from dualpath.core.errors import BadRequestError
from dualpath.core.names import unfit_name

#: Nobody's tools run longer; what is to be kept longer is pinned in storage.
LONGEST_S = 86_400.0


class SessionHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hints of one turn; empty without any.

    ``session_id`` names the session, for its tenant only.  ``retain_s``: keep its KV in DRAM for so
    long after the answer, None: as long as nobody else needs the memory.  ``next_turn_s``: the next
    turn comes about so long after the answer, None: as it did before.  ``prefetch`` False: do not
    bring its KV back for that turn.  ``done``: no turn follows this one.
    """

    session_id: str = ""
    retain_s: float | None = None
    next_turn_s: float | None = None
    prefetch: bool = True
    done: bool = False


NO_HINTS = SessionHints()
#: As custom arguments are called; they are the router's and do not reach engines.
HINT_ARGUMENTS = frozenset(SessionHints.__struct_fields__)


def session_hints(arguments: Mapping[str, Any], session_id: str | None = None) -> SessionHints:
    """Return the hints among a request's custom arguments; others are left alone.

    ``session_id`` is the one given otherwise, and wins.  Raises ``BadRequestError`` for a hint of
    another type or out of range.
    """
    given = {name: arguments[name] for name in HINT_ARGUMENTS & set(arguments)}
    if session_id:
        given["session_id"] = session_id
    if not given:
        return NO_HINTS
    hints = SessionHints(
        session_id=_name(given.get("session_id", "")),
        retain_s=_seconds(given, "retain_s"),
        next_turn_s=_seconds(given, "next_turn_s"),
        prefetch=_flag(given, "prefetch", default=True),
        done=_flag(given, "done", default=False),
    )
    return NO_HINTS if hints == NO_HINTS else hints


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise BadRequestError(f"session_id is {value!r}; send text")
    if (wrong := unfit_name(value)) is not None:
        raise BadRequestError(f"session_id {wrong}")
    return value


def _seconds(given: Mapping[str, Any], name: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0.0 <= value <= LONGEST_S:
        raise BadRequestError(f"{name} is {value!r}; send seconds, 0 to {LONGEST_S:g}")
    return float(value)


def _flag(given: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Read a flag; vLLM's custom arguments know no booleans, so that 0 and 1 count as well."""
    value = given.get(name, default)
    if value not in (0, 1):
        raise BadRequestError(f"{name} is {value!r}; send true or false, or 1 or 0")
    return bool(value)
