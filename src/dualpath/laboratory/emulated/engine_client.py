"""The router's calls to emulated engines, over the same HTTP API that vLLM engines have."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from dualpath.core.control import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.core.errors import BadRequestError, EngineLostError
from dualpath.laboratory.emulated.wire import (
    GENERATE_PATH,
    GenerateAnswer,
    GenerateRequest,
    Sampling,
    WireError,
    decode_body,
)
from dualpath.laboratory.workload.replay.stream import EventLines
from dualpath.router.control.engine_calls import Job, TokenEvent
from dualpath.router.control.registry import EngineInfo

CONNECT_TIMEOUT_S = 5.0
_CLIENT_FAULTS = range(400, 500)


class EngineClient:
    """``router.engine_calls.EngineCalls``; ``aclose`` at the end.  A job's payload is its salt.

    ``headers`` go with every call.
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: PrefillTransfer
    ) -> TokenEvent:
        """Run the prompt on a PE; return its token."""
        body = _body(job, prefill_transfer, job.prompt_token_ids, 1)
        async with self._post(engine, job, body) as response:
            answer = _answer(engine, await response.read())
        if not job.first_token_from_pe:
            return TokenEvent(token_ids=(), finish_reason="length")
        return _event(engine, answer)

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        """Go on after ``prior_tokens`` on a DE."""
        tokens = (*job.prompt_token_ids, *prior_tokens)
        body = _body(job, decode_transfer, tokens, job.max_new_tokens - len(prior_tokens))
        body.stream = True
        lines = EventLines()
        async with self._post(engine, job, body) as response:
            async for received in response.content.iter_any():
                for payload in lines.feed(received):
                    event = _event(engine, _answer(engine, payload))
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
        self, engine: EngineInfo, job: Job, body: GenerateRequest
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )
        url = engine.api_url.rstrip("/") + GENERATE_PATH
        try:
            async with self._session.post(
                url,
                data=msgspec.json.encode(body),
                headers={
                    **self._headers,
                    **(job.trace_headers or {}),
                    "Content-Type": "application/json",
                },
            ) as response:
                if response.status != 200:
                    error = _answer(engine, await response.read()).error
                    raise _refusal(engine, error or WireError("no reason", response.status))
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


def _body(
    job: Job, transfer: PrefillTransfer | DecodeTransfer, tokens: Sequence[int], max_tokens: int
) -> GenerateRequest:
    assert job.payload is None or isinstance(job.payload, str)
    return GenerateRequest(
        request_id=transfer.request_id,
        token_ids=list(tokens),
        sampling_params=Sampling(max_tokens=max_tokens),
        cache_salt=job.payload,
        kv_transfer_params=to_transfer_params(transfer),
    )


def _answer(engine: EngineInfo, body: bytes) -> GenerateAnswer:
    try:
        return decode_body(body, GenerateAnswer)
    except BadRequestError as error:
        raise EngineLostError(
            f"engine {engine.engine_id} at {engine.api_url} answered nonsense: {error}"
        ) from error


def _event(engine: EngineInfo, answer: GenerateAnswer) -> TokenEvent:
    if answer.error is not None:
        raise _refusal(engine, answer.error)
    choice = answer.choices[0]
    return TokenEvent(
        token_ids=tuple(choice.token_ids or ()),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def _refusal(engine: EngineInfo, error: WireError) -> BadRequestError | EngineLostError:
    if error.code in _CLIENT_FAULTS:
        return BadRequestError(error.message)
    return EngineLostError(
        f"engine {engine.engine_id} at {engine.api_url} answered {error.code}: {error.message}"
    )
