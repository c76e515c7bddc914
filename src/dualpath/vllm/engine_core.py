"""An engine core client for vLLM's ``AsyncLLM`` that sends requests to the router's PEs and DEs.

``AsyncLLM`` adds tokenised requests and pulls engine outputs.  ``RoutedEngineCore`` implements the
part of vLLM's ``EngineCoreClient`` interface that serves requests.  Operations on one engine
(sleep, weights, profiling) are refused, because there are many engines behind it, each with its own
API.
"""

import asyncio
import base64
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np
from vllm.config.kv_events import KVEventsConfig
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dualpath.core.blocks import KeyExtras, PromptItem, tenant_tag
from dualpath.core.errors import BadRequestError, DualPathError, EngineLostError
from dualpath.core.key_cache import Adapter, KeyCache
from dualpath.core.kv_hints import kv_request_hints
from dualpath.core.session_hints import HINT_ARGUMENTS, session_hints
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.hit_account import HitPlace
from dualpath.router.requests.request import check_salt
from dualpath.router.served_adapters import ServedAdapters

# ----------------------------------------------------------------------------------- prompt images
# The images of a request: their names in block keys, and their data for the engines.
#
# The front end has converted an image to the input values of the model's vision encoder.  The
# SHA-256 of these values names the image in block keys and in the engines' encoder caches: equal
# names mean equal input, independent of the client's name for it and of the front end's
# configuration.  Both engines receive the values.  A prefill engine encodes the images of blocks
# that it does not hit; a decode engine encodes images only if it has to recompute a prompt.

IMAGE = "image"


class ImageInput(msgspec.Struct, frozen=True):
    """An image as sent to engines: ``name``, ``data`` (base64), and its ``item`` in block keys."""

    name: str
    data: str
    item: PromptItem


def image_inputs(features: Sequence[MultiModalFeatureSpec] | None) -> tuple[ImageInput, ...]:
    """Return a request's images, in the order of their tokens.

    Raises ``BadRequestError`` for parts of other kinds, and for images with other tokens between
    their own.
    """
    return tuple(_sent(feature) for feature in features or ())


def _sent(feature: MultiModalFeatureSpec) -> ImageInput:
    place = feature.mm_position
    if feature.modality != IMAGE or feature.data is None:
        raise BadRequestError(
            f"a part of kind {feature.modality!r} is not supported, only text and images are; "
            "leave it out"
        )
    if place.get_num_embeds() != place.length:
        raise BadRequestError(
            "this model puts other tokens between those of an image, which cannot be sent to "
            "engines; send text"
        )
    data = encode_mm_kwargs_item(feature.data)
    name = hashlib.sha256(base64.b64decode(data)).hexdigest()
    # vLLM prefixes the name of an image with the adapter of the vision encoder, if there is one.
    prefix = feature.identifier.removesuffix(feature.mm_hash or "")
    if prefix == feature.identifier:
        prefix = ""
    return ImageInput(name, data, PromptItem(f"{prefix}{name}", place.offset, place.length))


def check_encoder_cache(
    images: Sequence[ImageInput], block_tokens: int, encoder_tokens: int
) -> None:
    """Raise ``BadRequestError`` for images that exceed a prefill engine's encoder cache.

    A prefill engine computes whole blocks and needs all images of a block in the cache at once.
    """
    in_block: dict[int, int] = {}
    for image in images:
        for block in image.item.blocks(block_tokens):
            in_block[block] = in_block.get(block, 0) + image.item.tokens
    if (most := max(in_block.values(), default=0)) > encoder_tokens:
        raise BadRequestError(
            f"one block of {block_tokens} tokens needs images of {most} tokens, but the engines' "
            f"encoder cache holds {encoder_tokens}; send smaller images or more text between "
            "them, or raise --max-num-batched-tokens"
        )


def features_on_wire(images: Sequence[ImageInput]) -> dict[str, Any] | None:
    """Return the ``features`` of a request to an engine, None without images."""
    if not images:
        return None
    places = [{"offset": i.item.first_token, "length": i.item.tokens} for i in images]
    return {
        "mm_hashes": {IMAGE: [image.name for image in images]},
        "mm_placeholders": {IMAGE: places},
        "kwargs_data": {IMAGE: [image.data for image in images]},
    }


# ------------------------------------------------------------------------------------- request job
# Converts vLLM's requests to the router's ``Job`` and refuses unsupported ones.
#
# The prefill engine samples the first token unless sampling depends on state that exists on one
# engine only: a grammar, a seeded generator, counts of generated tokens.  In that case the decode
# engine samples the first token too, at the cost of recomputing one prompt token.

