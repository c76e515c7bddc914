"""The router's calls to vLLM engines, for jobs that vLLM's front end created.

Continuing on another engine after an engine was lost needs sampling without state.  Jobs with
stateful sampling are refused here, because only this module knows their sampling parameters.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from dualpath.core.errors import DualPathError
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.token_api.client import TokenApiClient, token_event
from dualpath.router.token_api.wire import GenerateRequest
from dualpath.vllm.prompt_images import features_on_wire
from dualpath.vllm.request_job import ClientRequest, can_continue
from dualpath.vllm.sampling import (
    decode_sampling,
    prefill_sampling,
    prompt_logprobs,
    sampled_logprobs,
)


class GenerateClient:
    """``router.control.engine_calls.EngineCalls``; one per router, ``aclose`` at the end."""

    def __init__(
        self,
        max_logprobs: int,
        headers: Mapping[str, str] | None = None,
        stream_interval: int = 1,
    ) -> None:
        """Create a client; ``max_logprobs`` is the engines' ``--max-logprobs``.

        ``headers`` are sent with every call.  ``stream_interval`` is the router's: how many tokens
        are sent as one chunk, at least 1.
        """
        self._max_logprobs = max_logprobs
        self._stream_interval = stream_interval
        self._api = TokenApiClient(headers)

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: PrefillTransfer
    ) -> TokenEvent:
        """Run the prompt on ``engine`` and return its first token.

        The event has no tokens if the decode engine samples the first one.  Raises what
        ``TokenApiClient`` raises.
        """
        client = _client_request(job)
        _refuse_stateful_retry(job, client)
        sampling = prefill_sampling(
            client.sampling, first_token=job.first_token_from_pe, max_logprobs=self._max_logprobs
        )
        request = _request(client, prefill_transfer, job.prompt_token_ids, sampling)
        answer = await self._api.generate(engine, job, request)
        if not job.generated_before:
            client.prompt_logprobs = prompt_logprobs(
                answer.prompt_logprobs, client.sampling.prompt_logprobs
            )
        if not job.first_token_from_pe:
            return TokenEvent(token_ids=(), finish_reason="length")
        choice = answer.choices[0]
        return token_event(choice, sampled_logprobs(choice.logprobs, client.sampling))

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        """Continue after ``prior_tokens`` on ``engine`` and yield the tokens that follow them.

        Ends after the event with a ``finish_reason``.  Raises what ``TokenApiClient`` raises.
        """
        client = _client_request(job)
        sampling = decode_sampling(
            client.sampling,
            generated=job.generated_before + len(prior_tokens),
            max_tokens=job.max_new_tokens - len(prior_tokens),
            max_logprobs=self._max_logprobs,
            stream_interval=self._stream_interval,
        )
        tokens = (*job.prompt_token_ids, *prior_tokens)
        request = _request(client, decode_transfer, tokens, sampling)
        async with aclosing(self._api.stream(engine, job, request)) as choices:
            async for choice in choices:
                yield token_event(choice, sampled_logprobs(choice.logprobs, client.sampling))

    async def answers(self, engine: EngineInfo) -> None:
        """Return if the engine's server answers that it is healthy."""
        await self._api.answers(engine)

    async def aclose(self) -> None:
        """Close all connections; engines abort the requests that still run on them."""
        await self._api.aclose()


def _client_request(job: Job) -> ClientRequest:
    assert isinstance(job.payload, ClientRequest)
    return job.payload


def _refuse_stateful_retry(job: Job, client: ClientRequest) -> None:
    """Raise ``DualPathError`` for a retry after streamed tokens with stateful sampling."""
    if job.generated_before and not can_continue(client.sampling):
        raise DualPathError(
            f"an engine was lost after {job.generated_before} tokens, and sampling with a seed, "
            "penalties, a grammar or other state over generated tokens cannot continue on another "
            "engine; send the request again"
        )


def _request(
    client: ClientRequest,
    transfer: PrefillTransfer | DecodeTransfer,
    token_ids: Sequence[int],
    sampling: dict[str, Any],
) -> GenerateRequest[dict[str, Any]]:
    request = client.request
    return GenerateRequest(
        request_id=transfer.request_id,
        token_ids=token_ids,
        sampling_params=sampling,
        model=client.adapter.name if client.adapter else None,
        cache_salt=client.engine_salt,
        features=features_on_wire(client.images),
        kv_transfer_params=to_transfer_params(transfer),
        priority=request.priority,
        reasoning_ended=request.reasoning_ended,
        reasoning_parser_kwargs=request.reasoning_parser_kwargs,
    )
