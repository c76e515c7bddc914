"""vLLM's ``AsyncLLM`` with the router in the place of its engine core.

Rendering, tokenising, chat templates, several samples per prompt, stop strings, logprobs, tool
calls, reasoning, streaming and usage are vLLM's own code.  Only the construction and the reporting
of failed requests differ; ``tests/unit/test_frontend_vllm_interface.py`` pins the internals of vLLM
that are used.
"""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Protocol

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.renderers import renderer_from_config
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

from dualpath.core.errors import DualPathError, PromptTooLongError
from dualpath.router.engines import KnownEngines, missing_engines
from dualpath.router.refusals import PROMPT_PARAMETER
from dualpath.router.requests.limits import LimitedService
from dualpath.router.requests.session_calls import HintedService
from dualpath.router.served_adapters import ServedAdapters
from dualpath.router.token_api.statuses import BAD_REQUEST, status_of
from dualpath.vllm.engine_core import RoutedEngineCore, TokenSource


class ServedRegistry(KnownEngines, Protocol):
    """The engines, and the adapters that they serve."""

    @property
    def adapters(self) -> ServedAdapters:
        """The adapters that clients may request."""
        ...


class ClientFrontEnd(TokenSource, LimitedService, HintedService, Protocol):
    """The front end that the HTTP application uses; its scheduler is here or behind a link."""

    @property
    def registry(self) -> ServedRegistry:
        """The registered engines."""
        ...

    def unready(self) -> str | None:
        """Return why requests cannot be served at present, None if they can."""
        ...

    async def drain(self, clients_gone: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wait for running requests to end, up to a time limit; see ``FrontEnd.drain``."""
        ...

    def status(self) -> object:
        """Return a JSON-encodable description of engines, queues and decisions."""
        ...

    async def scrape(self) -> bytes:
        """Return the router's metrics in the Prometheus text format."""
        ...


class DualPathLLM(AsyncLLM):
    """``AsyncLLM`` with a ``RoutedEngineCore`` as ``engine_core``; starts no process.

    Create it on the event loop that uses it; ``aclose`` ends it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        service: ClientFrontEnd,
        *,
        block_tokens: int,
        log_stats: bool = True,
        log_requests: bool = False,
    ) -> None:
        """Build renderer, input and output processor as ``AsyncLLM`` does, without its engine."""
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        self.log_requests = log_requests
        self.log_stats = log_stats
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.admission_stats = None
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer,
            log_stats=log_stats,
            stream_interval=vllm_config.scheduler_config.stream_interval,
        )
        self._registry = service.registry
        self.engine_core = RoutedEngineCore(
            service,
            block_tokens,
            stateful_sampling=bool(self.model_config.logits_processors),
            on_failure=self._fail,
            adapters=service.registry.adapters,
            encoder_tokens=self.input_processor.mm_encoder_cache_size,
        )
        self.logger_manager = _prometheus_only(vllm_config) if log_stats else None
        self.profiler = None
        self.output_handler = None
        self._profile_lock = asyncio.Lock()
        self._profile_session_guard_enabled = False
        self._run_output_handler()

    async def check_health(self) -> None:
        """Raise ``EngineDeadError`` while engines are missing, so that no request can be served."""
        if (reason := missing_engines(self._registry)) is not None:
            raise EngineDeadError(reason)
        await super().check_health()

    async def aclose(self) -> None:
        """Abort all requests, then shut down."""
        await self.engine_core.aclose()
        self.shutdown()

    def _fail(self, request_id: str, error: Exception) -> None:
        """Fail a request, and the other samples of the same client request, with an error."""
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return
        whole = state.parent_req.request_id if state.parent_req else request_id
        others = self.output_processor.abort_requests([whole], internal=True)
        self.engine_core.cancel(others)
        if state.queue is not None:
            state.queue.put(http_error(error))


def http_error(error: Exception) -> Exception:
    """Return the exception that vLLM's HTTP layer answers with ``status_of`` and the message."""
    if isinstance(error, PromptTooLongError):
        return VLLMValidationError(str(error), parameter=PROMPT_PARAMETER)
    status = status_of(error)
    if status == BAD_REQUEST:
        return VLLMValidationError(str(error))
    message = str(error) if isinstance(error, DualPathError) else "internal error of the router"
    return GracefulHTTPError(message, HTTPStatus(status))


def _prometheus_only(vllm_config: VllmConfig) -> StatLoggerManager:
    """Return vLLM's request metrics without its log line, which reports an engine's KV usage."""
    return StatLoggerManager(
        vllm_config=vllm_config,
        engine_idxs=[0],
        custom_stat_loggers=[PrometheusStatLogger],
        enable_default_loggers=False,
    )
