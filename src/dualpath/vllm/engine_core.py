"""What vLLM's ``AsyncLLM`` takes for its engine: the router, which owns PEs and DEs.

``AsyncLLM`` hands over tokenised requests and pulls engine outputs, and does not care where they
were made.  ``RoutedEngineCore`` is that half of vLLM's ``EngineCoreClient`` interface which serves
requests; operations on an engine's inside (sleep, weights, profiling) are refused, since
there are many engines behind it, each with an API of its own.
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
from dualpath.core.key_memory import KeyMemory
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.vllm.prompt_images import SentImage, check_fit, sent_images
from dualpath.vllm.request_job import NO_ADAPTERS, ClientRequest, make_job

logger = logging.getLogger(__name__)

_FINISH_REASONS = {str(reason): reason for reason in FinishReason}


class TokenSource(Protocol):
    """The part of the router's service that runs requests."""

    def submit(self, job: Job) -> AsyncGenerator[TokenEvent, None]:
        """Run ``job``; closing the iterator aborts it."""
        ...


class EngineResources:
    """The state ``AsyncLLM`` looks at to learn that its engine has ended."""

    def __init__(self) -> None:
        self.engine_dead = False


class _Failure:
    def __init__(self, request_id: str, error: Exception) -> None:
        self.request_id = request_id
        self.error = error


class _Ended:
    """A request ended without a last output; only the count of requests is news."""


class RoutedEngineCore:
    """Runs each request as a task on the router's service and queues its outputs.

    ``encoder_tokens`` are those of images that an engine holds at a time.

    ``on_failure(request_id, error)`` is called, in order with the outputs, for a request that
    ends without a finish reason.  Belongs to one event loop; only ``shutdown`` may be called from
    another thread.
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
        self._memory = KeyMemory(block_tokens)
        self._stateful_sampling = stateful_sampling
        self._adapters = adapters
        self._encoder_tokens = encoder_tokens
        #: vLLM has one encoder of images, which is one thread's.
        self._encoding = ThreadPoolExecutor(1, "images")
        self._on_failure = on_failure
        self._news: deque[EngineCoreOutput | _Failure | _Ended] = deque()
        self._arrived = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reported_running = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Text generation is what PEs and DEs are for."""
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start a request; what goes wrong with it comes out with its outputs."""
        self._loop = asyncio.get_running_loop()
        self._tasks[request.request_id] = asyncio.create_task(
            self._serve(request), name=f"request {request.request_id}"
        )

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Stop requests; unknown ones have ended already."""
        self.cancel(request_ids)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Stop requests without waiting for their end."""
        for request_id in request_ids:
            if task := self._tasks.get(request_id):
                task.cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for news; return the outputs up to the next failure or end, if any."""
        while not self._news:
            self._arrived.clear()
            await self._arrived.wait()
        outputs: list[EngineCoreOutput] = []
        while self._news and isinstance(item := self._news[0], EngineCoreOutput):
            outputs.append(item)
            self._news.popleft()
        # A failure is reported only when everything before it has been processed.
        if not outputs and isinstance(item := self._news.popleft(), _Failure):
            self._on_failure(item.request_id, item.error)
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=self._load_news())

    def _load_news(self) -> SchedulerStats | None:
        """Return the count of requests if it has changed.

        vLLM sets a dozen gauges by it, and there is news for every token.
        """
        running = len(self._tasks)
        if running == self._reported_running:
            return None
        self._reported_running = running
        return SchedulerStats(num_running_reqs=running)

    def _queue(self, item: EngineCoreOutput | _Failure | _Ended) -> None:
        self._news.append(item)
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

    async def _images(self, request: EngineCoreRequest) -> tuple[SentImage, ...]:
        """Name and encode the request's images, megabytes of them, beside the event loop."""
        if not request.mm_features:
            return ()
        images = await asyncio.get_running_loop().run_in_executor(
            self._encoding, sent_images, request.mm_features
        )
        check_fit(images, self._block_tokens, self._encoder_tokens)
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
        """Stop all requests and wait until the service has let go of them."""
        self._stop_all()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._encoding.shutdown(wait=False)

    def dp_engines_running(self) -> bool:
        """Whether any request is under way."""
        return bool(self._tasks)

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        """The engines publish their own events."""
        return {}

    async def reset_mm_cache_async(self) -> None:
        """Nothing to reset: the router keeps no images."""

    async def reset_encoder_cache_async(self) -> None:
        """Nothing to reset: the engines encode, each with a cache of its own."""

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Accept an adapter of the router's own list: engines have loaded it, or may not join."""
        self._adapters.check_served(lora_request.lora_name, lora_request.lora_path)
        return True

    async def is_sleeping_async(self) -> bool:
        """The router never sleeps."""
        return False

    async def is_scheduler_paused_async(self) -> bool:
        """The router cannot be paused."""
        return False

    def __getattr__(self, name: str) -> Callable[..., Awaitable[NoReturn]]:
        """Refuse operations on an engine's inside; anything else does not exist."""
        if not name.endswith("_async"):
            raise AttributeError(name)

        async def refuse(*_arguments: object, **_options: object) -> NoReturn:
            raise NotImplementedError(
                f"{name.removesuffix('_async')} concerns one engine, and this is the router of "
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
