"""Calls to vLLM engines over their token API; the router's ``EngineCalls`` for real engines.

An engine needs ``--enable-scale-out`` for the route to exist.  Closing a decode iterator closes
its HTTP stream, on which the engine aborts the request.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from dualpath.core.control import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.core.errors import (
    BadRequestError,
    DualPathError,
    EngineLostError,
    IncompatibleError,
)
from dualpath.router.api_keys import ENGINE_KEY_VARIABLE
from dualpath.router.control.engine_calls import Job, TokenEvent
from dualpath.router.control.registry import EngineInfo
from dualpath.vllm.generate_wire import (
    WireAnswer,
    WireChoice,
    decode_answer,
    decode_sampling,
    prefill_sampling,
    prompt_logprobs,
    sampled_logprobs,
)
from dualpath.vllm.request_job import ClientRequest, can_continue

GENERATE_PATH = "/inference/v1/generate"

#: An engine on a cluster network answers a connection attempt in far less.
CONNECT_TIMEOUT_S = 5.0

#: Shorter than the 5 s after which vLLM's server closes an idle connection: a connection must
#: not be picked for a new request in the event the other end closes it.
IDLE_CONNECTION_S = 3.0

#: Statuses with which an engine refuses the request itself, not the caller or the route.
_CLIENT_FAULTS = frozenset({400, 413, 422})


class GenerateClient:
    """HTTP calls to engines; one per router, used on one event loop, ``aclose`` at the end."""

    def __init__(self, max_logprobs: int, headers: Mapping[str, str] | None = None) -> None:
        """Take the engines' ``--max-logprobs`` and headers that go with every call."""
        self._max_logprobs = max_logprobs
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: PrefillTransfer
    ) -> TokenEvent:
        """Run the prompt on ``engine`` and return its first token.

        Without tokens if the decode engine is to sample the first one.  Raises
        ``EngineLostError``, ``BadRequestError`` and, for an engine that is not set up for it,
        ``IncompatibleError``.
        """
        client = _client_request(job)
        _refuse_broken_state(job, client)
        body = _body(job, client, prefill_transfer)
        body["sampling_params"] = prefill_sampling(
            client.sampling, first_token=job.first_token_from_pe, max_logprobs=self._max_logprobs
        )
        async with self._post(engine, job, body) as response:
            answer = decode_answer(await response.read())
        choice = _only_choice(engine, answer)
        if not job.generated_before:
            client.prompt_logprobs = prompt_logprobs(
                answer.prompt_logprobs, client.sampling.prompt_logprobs
            )
        if not job.first_token_from_pe:
            return TokenEvent(token_ids=(), finish_reason="length")
        return _event(choice, client)

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        """Go on after ``prior_tokens`` on ``engine``, yielding the tokens that follow them.

        Ends after the event with a ``finish_reason``.  Raises as ``prefill``.
        """
        client = _client_request(job)
        body = _body(job, client, decode_transfer)
        body["token_ids"] = [*job.prompt_token_ids, *prior_tokens]
        body["sampling_params"] = decode_sampling(
            client.sampling,
            generated=job.generated_before + len(prior_tokens),
            max_tokens=job.max_new_tokens - len(prior_tokens),
            max_logprobs=self._max_logprobs,
        )
        body["stream"] = True
        async with self._post(engine, job, body) as response:
            async for data in _stream_data(response):
                answer = decode_answer(data)
                if answer.error is not None:
                    raise _refusal(engine, _status(answer), answer.error.message)
                event = _event(_only_choice(engine, answer), client)
                yield event
                if event.finish_reason is not None:
                    return
        raise EngineLostError(
            f"engine {engine.engine_id} at {engine.api_url} broke off its token stream; the "
            "request has to be taken up by another engine"
        )

    async def aclose(self) -> None:
        """Close all connections; engines abort what is still running on them."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def _post(
        self, engine: EngineInfo, job: Job, body: dict[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {
            **self._headers,
            **(job.trace_headers or {}),
            "Content-Type": "application/json",
        }
        url = engine.api_url.rstrip("/") + GENERATE_PATH
        try:
            async with self._open_session().post(
                url, data=msgspec.json.encode(body), headers=headers
            ) as response:
                if response.status != 200:
                    raise _refusal(engine, response.status, await _error_text(response))
                try:
                    yield response
                finally:
                    if not response.content.at_eof():
                        response.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineLostError(
                f"engine {engine.engine_id} at {engine.api_url} does not answer: "
                f"{error or type(error).__name__}; restart it or take it out"
            ) from error

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session, made on first use because it belongs to the running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )
        return self._session


def _client_request(job: Job) -> ClientRequest:
    assert isinstance(job.payload, ClientRequest)
    return job.payload


def _refuse_broken_state(job: Job, client: ClientRequest) -> None:
    """A retry goes on after streamed tokens, which not every kind of sampling survives."""
    if job.generated_before and not can_continue(client.sampling):
        raise DualPathError(
            f"an engine was lost after {job.generated_before} tokens, and sampling with a seed, "
            "penalties, a grammar or other state over generated tokens cannot go on elsewhere; "
            "send the request again"
        )


def _body(
    job: Job, client: ClientRequest, transfer: PrefillTransfer | DecodeTransfer
) -> dict[str, Any]:
    request = client.request
    body: dict[str, Any] = {
        "request_id": transfer.request_id,
        "token_ids": job.prompt_token_ids,
        "priority": request.priority,
        "kv_transfer_params": to_transfer_params(transfer),
    }
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.reasoning_ended is not None:
        body["reasoning_ended"] = request.reasoning_ended
    if request.reasoning_parser_kwargs is not None:
        body["reasoning_parser_kwargs"] = request.reasoning_parser_kwargs
    return body


def _only_choice(engine: EngineInfo, answer: WireAnswer) -> WireChoice:
    if len(answer.choices) != 1:
        raise IncompatibleError(
            f"engine {engine.engine_id} answered with {len(answer.choices)} choices where 1 was "
            "asked for; run the vLLM version dualpath was made for"
        )
    return answer.choices[0]


def _event(choice: WireChoice, client: ClientRequest) -> TokenEvent:
    return TokenEvent(
        token_ids=tuple(choice.token_ids or ()),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        payload=sampled_logprobs(choice.logprobs, client.sampling),
    )


async def _stream_data(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event up to ``[DONE]``; lines may be of any length."""
    pending = b""
    async for piece in response.content.iter_any():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield data


async def _error_text(response: aiohttp.ClientResponse) -> str:
    body = await response.read()
    try:
        answer = decode_answer(body)
    except IncompatibleError:
        return body[:300].decode("utf-8", "replace")
    return answer.error.message if answer.error else body[:300].decode("utf-8", "replace")


def _status(answer: WireAnswer) -> int:
    code = answer.error.code if answer.error else None
    return code if isinstance(code, int) else 500


def _refusal(
    engine: EngineInfo, status: int, message: str
) -> BadRequestError | EngineLostError | IncompatibleError:
    """Return the error for an engine's answer with ``status``."""
    if status in _CLIENT_FAULTS:
        return BadRequestError(message)
    said = f"engine {engine.engine_id} at {engine.api_url} answered {status}: {message}"
    if 400 <= status < 500:
        return IncompatibleError(
            f"{said}; start it with --enable-scale-out, and the router with the engines' key, if "
            f"they have one, in {ENGINE_KEY_VARIABLE}"
        )
    return EngineLostError(f"{said}; see its log")
