"""Idle time of an emulated prefill engine's GPU between two forward passes, from its trace.

Only passes that follow each other count: requests were waiting when the first one ended.  The time
of such a pass beyond its computation is the GPU's idle time, which spans of the trace attribute to
causes.  A span during the computation costs nothing and is not counted.
"""

import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath.launch.local_cluster import LOOPBACK_DEVICES
from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor
from dualpath.report.model import Table, cell
from dualpath_lab.benchmarks.overhead.client import Load, TokenIds, run_load
from dualpath_lab.benchmarks.overhead.servers import BLOCK_TOKENS, Seed, wait_ready
from dualpath_lab.models.random_models import VOCABULARY_TOKENS
from dualpath_sim.harness.experiment import Experiment, Page, RawData, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table, summary

#: A longer gap between two passes was a wait for requests.
_MAX_GAP_S = 0.02
PARTS = (
    "first layers' loads",
    "waits for other loads and sends",
    "last layers' sends",
    "comparison of read KV",
    "begin: planning, submission",
    "end: messages, responses",
)
_SPANS = {"compare": PARTS[3], "begin": PARTS[4], "settle": PARTS[5]}


class Span(NamedTuple):
    """An event of a trace; times in seconds."""

    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


class Idle(NamedTuple):
    """Computation and idle time of one pass that another one follows; ``parts`` by cause."""

    compute_s: float
    idle_s: float
    parts: Mapping[str, float]


def spans(path: Path, since_s: float = 0.0) -> dict[str, list[Span]]:
    """Return the events of a trace since ``since_s`` by track, ordered by time."""
    tracks: dict[str, list[Span]] = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        start_s, duration_s = event["ts"] / 1e6, event["dur"] / 1e6
        span = Span(event["name"], start_s, start_s + duration_s, event["args"])
        if start_s >= since_s:
            tracks[event["tid"]].append(span)
    return {track: sorted(found, key=lambda span: span.start_s) for track, found in tracks.items()}


def idle_times(tracks: Mapping[str, Sequence[Span]], buffers: int) -> list[Idle]:
    """Return the times of each pass that another one follows; HBM held ``buffers`` layers."""
    passes = [span for span in tracks["engine"] if span.name == "pass"]
    pairs = list(itertools.pairwise(passes))
    if not tracks.get("compute"):
        return []  # mode oracle
    layers = 1 + max(_layer(span) for span in tracks["compute"])
    work = [s for s in (*tracks["engine"], *tracks.get("pass", ())) if s.name in _SPANS]
    # Work during the computation of a pass delays nothing.
    computed = [_between(tracks["compute"], one, following) for one, following in pairs]
    outside = [s for s in work if not any(_covers(spans_of_pass, s) for spans_of_pass in computed)]
    found = []
    for one, following in pairs:
        parts: dict[str, float] = defaultdict(float)
        for span in _between(outside, one, following):
            parts[_SPANS[span.name]] += span.end_s - span.start_s
        if following.start_s - one.end_s - sum(parts.values()) > _MAX_GAP_S:
            continue
        for span in _between(tracks.get("wait", ()), one, following):
            parts[_part(span, layers, buffers)] += span.end_s - span.start_s
        compute_s = one.args["compute_s"]
        found.append(Idle(compute_s, following.start_s - one.start_s - compute_s, parts))
    return found


def _between(found: Iterable[Span], one: Span, following: Span) -> list[Span]:
    return [span for span in found if one.start_s <= span.start_s < following.start_s]


def _covers(computed: Sequence[Span], span: Span) -> bool:
    return bool(computed) and computed[0].start_s < span.start_s < computed[-1].end_s


def _layer(span: Span) -> int:
    return int(span.name.rpartition(" ")[2].lstrip("L"))


def _part(wait: Span, layers: int, buffers: int) -> str:
    if wait.name.startswith("load") and _layer(wait) < buffers:
        return PARTS[0]
    if wait.name.startswith("send") and _layer(wait) >= layers - buffers:
        return PARTS[2]
    return PARTS[1]


