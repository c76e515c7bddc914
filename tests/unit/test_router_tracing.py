"""One request is one trace: from the client through the router to both engines."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests.emulated_cluster import cluster as emulated_cluster
from tests.guard import GUARD_S
from tests.unit.otlp_collector import Collector, attributes, collector
from tests.unit.router_cluster import cluster
from tests.unit.router_fakes import job

from dualpath.core.errors import ConfigError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.router.observe.tracing import PROTOCOL_VARIABLE, Tracing, open_tracing
from dualpath.router.settings import RouterSettings
from dualpath.router.stages import RequestRecord
from dualpath_lab.emulated.engine_server import EngineServer

PROMPT = list(range(1, 38))
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
PARENTS = {
    "admission": "request", "lookup": "request", "schedule": "request", "buffer_wait": "request",
    "read": "request", "read_queue": "read", "storage_read": "read",
    "prefill": "request", "forward": "prefill", "transfer": "forward",
    "decode": "request", "handover": "decode", "h2d": "handover",
}  # fmt: skip


class StuckExporter(SpanExporter):
    """Exports until it is shut down."""

    def __init__(self) -> None:
        self.given_up = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.given_up.wait(GUARD_S)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.given_up.set()


@pytest.fixture
def engine_headers(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What emulated engines get as ``traceparent``, the PE's call first."""
    got: list[str | None] = []
    generate = EngineServer._generate

    async def listening(server: EngineServer, request: web.Request) -> web.StreamResponse:
        got.append(request.headers.get("traceparent"))
        return await generate(server, request)

    monkeypatch.setattr(EngineServer, "_generate", listening)
    return got


async def ask_traced(directory: Path, traces: Collector, flags: str) -> None:
    """Ask a prompt, then the same again with a client's trace; only the second is traced."""
    settings = RouterSettings(mode=Mode.DUALPATH, otlp_traces_endpoint=traces.url, dram_tier=False)
    # Slow steps: what engines report on the way is there before the request is over.
    cluster = emulated_cluster(directory, Mode.DUALPATH, router=settings, speedup=0.02)
    async with cluster as made:
        headers = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-00"}
        made.http.headers.update(headers)
        await made.ask(PROMPT, 4)
        await made.stored()
        made.http.headers.update({"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-{flags}"})
        await made.ask(PROMPT, 4)


async def test_a_request_is_one_trace_from_client_to_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_headers: list[str | None]
) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    async with collector() as traces:
        await ask_traced(tmp_path, traces, flags="01")
    assert {span.trace_id.hex() for span in traces.spans} == {TRACE_ID}
    assert traces.services == {"dualpath-router"}
    root = traces.named("request")
    assert root.parent_span_id.hex() == CLIENT_SPAN
    assert {span.name for span in traces.spans} == {"request", *PARENTS}
    by_id = {span.span_id: span for span in traces.spans}
    for span in traces.spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span is not root:
            assert by_id[span.parent_span_id].name == PARENTS[span.name]
    calls = [traces.named("prefill"), traces.named("decode")]
    carried = [f"00-{TRACE_ID}-{span.span_id.hex()}-01" for span in calls]
    assert engine_headers[-2:] == carried


async def test_spans_have_engine_and_token_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    async with collector() as traces:
        await ask_traced(tmp_path, traces, flags="01")
    noted = attributes(traces.named("request"))
    assert noted["gen_ai.usage.prompt_tokens"] == len(PROMPT)
    assert noted["gen_ai.usage.completion_tokens"] == 4
    assert noted["dualpath.hit_tokens"] == 36
    assert noted["dualpath.outcome"] == "finished"
    latency_s, ttft_s = noted["gen_ai.latency.e2e"], noted["gen_ai.latency.time_to_first_token"]
    assert 0 < float(ttft_s) < float(latency_s)
    engines = {name: attributes(traces.named(name))["dualpath.engine"] for name in PARENTS
               if name in ("prefill", "forward", "decode", "h2d")}  # fmt: skip
    assert engines == {
        "prefill": "prefill-0", "forward": "prefill-0", "decode": "decode-0", "h2d": "decode-0",
    }  # fmt: skip


async def test_a_client_that_does_not_sample_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_headers: list[str | None]
) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    async with collector() as traces:
        await ask_traced(tmp_path, traces, flags="00")
    assert traces.spans == []
    assert all(str(header).startswith(f"00-{TRACE_ID}-") for header in engine_headers)
    assert all(str(header).endswith("-00") for header in engine_headers)


async def test_without_an_endpoint_a_clients_trace_goes_on_to_the_engines(
    tmp_path: Path, engine_headers: list[str | None]
) -> None:
    client = f"00-{TRACE_ID}-{CLIENT_SPAN}-01"
    async with emulated_cluster(tmp_path, Mode.DUALPATH) as made:
        made.http.headers.update({"traceparent": client})
        await made.ask(PROMPT, 4)
        assert made.service.tracing is None
    assert engine_headers == [client, client]


@pytest.mark.virtual_time
async def test_a_failed_attempt_is_an_event_and_both_attempts_have_their_spans() -> None:
    exporter = InMemorySpanExporter()
    async with cluster() as made:
        made.service.tracing = Tracing(exporter, made.service.scheduler.clock)
        made.calls.errors.append(EngineLostError("connection is reset"))
        made.engines["p0"].report()
        await made.run(job("a", PROMPT))
    spans = exporter.get_finished_spans()
    (root,) = (span for span in spans if span.name == "request")
    (event,) = root.events
    assert dict(event.attributes or {}) == {"reason": "connection is reset"}
    prefills = [span for span in spans if span.name == "prefill"]
    assert [dict(span.attributes or {})["dualpath.attempt"] for span in prefills] == [1, 2]
    assert root.status.status_code is StatusCode.UNSET


@pytest.mark.virtual_time
async def test_a_refused_request_ends_its_trace_as_an_error() -> None:
    exporter = InMemorySpanExporter()
    async with cluster() as made:
        made.service.tracing = Tracing(exporter, made.service.scheduler.clock)
        with pytest.raises(Exception, match="context holds 1000"):
            await made.run(job("a", PROMPT, 1000))
    (root,) = (span for span in exporter.get_finished_spans() if span.name == "request")
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "bad_request")


def test_a_collector_that_never_answers_does_not_block_the_routers_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dualpath.router.observe.tracing.FLUSH_S", 0.01)
    exporter = StuckExporter()
    tracing = Tracing(exporter, lambda: 0.0)
    record = RequestRecord("a", 1, lambda: 0.0)
    trace = tracing.begin(job("a", PROMPT), record)
    record.close("finished")
    trace.end()
    tracing.close()
    assert exporter.given_up.is_set()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_without_opentelemetry_the_start_fails_and_names_what_to_install(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, protocol)
    package = f"opentelemetry.exporter.otlp.proto.{protocol.partition('/')[0]}.trace_exporter"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="pip install 'opentelemetry-api"):
        open_tracing("http://127.0.0.1:4317", lambda: 0.0)


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/json")
    with pytest.raises(ConfigError, match="'http/json'; known are 'grpc'"):
        open_tracing("http://127.0.0.1:4318", lambda: 0.0)
