"""An OpenTelemetry collector for tests: takes traces over HTTP and decodes them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Spans in the order they came, and the service names they came with."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.url = ""

    def named(self, name: str) -> Span:
        """Return the only span of that name."""
        (span,) = (span for span in self.spans if span.name == name)
        return span

    async def _receive(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response()


def attributes(span: Span) -> dict[str, str | int | float]:
    """Return a span's attributes."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """Listen in the block."""
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made._receive)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        made.url = f"http://127.0.0.1:{port}/v1/traces"
        yield made
    finally:
        await asyncio.shield(runner.cleanup())
