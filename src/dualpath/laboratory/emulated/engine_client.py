"""The emulated router's calls to engines, for jobs of token ids without sampling parameters."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.laboratory.emulated.requests import Sampling
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.token_api.client import TokenApi, token_event
from dualpath.router.token_api.wire import GenerateRequest


class EngineClient:
    """See ``router.engine_calls.EngineCalls``; call ``aclose`` at the end.

    A job's payload is its cache salt.  Raises what ``TokenApiClient`` raises.
    """

    def __init__(self, api: TokenApi) -> None:
        self._api = api

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: PrefillTransfer
    ) -> TokenEvent:
        """Run the prompt on a PE; return the first token."""
        request = _request(job, prefill_transfer, job.prompt_token_ids, 1)
        answer = await self._api.generate(engine, job, request)
        if not job.first_token_from_pe:
            return TokenEvent(token_ids=(), finish_reason="length")
        return token_event(answer.choices[0])

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        """Continue after ``prior_tokens`` on a DE."""
        tokens = (*job.prompt_token_ids, *prior_tokens)
        request = _request(job, decode_transfer, tokens, job.max_new_tokens - len(prior_tokens))
        async with aclosing(self._api.stream(engine, job, request)) as choices:
            async for choice in choices:
                yield token_event(choice)

    async def answers(self, engine: EngineInfo) -> None:
        """Return if the engine's server answers that it is healthy."""
        await self._api.answers(engine)

    async def aclose(self) -> None:
        """Close all connections; engines abort the requests that still run on them."""
        await self._api.aclose()


def _request(
    job: Job, transfer: PrefillTransfer | DecodeTransfer, tokens: Sequence[int], max_tokens: int
) -> GenerateRequest[Sampling]:
    assert job.payload is None or isinstance(job.payload, str)
    return GenerateRequest(
        request_id=transfer.request_id,
        token_ids=tokens,
        sampling_params=Sampling(max_tokens=max_tokens),
        cache_salt=job.payload,
        kv_transfer_params=to_transfer_params(transfer),
    )
