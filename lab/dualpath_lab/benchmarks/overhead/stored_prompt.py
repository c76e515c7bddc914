"""TTFT of a prompt with completely stored KV, on an idle 1P1D, compared with its transfers.

The same prompt is sent repeatedly to a ``traced_cluster``; all of its blocks but the last are read,
and the last one is computed in no time.  The transfers' share of TTFT is the time in which the
traces of both engines show a storage read, load or send in flight.  The remaining time is HTTP,
messages, decisions and thread wake-ups.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath_lab.benchmarks.overhead.between_passes import Span, spans, trace_path, traced_cluster
from dualpath_lab.benchmarks.overhead.client import Load, Response, TokenIds, run_load
from dualpath_lab.benchmarks.overhead.servers import median, print_table

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


def measure(args: argparse.Namespace) -> None:
    """Print a row for each prompt length."""
    rows = [_row(length, args) for length in args.prompts]
    print_table(
        f"A fully stored prompt on an idle 1P1D, mode {args.mode}; ms, medians of {args.requests}",
        ("prompt tokens", "TTFT", "transfers in flight", "computation only", "other"),
        rows,
    )


def _row(length: int, args: argparse.Namespace) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        folder = Path(name)
        load = Load(streams=1, requests=1, prompt=length, tokens=2, pause_s=args.pause_s)
        buffers = ("--layer-buffers", str(args.layer_buffers))
        with traced_cluster(Mode(args.mode), folder, _COSTS, buffers) as url:
            responses = [send_prompt(url, load, args.seed) for _ in range(args.requests + 2)]
        # Blocks of the first request may still be in flight to storage at the second look-up.
        tracks = [spans(trace_path(role, folder), responses[2].start_s) for role in Role]
    parts = [time_parts(response, tracks) for response in responses[2:]]
    columns = zip(*parts, strict=True)
    return (str(length), *(f"{median(list(column)) * 1e3:.1f}" for column in columns))


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
