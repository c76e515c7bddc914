"""Bodies of vLLM's token API ``/inference/v1/generate``, as far as an emulated engine needs them.

The same on both sides: an emulated engine decodes requests and encodes answers, the front door
does the opposite.  Unknown fields are ignored, as vLLM does.
"""

from typing import Any, Literal, TypeVar

import msgspec

from dualpath.core.errors import BadRequestError

GENERATE_PATH = "/inference/v1/generate"

_T = TypeVar("_T")


class Sampling(msgspec.Struct):
    """Sampling parameters; an emulated token depends on the prefix alone."""

    max_tokens: int = 16


class GenerateRequest(msgspec.Struct, omit_defaults=True):
    """A prompt with a hand-over or take-over; all ``token_ids`` at a DE, generated ones too."""

    request_id: str
    token_ids: list[int]
    sampling_params: Sampling
    stream: bool = False
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Choice(msgspec.Struct):
    """Tokens that came out."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    index: int = 0


class WireError(msgspec.Struct):
    """Why there are no (more) tokens; ``code`` is an HTTP status.

    ``param`` names the part of the request that is at fault, where one is.
    """

    message: str
    code: int = 500
    type: Literal["error"] = "error"
    param: str | None = None


class GenerateAnswer(msgspec.Struct, omit_defaults=True):
    """A whole answer or one event of a stream."""

    request_id: str = ""
    choices: list[Choice] = []
    error: WireError | None = None


def decode_body(body: bytes, kind: type[_T]) -> _T:
    """Return the decoded body; raises ``BadRequestError`` for anything else."""
    try:
        return msgspec.json.decode(body, type=kind)
    # ValueError: text that is no UTF-8; RecursionError: nested deeper than any request.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequestError(
            f"body of {len(body)} bytes: {error}; send a valid request"
        ) from error


def server_event(value: object) -> bytes:
    """Return a value as a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


#: The last event of a stream.
STREAM_END = b"data: [DONE]\n\n"
