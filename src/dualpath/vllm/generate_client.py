"""The router's calls to vLLM engines, for jobs that vLLM's front end created.

Continuing on another engine after an engine was lost needs sampling without state.  Jobs with
stateful sampling are refused here, because only this module knows their sampling parameters.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dualpath.core.errors import BadRequestError, DualPathError
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.router.engine_calls import Job, OpenCalls, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.token_api.client import TokenApiClient, token_event
from dualpath.router.token_api.wire import (
    ChoiceLogprobs,
    GenerateRequest,
    Logprob,
    PromptLogprob,
    SampledLogprob,
)
from dualpath.vllm.engine_core import (
    ROUTER_ARGUMENTS,
    ClientRequest,
    can_continue,
    features_on_wire,
)

# ---------------------------------------------------------------------------------------- sampling
# Converts vLLM's sampling parameters and logprobs to and from the token API.
#
# Parameters of the router's output processor (detokenising, stop strings, special tokens) are
# removed; parameters that affect the tokens themselves are passed through unchanged.

#: Fields that the router's own output processing handles, or that are internal to vLLM.
#: ``stream_interval`` is set separately, combined with the router's.  ``watermarking`` was resolved
#: against the router's configuration, which has no watermarks.
ROUTER_SIDE_FIELDS = frozenset(
    {
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_kind",
        "stream_interval",
        "flat_logprobs",
        "skip_clone",
        "output_text_buffer_length",
        "watermarking",
        "_eos_token_id",
        "_all_stop_token_ids",
        "_watermarking_skipped",
        "_bad_words_token_ids",
    }
)


def decode_sampling(
    params: SamplingParams,
    *,
    generated: int,
    max_tokens: int,
    max_logprobs: int,
    stream_interval: int = 1,
) -> dict[str, Any]:
    """Return the JSON form of ``params`` for a decode engine.

    ``generated`` tokens are already part of its prompt; up to ``max_tokens`` ≥ 1 more may follow.
    ``max_tokens`` is always sent, even if the client left it out.  Prompt logprobs are left out
    because the prefill engine computes them.

    The larger of the client's and the router's ``stream_interval`` is sent, so that tokens that the
    router would collect anyway arrive as one event.  The engine may then generate up to that many
    tokens beyond a stop string.
    """
    fields = _fields(params)
    fields.pop("prompt_logprobs", None)
    fields.pop("skip_reading_prefix_cache", None)
    fields["max_tokens"] = max_tokens
    fields["min_tokens"] = max(params.min_tokens - generated, 0)
    if (interval := max(params.stream_interval or 1, stream_interval)) > 1:
        fields["stream_interval"] = interval
    _request_logprobs(fields, max_logprobs)
    return fields


def prefill_sampling(
    params: SamplingParams, *, first_token: bool, max_logprobs: int
) -> dict[str, Any]:
    """Return the JSON form of ``params`` for a prefill engine, which samples one token.

    Without ``first_token`` that token is discarded.
    """
    if not first_token:
        discarded: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
        if params.prompt_logprobs is not None:
            discarded["prompt_logprobs"] = params.prompt_logprobs
        return discarded
    fields = _fields(params)
    fields["max_tokens"] = 1
    fields["min_tokens"] = 0
    _request_logprobs(fields, max_logprobs)
    return fields


def _fields(params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(params)
    sent = {name: value for name, value in fields.items() if name not in ROUTER_SIDE_FIELDS}
    if structured := sent.get("structured_outputs"):
        sent["structured_outputs"] = {
            name: value for name, value in structured.items() if not name.startswith("_")
        }
    extra = {
        name: value
        for name, value in (params.extra_args or {}).items()
        if name not in ROUTER_ARGUMENTS
    }
    sent.pop("extra_args", None)
    if extra:
        sent["extra_args"] = extra
    for name in ("stop_token_ids", "bad_words"):
        if not sent.get(name):
            sent.pop(name, None)
    sent["detokenize"] = False
    sent["n"] = 1
    return sent


def _request_logprobs(fields: dict[str, Any], max_logprobs: int) -> None:
    """Request one candidate more than the client did; ``max_logprobs`` -1 means no limit.

    The engine truncates its list, which begins with the sampled token, to the requested number: a
    sampled token outside the top n would displace the n-th candidate.
    """
    if fields.get("logprob_token_ids"):
        _request_named_logprobs(fields, max_logprobs)
        return
    requested = fields.get("logprobs")
    if requested is not None and requested > 0 and (requested < max_logprobs or max_logprobs == -1):
        fields["logprobs"] = requested + 1


def _request_named_logprobs(fields: dict[str, Any], max_logprobs: int) -> None:
    """Request the logprobs of named tokens, and as many candidates, without which none are sent.

    The first token is named twice to make room for the sampled token, as in ``_request_logprobs``.
    """
    named = fields["logprob_token_ids"]
    if max_logprobs != -1 and len(named) >= max_logprobs:
        raise BadRequestError(
            f"logprob_token_ids has {len(named)} tokens, but engines return at most "
            f"{max_logprobs - 1}; send fewer, or raise --max-logprobs at router and engines"
        )
    fields["logprob_token_ids"] = [*named, named[0]]
    fields["logprobs"] = len(named) + 1


def sampled_logprobs(wire: ChoiceLogprobs | None, params: SamplingParams) -> LogprobsLists | None:
    """Return vLLM's arrays of the logprobs that ``params`` request, None if they request none.

    These are ``logprobs`` candidates (-1: all), or the tokens of ``logprob_token_ids``.
    """
    requested = params.num_logprobs
    if requested is None or wire is None or not wire.content:
        return None
    if params.logprob_token_ids:
        rows = [_named_row(position, params.logprob_token_ids) for position in wire.content]
    else:
        rows = [
            _row(position, {other.rank: other for other in position.top_logprobs}, requested)
            for position in wire.content
        ]
    width = min(len(row) for row in rows)
    return LogprobsLists(
        np.array([[entry.token_id for entry in row[:width]] for row in rows], dtype=np.int64),
        np.array([[entry.logprob for entry in row[:width]] for row in rows], dtype=np.float64),
        np.array([position.rank or 0 for position in wire.content], dtype=np.int64),
    )


def prompt_logprobs(
    wire: Sequence[dict[str, PromptLogprob] | None] | None, requested: int | None
) -> LogprobsTensors | None:
    """Return vLLM's tensors for all prompt positions after the first, which has no logprobs."""
    if requested is None or wire is None or len(wire) < 2:
        return None
    rows, ranks = [], []
    for position in wire[1:]:
        entries = [
            Logprob(int(token), entry.logprob, entry.rank)
            for token, entry in (position or {}).items()
        ]
        rows.append(_row(entries[0], {entry.rank: entry for entry in entries}, requested))
        ranks.append(entries[0].rank or 0)
    width = min(len(row) for row in rows)
    return LogprobsTensors(
        torch.tensor([[entry.token_id for entry in row[:width]] for row in rows]),
        torch.tensor(
            [[entry.logprob for entry in row[:width]] for row in rows], dtype=torch.float64
        ),
        torch.tensor(ranks),
    )


