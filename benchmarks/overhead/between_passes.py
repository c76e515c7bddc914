"""Idle time of an emulated prefill engine's GPU between two forward passes, from its trace.

Only passes that follow each other count: requests were waiting when the first one ended.  The time
of such a pass beyond its computation is the GPU's idle time, which spans of the trace attribute to
causes.  A span during the computation costs nothing and is not counted.
"""

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.overhead.measure import print_table

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


def measure(args: argparse.Namespace) -> None:
    """Print a table for each trace."""
    for path in args.traces:
        print_idle(str(path), idle_times(spans(path), args.layer_buffers))


def print_idle(name: str, found: Sequence[Idle]) -> None:
    """Print the times of a pass by cause."""
    if not found:
        print(f"{name}: no pass directly follows another one")
        return
    parts = {part: [each.parts.get(part, 0.0) for each in found] for part in PARTS}
    idle = [each.idle_s for each in found]
    parts["interpreter, thread wake-ups"] = [
        each.idle_s - sum(each.parts.values()) for each in found
    ]
    parts["GPU idle"] = idle
    parts["GPU computing"] = [each.compute_s for each in found]
    rows = [
        (part, f"{statistics.fmean(times_s) * 1e3:.1f}", f"{statistics.median(times_s) * 1e3:.1f}")
        for part, times_s in parts.items()
    ]
    print_table(f"{name}: {len(found)} passes", ("per pass", "mean, ms", "median"), rows)
