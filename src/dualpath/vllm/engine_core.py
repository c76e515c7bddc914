"""An engine core client for vLLM's ``AsyncLLM`` that sends requests to the router's PEs and DEs.

``AsyncLLM`` adds tokenised requests and pulls engine outputs.  ``RoutedEngineCore`` implements the
part of vLLM's ``EngineCoreClient`` interface that serves requests.  Operations on one engine
(sleep, weights, profiling) are refused, because there are many engines behind it, each with its own
API.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import NoReturn, Protocol

from vllm.config.kv_events import KVEventsConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.core.key_memory import KeyCache
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.vllm.prompt_images import ImageInput, check_encoder_cache, image_inputs
from dualpath.vllm.request_job import NO_ADAPTERS, ClientRequest, make_job

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
        """Return the count of running requests, None if it has not changed.

        vLLM updates a dozen gauges from it, and outputs come with every token.
        """
        running = len(self._tasks)
        if running == self._reported_running:
            return None
        self._reported_running = running
        return SchedulerStats(num_running_reqs=running)

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
        stats.set(job.prompt_tokens, 0, min(event.cached_tokens or 0, job.prompt_tokens))
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


def _output(request_id: str, event: TokenEvent) -> EngineCoreOutput:
    reason = event.finish_reason
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=list(event.token_ids),
        new_logprobs=event.payload if isinstance(event.payload, LogprobsLists) else None,
        finish_reason=_FINISH_REASONS[reason] if reason is not None else None,
        stop_reason=event.stop_reason,
    )