def _row(own: Logprob, by_rank: dict[int | None, Logprob], requested: int) -> list[Logprob]:
    """Return a row in the order of vLLM's sampler: the token itself, then candidates by rank."""
    by_rank.setdefault(own.rank, own)
    row = [own]
    limit = len(by_rank) if requested == -1 else requested
    for rank in range(1, limit + 1):
        if rank not in by_rank:
            break
        row.append(by_rank[rank])
    return row


def _named_row(own: SampledLogprob, named: Sequence[int]) -> list[Logprob]:
    """Return a row in the order of vLLM's sampler: the token itself, then the named tokens."""
    by_id: dict[int, Logprob] = {own.token_id: own}
    by_id.update((other.token_id, other) for other in own.top_logprobs)
    return [own, *(by_id[token_id] for token_id in named)]


class GenerateClient:
    """``router.control.engine_calls.EngineCalls``; one per router, ``aclose`` at the end."""

    def __init__(
        self,
        max_logprobs: int,
        headers: Mapping[str, str] | None = None,
        stream_interval: int = 1,
        ca_file: str = "",
    ) -> None:
        """Create a client; ``max_logprobs`` is the engines' ``--max-logprobs``.

        ``headers`` are sent with every call.  ``stream_interval`` is the router's: how many tokens
        are sent as one chunk, at least 1.  ``ca_file`` has the authorities of engines with HTTPS.
        """
        self._max_logprobs = max_logprobs
        self._stream_interval = stream_interval
        self._api = TokenApiClient(headers, ca_file)

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
        tokens = job.prompt_token_ids + tuple(prior_tokens)
        request = _request(client, decode_transfer, tokens, sampling)
        async with aclosing(self._api.stream(engine, job, request)) as choices:
            async for choice in choices:
                yield token_event(choice, sampled_logprobs(choice.logprobs, client.sampling))

    async def answers(self, engine: EngineInfo) -> None:
        """Return if the engine's server answers that it is healthy."""
        await self._api.answers(engine)

    async def open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        """Return the calls that the engine's server has; None if it does not report them."""
        return await self._api.open_calls(engine)

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
