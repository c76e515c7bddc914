"""Why the router turns requests, engines and their messages away: labels of its metrics."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

import msgspec

#: vLLM's name, in the ``param`` of an OpenAI error, for the length of a prompt in tokens.
PROMPT_PARAMETER = "input_tokens"
_PROMPT_PARAMETERS = (PROMPT_PARAMETER, "input_text")

_FIRST_REFUSAL, _LAST_REFUSAL = 400, 499
#: All refusals are counted; ``ControlRefusals.complain`` limits those that are logged.
COMPLAINT_GAP_S = 60.0
MOST_COMPLAINTS = 20


class HttpRefusal(StrEnum):
    """Why an HTTP request was answered with a 4xx status."""

    API_KEY = "api-key"
    FOREIGN_PAGE = "foreign-page"
    OVERLOADED = "overloaded"
    BODY_SIZE = "body-size"
    PROMPT_LENGTH = "prompt-length"
    BAD_REQUEST = "bad-request"
    NOT_FOUND = "not-found"
    OTHER = "other"


class QueueRefusal(StrEnum):
    """Why a front end's queue refused a request with 429."""

    FULL = "full"
    """It came to a full queue, and none of those that wait had to give way to it."""
    DISPLACED = "displaced"
    """It waited in a full queue and gave way to one of another tenant, or of lower priority."""


class ControlRefusal(StrEnum):
    """Why a connection, a registration or another frame at the control address was refused."""

    SECRET = "secret"
    FLOOD = "flood"
    MALFORMED = "malformed"
    UNKNOWN_ENGINE = "unknown-engine"
    VERSION = "version"
    MODE = "mode"
    NAMESPACE = "namespace"
    WEIGHTS = "weights"
    SETTINGS = "settings"
    ADAPTERS = "adapters"
    REPLACED = "replaced"


_BY_STATUS = {
    400: HttpRefusal.BAD_REQUEST,
    401: HttpRefusal.API_KEY,
    403: HttpRefusal.FOREIGN_PAGE,
    404: HttpRefusal.NOT_FOUND,
    413: HttpRefusal.BODY_SIZE,
    422: HttpRefusal.BAD_REQUEST,
    429: HttpRefusal.OVERLOADED,
}


class _Error(msgspec.Struct):
    param: str | None = None


class _Answer(msgspec.Struct):
    error: _Error


def http_refusal(status: int, body: bytes) -> HttpRefusal | None:
    """Return why a request got this answer, None if it was not refused (no 4xx status).

    ``body`` is the answer's: its OpenAI error names a prompt that is too long by its parameter.
    """
    if not _FIRST_REFUSAL <= status <= _LAST_REFUSAL:
        return None
    reason = _BY_STATUS.get(status, HttpRefusal.OTHER)
    if reason is HttpRefusal.BAD_REQUEST and _parameter(body) in _PROMPT_PARAMETERS:
        return HttpRefusal.PROMPT_LENGTH
    return reason


def _parameter(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Answer).error.param
    except (msgspec.MsgspecError, ValueError):
        return None


class ControlRefusals:
    """Counts refusals at the control address, and limits their log lines."""

    def __init__(self) -> None:
        self._counted: Counter[ControlRefusal] = Counter()
        self._complained: dict[bytes, float] = {}

    def count(self, reason: ControlRefusal) -> int:
        """Count a refusal; return how many there were for this reason."""
        self._counted[reason] += 1
        return self._counted[reason]

    def totals(self) -> Mapping[ControlRefusal, int]:
        """Return all counts, also those of 0."""
        return {reason: self._counted[reason] for reason in ControlRefusal}

    def complain(self, peer: bytes, now_s: float) -> bool:
        """Whether to write a line about this peer, which is then written.

        There is one line for a peer in ``COMPLAINT_GAP_S``, and not more than ``MOST_COMPLAINTS``
        for all peers, since names cost a stranger nothing.
        """
        for former, said_s in list(self._complained.items()):
            if now_s - said_s >= COMPLAINT_GAP_S:
                del self._complained[former]
        if peer in self._complained or len(self._complained) >= MOST_COMPLAINTS:
            return False
        self._complained[peer] = now_s
        return True
