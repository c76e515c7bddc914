"""OpenTelemetry traces of requests: the router's span and, below it, those of its stages.

Nothing is traced unless an endpoint is set.  Spans follow from the stages that a request's record
has anyway, and are made when the request ends; only the calls to engines get theirs beforehand,
since their ids travel there as W3C ``traceparent``: what an engine traces of its own (vLLM with
``--otlp-traces-endpoint``) is below them, the client's spans above them.

Endpoint and protocol are chosen as in vLLM: gRPC, or with the environment variable
``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` set to ``http/protobuf`` a whole URL.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.router.engine_calls import Job
from dualpath.router.stages import RequestRecord, Stage, StageTime

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
NAME_VARIABLE = "OTEL_SERVICE_NAME"
SERVICE_NAME = "dualpath-router"

_NS_PER_S = 1_000_000_000
#: Longest a stopping router waits for spans to reach the collector.
FLUSH_S = 2.0

#: Stages that are part of another one.
_WITHIN = {
    Stage.READ_QUEUE: Stage.READ,
    Stage.STORAGE_READ: Stage.READ,
    Stage.FORWARD: Stage.PREFILL,
    Stage.TRANSFER: Stage.FORWARD,
    Stage.HANDOVER: Stage.DECODE,
    Stage.H2D: Stage.HANDOVER,
}
_SPAN_NAMES = {Stage.QUEUE: "schedule"}

_Key = tuple[Stage, int, str]


def open_tracing(endpoint: str, clock: Callable[[], float]) -> "Tracing":
    """Return tracing to an OTLP collector; ``clock`` is that of the records, in seconds.

    Raises ``ConfigError`` if OpenTelemetry is not installed or the protocol unknown.
    """
    protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
    try:
        exporter = _exporter(endpoint, protocol)
    except ImportError as error:
        raise ConfigError(
            f"traces to {endpoint} need OpenTelemetry, which is not installed ({error}); "
            f"{extra('otel').remedy}, or leave --otlp-traces-endpoint out"
        ) from error
    return Tracing(exporter, clock)


def _exporter(endpoint: str, protocol: str) -> "SpanExporter":
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter(endpoint=endpoint)
    raise ConfigError(
        f"{PROTOCOL_VARIABLE}={protocol!r}; known are 'grpc' (the default) and 'http/protobuf'"
    )


class Tracing:
    """Makes the traces of one router; spans leave in the background, ``close`` at the end."""

    def __init__(self, exporter: "SpanExporter", clock: Callable[[], float]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get(NAME_VARIABLE, SERVICE_NAME)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._exporter = exporter
        self._tracer = self._provider.get_tracer("dualpath.router")
        self._clock = clock

    def begin(self, job: Job, record: RequestRecord) -> "RequestTrace":
        """Start the trace of a request, below the client's span if there is one."""
        since_epoch_ns = time.time_ns() - int(self._clock() * _NS_PER_S)
        return RequestTrace(self._tracer, job, record, since_epoch_ns)

    def close(self) -> None:
        """Export what is left and stop; blocks, but not much longer than ``FLUSH_S``."""
        # A collector that is gone is tried again and again; only its exporter's end ends that.
        last_export = threading.Thread(target=self._provider.shutdown, daemon=True)
        last_export.start()
        last_export.join(FLUSH_S)
        if last_export.is_alive():
            self._exporter.shutdown()


class RequestTrace:
    """Spans of one request; ``end`` when its record is complete."""

    def __init__(
        self, tracer: "Tracer", job: Job, record: RequestRecord, since_epoch_ns: int
    ) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._record = record
        self._since_epoch_ns = since_epoch_ns
        self._propagator = TraceContextTextMapPropagator()
        self._calls: dict[_Key, Span] = {}
        self._root = tracer.start_span(
            "request",
            context=self._propagator.extract(job.trace_headers or {}),
            kind=SpanKind.SERVER,
            start_time=self._ns(record.start_s),
        )

    def call(self, stage: Stage, where: str) -> Mapping[str, str]:
        """Begin the span of a call to engine ``where``; return the headers it takes along."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._tracer.start_span(
            stage.value, context=set_span_in_context(self._root), kind=SpanKind.CLIENT
        )
        self._calls[stage, self._record.attempts, where] = span
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context=set_span_in_context(span))
        return headers

    def end(self) -> None:
        """Make the spans of all stages, and end the request's own."""
        from opentelemetry.trace import Status, StatusCode

        record = self._record
        spans: dict[_Key, Span] = {}
        for stage in sorted(record.stages, key=lambda stage: _depth(stage.stage)):
            key = (stage.stage, stage.attempt, stage.where)
            spans[key] = self._span(stage, spans)
            spans[key].end(self._ns(stage.end_s))
        for span in self._calls.values():  # begun, but its stage never ended
            span.end()
        self._root.set_attributes(_attributes(record))
        for failure in record.failures:
            self._root.add_event("attempt failed", {"reason": failure})
        if record.outcome != "finished":
            self._root.set_status(Status(StatusCode.ERROR, record.outcome))
        self._root.end(None if record.end_s is None else self._ns(record.end_s))

    def _span(self, stage: StageTime, spans: Mapping[_Key, "Span"]) -> "Span":
        from opentelemetry.trace import set_span_in_context

        span = self._calls.pop((stage.stage, stage.attempt, stage.where), None)
        if span is None:
            within = _WITHIN.get(stage.stage)
            above = spans.get((within, stage.attempt, stage.where)) if within else None
            span = self._tracer.start_span(
                _SPAN_NAMES.get(stage.stage, stage.stage.value),
                context=set_span_in_context(above or self._root),
                start_time=self._ns(stage.start_s),
            )
        span.set_attribute("dualpath.attempt", stage.attempt)
        if stage.where:
            span.set_attribute("dualpath.engine", stage.where)
        return span

    def _ns(self, clock_s: float) -> int:
        return self._since_epoch_ns + int(clock_s * _NS_PER_S)


def _depth(stage: Stage) -> int:
    return 0 if stage not in _WITHIN else 1 + _depth(_WITHIN[stage])


def _attributes(record: RequestRecord) -> dict[str, str | int | float]:
    """Name what OpenTelemetry and vLLM have names for as they do, the rest as ``dualpath.…``."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.generated_tokens,
        "dualpath.hit_tokens": record.hit_tokens,
        "dualpath.attempts": record.attempts,
        "dualpath.outcome": record.outcome or "",
    }
    if record.ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = record.ttft_s
    if record.latency_s is not None:
        attributes["gen_ai.latency.e2e"] = record.latency_s
    return attributes
