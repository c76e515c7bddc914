"""TTFT of a prompt with completely stored KV, on an idle 1P1D, compared with its transfers.

The same prompt is sent repeatedly to a ``traced_cluster``; all of its blocks but the last are read,
and the last one is computed in no time.  The transfers' share of TTFT is the time in which the
traces of both engines show a storage read, load or send in flight.  The remaining time is HTTP,
messages, decisions and thread wake-ups.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath_lab.benchmarks.overhead.between_passes import Span, spans, trace_path, traced_cluster
from dualpath_lab.benchmarks.overhead.client import Load, Response, TokenIds, run_load
from dualpath_lab.benchmarks.overhead.servers import ROUND_TRIP, Seed, round_trip
from dualpath_sim.harness.experiment import Experiment, Page, RawData, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table

_COSTS = """
name = "stored"
layers = 32
kv_bytes_per_token = 5376.0
prefill_tokens_per_s = 1e9
[prefill]
batch_s = 0.0
[decode]
step_s = 0.001
"""
#: Tracks of a trace that are transfers, and those that are computation.
_TRANSFERS = ("storage", "load", "send")
_COMPUTATION = ("compute",)


class StoredSettings(Settings, frozen=True, kw_only=True):
    """Prompts and engines."""

    prompts: Annotated[tuple[int, ...], Setting("tokens of the prompts", ge=1)] = (
        2048,
        8192,
        32_768,
    )
    requests: Annotated[int, Setting("requests of each", ge=1)] = 30
    pause_s: Annotated[float, Setting("between requests", ge=0)] = 0.3
    mode: Annotated[Literal["dualpath", "split"], Setting("mode of the engines")] = "dualpath"
    layer_buffers: Annotated[int, Setting("layers of KV in HBM", ge=1)] = 2
    directory: Annotated[
        str, Setting("folder of the storage; default: a temporary one", metavar="DIR")
    ] = ""
    seed: Seed = 0


def _run(settings: StoredSettings, length: int) -> Numbers:
    with tempfile.TemporaryDirectory(dir=settings.directory or None) as name:
        folder = Path(name)
        load = Load(streams=1, requests=1, prompt=length, tokens=2, pause_s=settings.pause_s)
        buffers = ("--layer-buffers", str(settings.layer_buffers))
        with traced_cluster(Mode(settings.mode), folder, _COSTS, buffers) as url:
            responses = [
                send_prompt(url, load, settings.seed) for _ in range(settings.requests + 2)
            ]
        # Blocks of the first request may still be in flight to storage at the second look-up.
        tracks = [spans(trace_path(role, folder), responses[2].start_s) for role in Role]
    parts = zip(*(time_parts(response, tracks) for response in responses[2:]), strict=True)
    names = ("ttft_ms", "transfers_ms", "computation_ms", "other_ms")
    return {
        name: statistics.median(seconds) * 1e3 for name, seconds in zip(names, parts, strict=True)
    }


_COLUMNS = [
    Column("TTFT", "ttft_ms", "{:.1f}", tolerance=0.25),
    Column("transfers in flight", "transfers_ms", "{:.1f}"),
    Column("computation only", "computation_ms", "{:.1f}"),
    Column("other", "other_ms", "{:.1f}", tolerance=0.25),
]


def draw(raw: RawData[StoredSettings, Numbers]) -> Page:
    """Draw the parts of TTFT by the prompt's length."""
    title = f"An idle 1P1D, mode {raw.settings.mode}; ms, medians of {raw.settings.requests}"
    return Page(
        tables=(
            number_table(raw, title, _COLUMNS, "prompt"),
            number_table(raw, "Idle machine", [ROUND_TRIP]),
        ),
        results=tuple(key_results(raw, _COLUMNS)),
    )


def send_prompt(url: str, load: Load, seed: int) -> Response:
    """Send a seed's prompt."""
    (response,) = asyncio.run(run_load(url, TokenIds(), load, str(seed)))
    return response


def time_parts(response: Response, tracks: Sequence[dict[str, list[Span]]]) -> tuple[float, ...]:
    """Return TTFT and its parts: a transfer in flight, computation only, other."""
    moved = [span for of_engine in tracks for t in _TRANSFERS for span in of_engine.get(t, ())]
    computed = [span for of_engine in tracks for t in _COMPUTATION for span in of_engine.get(t, ())]
    transfers_s = covered_s(moved, response.start_s, response.first_s)
    all_s = covered_s([*moved, *computed], response.start_s, response.first_s)
    return response.ttft_s, transfers_s, all_s - transfers_s, response.ttft_s - all_s


def covered_s(found: Iterable[Span], start_s: float, end_s: float) -> float:
    """Return how much of a period is covered by at least one span."""
    covered, reached_s = 0.0, start_s
    for span in sorted(found, key=lambda span: span.start_s):
        first_s, last_s = max(span.start_s, reached_s), min(span.end_s, end_s)
        covered += max(last_s - first_s, 0.0)
        reached_s = max(reached_s, last_s)
    return covered


STORED = Experiment(
    name="stored",
    title="TTFT of a fully stored prompt",
    settings=StoredSettings(),
    result=Numbers,
    stages=lambda settings, progress: [
        *round_trip(),
        *one_stage(
            {f"{length:,} tokens": length for length in settings.prompts},
            lambda length, number: _run(settings, length),
        ),
    ],
    draw=draw,
)