#: Entries of ``extra_args`` that are not sent to engines: those reserved for the connectors, which
#: a client must not set, and those for the router.
TRANSFER_ARGUMENTS = frozenset({"kv_transfer_params", "ec_transfer_params"})
ROUTER_ARGUMENTS = TRANSFER_ARGUMENTS | HINT_ARGUMENTS

NO_ADAPTERS = ServedAdapters({})


class ClientRequest:
    """The payload of a ``Job``: vLLM's request, and its prompt logprobs if requested.

    ``prompt_logprobs`` are set by the prefill call (again after a retry) and read once, when the
    first token is sent to the client.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        adapter: Adapter | None = None,
        images: tuple[ImageInput, ...] = (),
    ) -> None:
        self.request = request
        self.adapter = adapter
        self.images = images
        self.prompt_logprobs: LogprobsTensors | None = None

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters as vLLM's front end resolved them."""
        params = self.request.sampling_params
        assert params is not None
        return params

    @property
    def engine_salt(self) -> str | None:
        """The salt for the engines' block hashes, which includes an adapter's digest."""
        salt = self.request.cache_salt
        return self.adapter.salt(salt) if self.adapter else salt

    def extras(self) -> KeyExtras:
        """Return what this request's block keys depend on besides tokens."""
        salt = self.request.cache_salt
        items = tuple(image.item for image in self.images)
        if self.adapter:
            return self.adapter.extras(salt, items)
        return KeyExtras(cache_salt=salt, items=items)


def make_job(
    request: EngineCoreRequest,
    memory: KeyCache,
    stateful_sampling: bool,
    adapters: ServedAdapters = NO_ADAPTERS,
    images: tuple[ImageInput, ...] = (),
) -> Job:
    """Return the router's job for ``request``; ``memory`` caches block keys of earlier prompts.

    ``stateful_sampling``: the engines run custom logits processors, which may depend on generated
    tokens.  ``images`` are the request's ``image_inputs``.  Raises ``BadRequestError`` for
    unsupported requests, and ``DualPathError`` for an adapter that no engine has registered yet.
    """
    _refuse_unsupported(request)
    params = request.sampling_params
    prompt = request.prompt_token_ids
    assert params is not None
    assert prompt is not None
    assert params.max_tokens is not None
    check_salt(request.cache_salt)
    lora = request.lora_request
    adapter = adapters.adapter(lora.lora_name, lora.lora_path) if lora else None
    client = ClientRequest(request, adapter, images)
    extras = client.extras()

    keys = tuple(memory.keys(prompt, extras))

    def keys_for(token_ids: Sequence[int]) -> Sequence[bytes]:
        return memory.continued(keys, token_ids, extras)

    return Job(
        request_id=request.request_id,
        prompt_token_ids=tuple(prompt),
        max_new_tokens=params.max_tokens,
        keys=keys,
        keys_for=keys_for,
        cacheable=params.prompt_logprobs is None,
        first_token_from_pe=not stateful_sampling and is_stateless(params),
        payload=client,
        trace_headers=request.trace_headers,
        tenant=tenant_tag(request.cache_salt),
        hints=session_hints(params.extra_args or {}, request.session_id),
        priority=request.priority,
        kv_hints=kv_request_hints(
            (params.extra_args or {}).get("kv_transfer_params"), request.kv_hints
        ),
    )


def is_stateless(params: SamplingParams) -> bool:
    """Whether the choice of a token depends only on the tokens before it.

    ``min_tokens`` is state only for the first token: see ``can_continue``.
    """
    return params.min_tokens == 0 and can_continue(params)


def can_continue(params: SamplingParams) -> bool:
    """Whether another engine can continue after generated tokens as if they were prompt tokens.

    False if sampling has state that generated tokens in a prompt do not restore: the position in a
    grammar, a seeded generator, counts of tokens.
    """
    custom_arguments = set(params.extra_args or {}) - ROUTER_ARGUMENTS
    return not (
        params.structured_outputs is not None
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.seed is not None
        or params.bad_words
        or params.thinking_token_budget is not None
        or params.repetition_detection is not None
        or params.trace_decode_token_ids
        or custom_arguments
    )


def _refuse_unsupported(request: EngineCoreRequest) -> None:
    params = request.sampling_params
    if params is None:
        raise BadRequestError("pooling requests are not supported; use an engine's own server")
    options = {
        "prompt embeddings": request.prompt_embeds is not None,
        "streaming inputs": request.resumable,
        "prompt_logprob_token_ids": isinstance(params.prompt_logprob_token_ids, np.ndarray | list),
    }
    refused = [name for name, present in options.items() if present]
    if refused:
        raise BadRequestError(
            f"{' and '.join(refused)}: not supported with separate prefill and decode engines; "
            "send token or text prompts without these options"
        )
    try:
        msgspec.json.encode(params)  # as it is sent to engines
    except UnicodeEncodeError:
        raise BadRequestError(
            "a text among the sampling parameters has a lone surrogate, half of a character, which "
            "UTF-8 cannot express; remove it"
        ) from None


