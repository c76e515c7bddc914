"""TTFT of a prompt with completely stored KV, on an idle 1P1D, compared with its transfers.

The same prompt is sent repeatedly to a ``traced_cluster``, over one connection; all of its blocks
but the last are read, and the last one is computed in no time.  The transfers' share of TTFT is the
time in which the traces of both engines show a storage read (of any reading thread), load or send
in flight.  Computation includes what only emulated engines do: the comparison of KV that was read.
The remaining time is HTTP, messages, decisions and thread wake-ups.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath.engine.trace import STORAGE_TRACK
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
#: Tracks of a prefill engine's trace in which its layers' transfers are.
_LAYERS = ("load", "send")


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
        load = Load(
            streams=1, requests=settings.requests + 2, prompt=length, tokens=2,
            pause_s=settings.pause_s, repeats=True,
        )  # fmt: skip
        buffers = ("--layer-buffers", str(settings.layer_buffers))
        with traced_cluster(Mode(settings.mode), folder, _COSTS, buffers) as url:
            responses = asyncio.run(run_load(url, TokenIds(), load, str(settings.seed)))
        # Blocks of the first request may still be in flight to storage at the second look-up.
        since_s = responses[2].start_s
        prefill = spans(trace_path(Role.PREFILL, folder), since_s)
        decode = spans(trace_path(Role.DECODE, folder), since_s)
    parts = [time_parts(response, prefill, decode) for response in responses[2:]]
    return {
        f"{name.removesuffix('_s')}_ms": statistics.median(seconds) * 1e3
        for name, seconds in zip(TtftParts._fields, zip(*parts, strict=True), strict=True)
    }


class TtftParts(NamedTuple):
    """TTFT and its parts in seconds.

    TTFT is the sum of ``transfers_s`` (a transfer is in flight), ``computation_s`` (computation is
    under way and no transfer) and ``other_s``.  The latter is the sum of five: the time before the
    first read, that between reads, that from the last read to the first load (0 if loads begin
    earlier), that between loads and sends, and that from the last send to the token.
    """

    ttft_s: float
    transfers_s: float
    computation_s: float
    other_s: float
    to_read_s: float
    reads_s: float
    to_load_s: float
    layers_s: float
    to_token_s: float


_COLUMNS = [
    Column("TTFT", "ttft_ms", "{:.1f}", tolerance=0.25),
    Column("transfers in flight", "transfers_ms", "{:.1f}"),
    Column("computation only", "computation_ms", "{:.1f}"),
    Column("other", "other_ms", "{:.1f}", tolerance=0.25),
]
_OTHER = [
    Column("to the first read", "to_read_ms", "{:.1f}"),
    Column("between reads", "reads_ms", "{:.1f}"),
    Column("to the first load", "to_load_ms", "{:.1f}"),
    Column("between loads and sends", "layers_ms", "{:.1f}"),
    Column("to the token", "to_token_ms", "{:.1f}"),
]


def draw(raw: RawData[StoredSettings, Numbers]) -> Page:
    """Draw the parts of TTFT by the prompt's length."""
    title = f"An idle 1P1D, mode {raw.settings.mode}; ms, medians of {raw.settings.requests}"
    return Page(
        tables=(
            number_table(raw, title, _COLUMNS, "prompt"),
            number_table(raw, "Other, by period", _OTHER, "prompt"),
            number_table(raw, "Idle machine", [ROUND_TRIP]),
        ),
        results=tuple(key_results(raw, _COLUMNS)),
    )


def time_parts(
    response: Response, prefill: Mapping[str, list[Span]], decode: Mapping[str, list[Span]]
) -> TtftParts:
    """Return the parts of a response's TTFT, from the tracks of both engines' traces."""
    start_s, end_s = response.start_s, response.first_s

    def within(found: Iterable[Span]) -> list[Span]:
        return [span for span in found if start_s <= span.start_s and span.end_s <= end_s]

    reads = within([*_reads(prefill), *_reads(decode)])
    layers = within(span for track in _LAYERS for span in prefill.get(track, ()))
    # A layer's computation in the trace begins with the wait for its load.
    computed = without(within(prefill.get("compute", ())), within(prefill.get("wait", ())))
    computed += within(span for span in prefill.get("engine", ()) if span.name == "compare")
    transfers, everything = [*reads, *layers], [*reads, *layers, *computed]
    read_s, read_end_s = _extent(reads, start_s)
    load_s, sent_s = _extent(layers, read_end_s)

    def idle_s(begin_s: float, until_s: float) -> float:
        return until_s - begin_s - covered_s(everything, begin_s, until_s)

    transfers_s, other_s = covered_s(transfers, start_s, end_s), idle_s(start_s, end_s)
    return TtftParts(
        ttft_s=response.ttft_s,
        transfers_s=transfers_s,
        computation_s=response.ttft_s - transfers_s - other_s,
        other_s=other_s,
        to_read_s=idle_s(start_s, read_s),
        reads_s=idle_s(read_s, read_end_s),
        to_load_s=idle_s(read_end_s, max(read_end_s, load_s)),
        layers_s=idle_s(max(read_end_s, load_s), sent_s),
        to_token_s=idle_s(sent_s, end_s),
    )


def _reads(tracks: Mapping[str, list[Span]]) -> list[Span]:
    """Return the spans of all reading threads: of the track ``storage``, and ``storage N``."""
    numbered = f"{STORAGE_TRACK} "
    return [
        span
        for track, found in tracks.items()
        if track == STORAGE_TRACK or track.startswith(numbered)
        for span in found
    ]


def _extent(found: Sequence[Span], otherwise_s: float) -> tuple[float, float]:
    """Return the first begin and the last end of spans; ``otherwise_s`` twice without a span."""
    if not found:
        return otherwise_s, otherwise_s
    return min(span.start_s for span in found), max(span.end_s for span in found)


def without(found: Iterable[Span], holes: Iterable[Span]) -> list[Span]:
    """Return the parts of spans that none of the ``holes`` covers."""
    left = list(found)
    for hole in holes:
        cut = [span for span in left if span.start_s < hole.end_s and hole.start_s < span.end_s]
        if not cut:
            continue
        left = [span for span in left if span not in cut]
        for span in cut:
            left += [
                span._replace(start_s=start_s, end_s=end_s)
                for start_s, end_s in ((span.start_s, hole.start_s), (hole.end_s, span.end_s))
                if start_s < end_s
            ]
    return left


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
