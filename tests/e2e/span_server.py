"""An OpenTelemetry collector over gRPC, as on the page on monitoring."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class SpanServer(trace_service_pb2_grpc.TraceServiceServicer):
    """Names of the received spans, in order."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._lock = threading.Lock()

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """Receive spans of a router."""
        scopes = (scope for resource in request.resource_spans for scope in resource.scope_spans)
        with self._lock:
            self._names += [span.name for scope in scopes for span in scope.spans]
        return ExportTraceServiceResponse()

    @property
    def names(self) -> list[str]:
        """The spans received so far."""
        with self._lock:
            return [*self._names]


@contextlib.contextmanager
def span_server(port: str) -> Iterator[SpanServer]:
    """Listen in the block."""
    spans = SpanServer()
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(spans, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield spans
        finally:
            server.stop(None).wait()
