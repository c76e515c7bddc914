"""The seam between the router and whatever runs the model.

The service knows requests as ``Job`` and tokens as ``TokenEvent``; ``EngineCalls`` turns them into
model work.  ``vllm.generate_client`` implements it for jobs of vLLM's front end, the emulated
router's HTTP server for jobs of token ids, both over ``router.token_api``; tests in a few lines.
Bulk KV never passes here: prefill and decode transfers only name its location.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from dualpath.core.kv_hints import NO_KV_HINTS, KvRequestHints
from dualpath.core.session_hints import NO_HINTS, SessionHints
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.router.engines import EngineInfo
from dualpath.router.hit_account import HitPlace

#: The calls that an engine's HTTP server has: by name, for how many seconds it has sent nothing of
#: their answers; None before the first byte.
OpenCalls = Mapping[str, float | None]
KeysFor = Callable[[Sequence[int]], Sequence[bytes]]


class TokenEvent(msgspec.Struct, frozen=True):
    """Tokens that came out of an engine, and perhaps the end of the request.

    ``finish_reason`` None: more will come; "abort" and "error": the engine gave the request up;
    anything else ends it.  ``payload`` is the engine's own output for the front end (such as
    logprobs).  ``cached_tokens`` is set by the service in the first event of a request: prompt
    tokens with KV that was loaded instead of computed; ``cached_by_source`` are those by source.
    """

    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    payload: object = None
    cached_tokens: int | None = None
    cached_by_source: Mapping[HitPlace, int] | None = None


class Job(msgspec.Struct, frozen=True):
    """A request as the front end hands it to the service.

    ``request_id`` is unique among running requests.  ``prompt_token_ids`` ≥ 1 token,
    ``max_new_tokens`` ≥ 1.  ``keys`` are the keys of the prompt's full blocks, ``keys_for``
    computes them for any longer prompt of the same request (same salt and extra keys).
    ``cacheable`` False requests a full computation (as for prompt logprobs).
    ``first_token_from_pe`` False: the DE generates the first token again and only its tokens are
    streamed.  ``generated_before`` counts the tokens at the end of the prompt that an earlier,
    failed attempt has already streamed.  ``payload`` is the original request, opaque here.
    ``tenant`` is the ``core.blocks.tenant_tag`` of the blocks' owner.
    ``trace_headers`` are the W3C trace context that calls to engines carry on.  ``hints`` are
    the client's on its session, ``kv_hints`` an orchestrator's on its KV.  ``priority``: of the
    tenant's waiting requests, one with a lower number is earlier.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    keys: tuple[bytes, ...]
    keys_for: KeysFor
    cacheable: bool = True
    first_token_from_pe: bool = True
    generated_before: int = 0
    payload: object = None
    trace_headers: Mapping[str, str] | None = None
    tenant: str = ""
    hints: SessionHints = NO_HINTS
    priority: int = 0
    kv_hints: KvRequestHints = NO_KV_HINTS

    @property
    def prompt_tokens(self) -> int:
        """Tokens with KV that the DE needs before it can decode."""
        return len(self.prompt_token_ids)

    def continued(self, generated: Sequence[int]) -> "Job":
        """Return the job that is left after ``generated`` tokens have been streamed."""
        if not generated:
            return self
        tokens = self.prompt_token_ids + tuple(generated)
        return msgspec.structs.replace(
            self,
            prompt_token_ids=tokens,
            max_new_tokens=self.max_new_tokens - len(generated),
            keys=tuple(self.keys_for(tokens)),
            generated_before=self.generated_before + len(generated),
        )


class EngineHealth(Protocol):
    """Whether engines' HTTP servers answer."""

    async def answers(self, engine: EngineInfo) -> None:
        """Return if the engine's server is healthy; raises ``EngineLostError`` if not."""
        ...


class EngineCalls(EngineHealth, Protocol):
    """Model work on an engine.  A call's name is the ``request_id`` of its transfer.

    ``prefill`` and ``decode`` raise ``EngineLostError`` or ``TransportError`` if the engine cannot
    be reached or dies (the service then tries elsewhere), and ``BadRequestError`` if it refuses the
    request (final).  Cancelling the coroutine or closing the iterator aborts the work.
    ``prefill_transfer.request_id`` is the name of this *attempt* and the one engines know from
    ``Assign``; it differs from ``job.request_id`` after a retry.
    """

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: PrefillTransfer
    ) -> TokenEvent:
        """Run the prompt on a PE with one new token; return it.

        ``finish_reason`` "length" only means that the one requested token is there.
        """
        ...

    def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        """Continue on a DE after ``prior_tokens`` (the PE's first token, or none).

        Yields ``job.max_new_tokens - len(prior_tokens)`` tokens at most; the last event carries
        a ``finish_reason``.
        """
        ...

    async def open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        """Return the calls that the engine's server has; None if it does not report them.

        Raises ``EngineLostError`` if the server does not answer.
        """
        ...
