"""Bodies of vLLM's token API ``/inference/v1/generate``: token ids in, token ids out.

The same on both sides: the router encodes requests and decodes answers, an emulated engine does
the opposite.  Text never crosses this wire.  Unknown fields are ignored, as vLLM does.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from dualpath.core.errors import BadRequestError

#: The route; a vLLM engine has it with ``--enable-scale-out``.
GENERATE_PATH = "/inference/v1/generate"

#: The last event of a stream.
STREAM_END = b"data: [DONE]\n\n"

_END_PAYLOAD = b"[DONE]"

_Body = TypeVar("_Body")
_Sampling = TypeVar("_Sampling")


class GenerateRequest(msgspec.Struct, Generic[_Sampling], omit_defaults=True):
    """A prompt with its transfer; ``token_ids`` are all of them, at a DE the generated ones too.

    ``sampling_params`` are vLLM's as a mapping of JSON values where the router sends them, and
    what an emulated engine wants of them where it reads them.  ``model`` is an adapter, or none;
    ``features`` are vLLM's of the prompt's images.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling_params: _Sampling
    model: str | None = None
    stream: bool = False
    cache_salt: str | None = None
    features: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    priority: int = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Mapping[str, Any] | None = None


class Logprob(msgspec.Struct):
    """One candidate; ``rank`` counts from 1, None if unknown."""

    token_id: int
    logprob: float
    rank: int | None = None


class SampledLogprob(Logprob):
    """The sampled token and its candidates, sampled first, then by rank."""

    top_logprobs: list[Logprob] = []


class ChoiceLogprobs(msgspec.Struct):
    """Logprobs of a choice, one entry per token."""

    content: list[SampledLogprob] | None = None


class PromptLogprob(msgspec.Struct):
    """One candidate at a prompt position, keyed by token id."""

    logprob: float
    rank: int | None = None


class Choice(msgspec.Struct, omit_defaults=True):
    """Tokens that came out.

    ``finish_reason`` None: more will come; "abort" and "error": the engine gave the request up.
    """

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChoiceLogprobs | None = None


class ApiError(msgspec.Struct):
    """Why there are no (more) tokens; ``code`` is an HTTP status.

    ``param`` names the part of the request that is at fault, where one is.
    """

    message: str = ""
    code: int | str | None = None
    type: str = "error"
    param: str | None = None


class GenerateAnswer(msgspec.Struct, omit_defaults=True):
    """A whole answer or one event of a stream; each call asks for one choice."""

    request_id: str = ""
    choices: list[Choice] = []
    error: ApiError | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


def decode_body(body: bytes, kind: type[_Body]) -> _Body:
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


class EventLines:
    """Splits a server-sent event stream into the payloads of its ``data:`` lines.

    Needed because a line may exceed aiohttp's limit: a prompt or many logprobs in one event.
    ``ended``: the stream's last event, which has no payload, has come.
    """

    def __init__(self) -> None:
        """Start with nothing received."""
        self.ended = False
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Take bytes as they arrive and return the payloads that became complete."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        payloads = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if _END_PAYLOAD in payloads:
            self.ended = True
            return payloads[: payloads.index(_END_PAYLOAD)]
        return payloads
