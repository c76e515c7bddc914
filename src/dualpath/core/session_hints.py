"""Hints of clients about the agent session that a turn belongs to.

A wrong hint costs time or memory, never correctness.  Clients send hints as vLLM's custom
arguments, ``vllm_xargs`` of a request (``extra_body`` of the ``openai`` client); the session's name
also as ``session_id`` of the request or as header ``X-Session-ID``.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from dualpath.core.errors import BadRequestError
from dualpath.core.names import name_problem

#: No tool call runs longer; KV that must live longer is pinned in storage.
LONGEST_S = 86_400.0


class SessionHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hints of one turn; all defaults without hints.

    ``session_id`` names the session within its tenant.  ``retain_s``: retain its KV in DRAM for
    this time after the answer, None: until other requests need the memory.  ``next_turn_s``: the
    expected time from the answer to the next turn, None: as between earlier turns.  ``prefetch``
    False: do not prefetch its KV for that turn.  ``done``: no turn follows this one.
    """

    session_id: str = ""
    retain_s: float | None = None
    next_turn_s: float | None = None
    prefetch: bool = True
    done: bool = False


NO_HINTS = SessionHints()
#: Names of the custom arguments; the router consumes them and does not pass them to engines.
HINT_ARGUMENTS = frozenset(SessionHints.__struct_fields__)


def session_hints(arguments: Mapping[str, Any], session_id: str | None = None) -> SessionHints:
    """Return the hints among a request's custom arguments; other arguments are ignored.

    ``session_id`` is the one of the request body or header and takes precedence.  Raises
    ``BadRequestError`` for a hint of a wrong type or out of range.
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
    if (wrong := name_problem(value)) is not None:
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
    """Read a flag; vLLM's custom arguments have no booleans, so 0 and 1 are valid as well."""
    value = given.get(name, default)
    if value not in (0, 1):
        raise BadRequestError(f"{name} is {value!r}; send true or false, or 1 or 0")
    return bool(value)