_REST = ("interpreter, thread wake-ups", "GPU idle", "GPU computing")
_COLUMNS = [Column(part, part, "{:.1f}") for part in (*PARTS, *_REST)]


def idle_numbers(found: Sequence[Idle]) -> Numbers:
    """Return the mean ms per pass by cause, and the number of passes."""
    numbers: Numbers = {"passes": len(found)}
    if not found:
        return numbers

    def mean_ms(of: Callable[[Idle], float]) -> float:
        return statistics.fmean(map(of, found)) * 1e3

    numbers |= {part: mean_ms(lambda idle, part=part: idle.parts.get(part, 0.0)) for part in PARTS}  # type: ignore[misc]
    numbers[_REST[0]] = mean_ms(lambda idle: idle.idle_s - sum(idle.parts.values()))
    numbers[_REST[1]] = mean_ms(lambda idle: idle.idle_s)
    numbers[_REST[2]] = mean_ms(lambda idle: idle.compute_s)
    numbers["idle_share"] = numbers[_REST[1]] / (numbers[_REST[1]] + numbers[_REST[2]])
    return numbers


def idle_table(raw: RawData[Any, Numbers]) -> Table:
    """Return the mean ms per pass: a row per cause, a column per cell."""
    cells = [name for name in raw.cells if any(run["passes"] for run in raw.of(name))]
    rows = tuple(
        (one.head, *(cell(summary(raw, name, one), one.form) for name in cells))
        for one in (Column("passes", "passes", "{:.0f}"), *_COLUMNS)
    )
    return Table("Mean ms per pass that another one follows", ("per pass", *cells), rows)


_IDLE_SHARE = Column("GPU idle, share", "idle_share", "{:.1%}", tolerance=0.25)


class TracesSettings(Settings, frozen=True, kw_only=True):
    """Traces of prefill engines."""

    traces: Annotated[tuple[str, ...], Setting("traces of PEs", metavar="TRACE.json,…")] = ()
    layer_buffers: Annotated[int, Setting("layers of KV in HBM", ge=1)] = 2


TRACES = Experiment(
    name="traces",
    title="Idle time of a PE's GPU between two passes, from traces of a lab",
    settings=TracesSettings(),
    result=Numbers,
    stages=lambda settings, progress: one_stage(
        {trace: trace for trace in settings.traces},
        lambda trace, number: idle_numbers(idle_times(spans(Path(trace)), settings.layer_buffers)),
    ),
    draw=lambda raw: Page(
        tables=(idle_table(raw),), results=tuple(key_results(raw, [_IDLE_SHARE]))
    ),
)


# ---------------------------------------------------------------------------------- traced cluster
# A light router, an emulated prefill and an emulated decode engine, which write traces.
#
# All are processes of this machine; transfers use its loopback network, storage is a folder without
# a bandwidth limit, and no KV stays in DRAM from one prompt to the next.

LAYER_BUFFERS = 2
#: Enough for 24 prompts of a few thousand tokens; all of it is touched at start.
_MEMORY_BYTES = 1 << 29


def trace_path(role: Role, folder: Path) -> Path:
    """Return the path to which the engine of a role writes its trace when it ends."""
    return folder / f"{role.value}.json"