logger = logging.getLogger(__name__)

_FINISH_REASONS = {str(reason): reason for reason in FinishReason}


class TokenSource(Protocol):
    """The part of the router's service that runs requests."""

    def submit(self, job: Job) -> AsyncGenerator[TokenEvent, None]:
        """Run ``job``; closing the iterator aborts it."""
        ...


class EngineResources:
    """The state from which ``AsyncLLM`` reads whether its engine has ended."""

    def __init__(self) -> None:
        self.engine_dead = False


class _Failure:
    def __init__(self, request_id: str, error: Exception) -> None:
        self.request_id = request_id
        self.error = error


class _Ended:
    """A request ended without a last output; only the count of running requests has changed."""


class RoutedEngineCore:
    """Runs each request as a task on the router's service and queues its outputs.

    ``encoder_tokens`` is the size of an engine's encoder cache in tokens of images.

    ``on_failure(request_id, error)`` is called, in order with the outputs, for a request that
    ends without a finish reason.  All methods belong to one event loop, except that ``shutdown``
    may be called from another thread.
    """

    def __init__(
        self,
        service: TokenSource,
        block_tokens: int,
        stateful_sampling: bool,
        on_failure: Callable[[str, Exception], None],
        adapters: ServedAdapters = NO_ADAPTERS,
        encoder_tokens: int = 0,
    ) -> None:
        self.resources = EngineResources()
        self.engine_ranks_managed = [0]
        self._service = service
        self._block_tokens = block_tokens
        self._memory = KeyCache(block_tokens)
        self._stateful_sampling = stateful_sampling
        self._adapters = adapters
        self._encoder_tokens = encoder_tokens
        #: One thread, because vLLM's image encoder is not thread-safe.
        self._encoding = ThreadPoolExecutor(1, "images")
        self._on_failure = on_failure
        self._outputs: deque[EngineCoreOutput | _Failure | _Ended] = deque()
        self._arrived = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reported_running = -1
        #: Hits of requests since the last report.
        self._hits = PrefixCacheStats()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return text generation, the only task of PEs and DEs."""
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start a request; its failure is reported in order with its outputs."""
        self._loop = asyncio.get_running_loop()
        self._tasks[request.request_id] = asyncio.create_task(
            self._serve(request), name=f"request {request.request_id}"
        )

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Abort requests; unknown ids are those of requests that have ended."""
        self.cancel(request_ids)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Abort requests without waiting for their end."""
        for request_id in request_ids:
            if task := self._tasks.get(request_id):
                task.cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for an item; return the outputs up to the next failure or end, if any."""
        while not self._outputs:
            self._arrived.clear()
            await self._arrived.wait()
        outputs: list[EngineCoreOutput] = []
        while self._outputs and isinstance(item := self._outputs[0], EngineCoreOutput):
            outputs.append(item)
            self._outputs.popleft()
        # A failure is reported only after all outputs before it have been processed.
        if not outputs and isinstance(item := self._outputs.popleft(), _Failure):
            self._on_failure(item.request_id, item.error)
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=self._changed_stats())

    def _changed_stats(self) -> SchedulerStats | None:
        """Return the count of running requests and new hits, None if neither has changed.

        vLLM updates a dozen gauges from it, and outputs come with every token.
        """
        running = len(self._tasks)
        if running == self._reported_running and not self._hits.requests:
            return None
        self._reported_running = running
        hits, self._hits = self._hits, PrefixCacheStats()
        return SchedulerStats(num_running_reqs=running, connector_prefix_cache_stats=hits)

    def _queue(self, item: EngineCoreOutput | _Failure | _Ended) -> None:
        self._outputs.append(item)
        self._arrived.set()

    async def _serve(self, request: EngineCoreRequest) -> None:
        queued_at = time.monotonic()
        try:
            images = await self._images(request)
            job = make_job(request, self._memory, self._stateful_sampling, self._adapters, images)
            first, finished = True, False
            async with aclosing(self._service.submit(job)) as events:
                async for event in events:
                    output = _output(request.request_id, event)
                    if first:
                        self._complete_first(output, job, event, queued_at)
                        first = False
                    finished = event.finish_reason is not None
                    if finished:
                        self._tasks.pop(request.request_id, None)
                    self._queue(output)
            if not finished:
                raise EngineLostError(
                    f"request {request.request_id} ended without a finish reason; send it again"
                )
        except Exception as error:
            if not isinstance(error, DualPathError):
                logger.exception("request %s failed", request.request_id)
            self._queue(_Failure(request.request_id, error))
        finally:
            if self._tasks.pop(request.request_id, None) is not None:
                self._queue(_Ended())

    async def _images(self, request: EngineCoreRequest) -> tuple[ImageInput, ...]:
        """Hash and encode the request's images (megabytes) outside the event loop's thread."""
        if not request.mm_features:
            return ()
        images = await asyncio.get_running_loop().run_in_executor(
            self._encoding, image_inputs, request.mm_features
        )
        check_encoder_cache(images, self._block_tokens, self._encoder_tokens)
        return images

    def _complete_first(
        self, output: EngineCoreOutput, job: Job, event: TokenEvent, queued_at: float
    ) -> None:
        """Add what vLLM expects once per request: prefill statistics and prompt logprobs."""
        stats = PrefillStats()
        cached_tokens = min(event.cached_tokens or 0, job.prompt_tokens)
        stats.set(job.prompt_tokens, 0, cached_tokens)
        sources = _by_vllm_source(event.cached_by_source or {}, cached_tokens)
        self._hits.record(job.prompt_tokens, cached_tokens, False, sources)
        if job.cacheable:
            stats.finalize(len(job.keys) * self._block_tokens)
        output.prefill_stats = stats
        output.events = [
            EngineCoreEvent(kind, queued_at)
            for kind in (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)
        ]
        assert isinstance(job.payload, ClientRequest)
        output.new_prompt_logprobs_tensors = job.payload.prompt_logprobs

    def shutdown(self, timeout: float | None = None) -> None:
        """End all requests with an error; thread-safe, idempotent, returns at once."""
        self.resources.engine_dead = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_all)

    def _stop_all(self) -> None:
        for request_id, task in list(self._tasks.items()):
            task.cancel()
            self._on_failure(
                request_id, EngineLostError("the router is shutting down; send the request again")
            )

    async def aclose(self) -> None:
        """Abort all requests and wait until the service has released them."""
        self._stop_all()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._encoding.shutdown(wait=False)

    def dp_engines_running(self) -> bool:
        """Whether any request is running."""
        return bool(self._tasks)

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        """Return none: engines publish their own KV events."""
        return {}

    async def reset_mm_cache_async(self) -> None:
        """Do nothing: the router caches no images."""

    async def reset_encoder_cache_async(self) -> None:
        """Do nothing: images are encoded by the engines, each with its own cache."""

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Accept an adapter of the router's list; only engines that loaded it may join."""
        self._adapters.check_served(lora_request.lora_name, lora_request.lora_path)
        return True

    async def is_sleeping_async(self) -> bool:
        """Return False: the router has no sleep mode."""
        return False

    async def is_scheduler_paused_async(self) -> bool:
        """Return False: the router's scheduler cannot be paused."""
        return False

    def __getattr__(self, name: str) -> Callable[..., Awaitable[NoReturn]]:
        """Refuse operations on a single engine; other attributes do not exist."""
        if not name.endswith("_async"):
            raise AttributeError(name)

        async def refuse(*_arguments: object, **_options: object) -> NoReturn:
            raise NotImplementedError(
                f"{name.removesuffix('_async')} applies to one engine, but this is the router of "
                "many; call it at the engine's own server (see /dualpath/v1/status)"
            )

        return refuse


_VLLM_SOURCES = {
    HitPlace.PE_DRAM: CacheHitSource.HOST,
    HitPlace.DE_DRAM: CacheHitSource.HOST,
    HitPlace.PE_STORAGE: CacheHitSource.DISK,
    HitPlace.DE_STORAGE: CacheHitSource.DISK,
}


def _by_vllm_source(
    sources: Mapping[HitPlace, int], cached_tokens: int
) -> dict[CacheHitSource, int]:
    """Return ``cached_tokens`` by vLLM's names of sources, unspecified where none is known."""
    found: dict[CacheHitSource, int] = {}
    for source, tokens in sources.items():
        name = _VLLM_SOURCES[source]
        found[name] = found.get(name, 0) + tokens
    if sum(found.values()) != cached_tokens:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: cached_tokens} if cached_tokens else {}
    return found


def _output(request_id: str, event: TokenEvent) -> EngineCoreOutput:
    reason = event.finish_reason
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=list(event.token_ids),
        new_logprobs=event.payload if isinstance(event.payload, LogprobsLists) else None,
        finish_reason=_FINISH_REASONS[reason] if reason is not None else None,
        stop_reason=event.stop_reason,
    )