@contextmanager
def traced_cluster(
    mode: Mode, folder: Path, costs: str, engine_arguments: Sequence[str] = ()
) -> Iterator[str]:
    """Run the cluster and yield its endpoint; ``costs`` is the text of a model file."""
    model = folder / "costs.toml"
    model.write_text(costs)
    port, control_port = claim_port(), claim_port()
    router = ["emulate", "router", "--port", str(port), "--control-port", str(control_port)]
    engine = [
        "--router", f"tcp://127.0.0.1:{control_port}", "--model", str(model),
        "--storage", str(folder / "storage"), "--block-tokens", str(BLOCK_TOKENS),
        "--vocab-size", str(VOCABULARY_TOKENS), "--mode", mode.value, "--verify", "sampled",
        "--hbm-bytes", str(_MEMORY_BYTES), "--buffer-bytes", str(_MEMORY_BYTES),
        "--layer-buffers", str(LAYER_BUFFERS), "--touch-memory", *engine_arguments,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with Supervisor() as servers:
        words = [*router, "--mode", mode.value, "--no-dram-tier"]
        servers.add(_process("router", words, folder), ends_last=True)
        for role in Role:
            words = ["emulate", role.value, "--engine-id", role.value, *engine]
            words += ["--trace-out", str(trace_path(role, folder))]
            servers.add(_process(role.value, words, folder))
        wait_ready(url, servers)
        yield url


def _process(name: str, words: Sequence[str], folder: Path) -> SpawnedProcess:
    argv = (sys.executable, "-m", "dualpath.cli.main", *words)
    return SpawnedProcess(name, argv, folder / f"{name}.log", {**os.environ, **LOOPBACK_DEVICES})


# -------------------------------------------------------------------------------------- passes run
# Consecutive passes of an emulated prefill engine, measured without a lab.
#
# Concurrent prompts, more than a pass may hold, are sent to a ``traced_cluster``, each with a
# prefix in storage.  Mode oracle computes the same without transfers.

#: A pass holds two or three prompts of 512 new tokens; the last one is split.
_QUOTA_S = 1.3
_COSTS = """
name = "passes"
layers = 32
kv_bytes_per_token = 5376.0
prefill_tokens_per_s = 1000.0
[prefill]
batch_s = 0.02
attention_token_s = 0.001
[decode]
step_s = 0.001
"""


class PassesSettings(Settings, frozen=True, kw_only=True):
    """The prompts."""

    prompts: Annotated[int, Setting("concurrent prompts", ge=1)] = 24
    prompt: Annotated[int, Setting("stored tokens", ge=1)] = 2048
    append: Annotated[int, Setting("new tokens in each round", ge=1)] = 512
    rounds: Annotated[int, Setting("rounds of prompts", ge=1)] = 3
    seed: Seed = 0


def _run(settings: PassesSettings, mode: Mode) -> Numbers:
    """Return the durations of the rounds of prompts in a mode, and the GPU's idle times."""
    with tempfile.TemporaryDirectory() as name:
        folder, round_s = Path(name), []
        quota = ("--compute-quota-s", str(_QUOTA_S))
        with traced_cluster(mode, folder, _COSTS, quota) as url:

            def run_round(prompt: int) -> float:
                """Send all prompts concurrently; each starts like that of the previous round."""
                load = Load(streams=settings.prompts, requests=1, prompt=prompt, tokens=2)
                start_s = time.monotonic()
                asyncio.run(run_load(url, TokenIds(), load, str(settings.seed)))
                return time.monotonic() - start_s

            run_round(settings.prompt)
            since_s = time.monotonic()
            for number in range(1, settings.rounds + 1):
                round_s.append(run_round(settings.prompt + number * settings.append))
        tracks = spans(trace_path(Role.PREFILL, folder), since_s)
    times = {"mean_s": statistics.fmean(round_s), "median_s": statistics.median(round_s)}
    return times | idle_numbers(idle_times(tracks, LAYER_BUFFERS))


_ROUNDS = [
    Column("mean of rounds, s", "mean_s", tolerance=0.25),
    Column("median", "median_s"),
]


def draw_passes(raw: RawData[PassesSettings, Numbers]) -> Page:
    """Draw the durations of both modes, and the GPU's idle time between passes by cause."""
    title = f"{raw.settings.prompts} concurrent prompts"
    return Page(
        tables=(number_table(raw, title, _ROUNDS, "mode"), idle_table(raw)),
        results=tuple(key_results(raw, [*_ROUNDS, _IDLE_SHARE])),
    )


PASSES = Experiment(
    name="passes",
    title="Idle time of a PE's GPU between two passes, without a lab",
    settings=PassesSettings(),
    result=Numbers,
    stages=lambda settings, progress: one_stage(
        {mode.value: mode for mode in (Mode.DUALPATH, Mode.ORACLE)},
        lambda mode, number: _run(settings, mode),
    ),
    draw=draw_passes,
)
