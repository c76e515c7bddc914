"""TTFT of a prompt whose KV is all stored, on an idle 1P1D: what it takes beyond its transfers.

The same prompt is asked for again and again of a ``traced_cluster``; all of its blocks but the last
are read, and one block is computed, in no time.  What the traces of both engines show under way
between the question and the first token is the transfers' own time: reads of storage, loads and
sends, each moment counted once.  The rest is HTTP, messages, decisions, threads that wake up.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.overhead.between_passes import Span, spans
from benchmarks.overhead.client import Answer, Load, TokenIds, play
from benchmarks.overhead.measure import middle, print_table
from benchmarks.overhead.traced_cluster import trace_of, traced_cluster

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode

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
    """Print a row for each length of prompt."""
    rows = [_row(length, args) for length in args.prompts]
    print_table(
        f"A fully stored prompt on an idle 1P1D, mode {args.mode}; ms, medians of {args.requests}",
        ("prompt tokens", "TTFT", "transfers under way", "computed beside", "the rest"),
        rows,
    )


def _row(length: int, args: argparse.Namespace) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        folder = Path(name)
        load = Load(streams=1, requests=1, prompt=length, tokens=2, pause_s=args.pause_s)
        buffers = ("--layer-buffers", str(args.layer_buffers))
        with traced_cluster(Mode(args.mode), folder, _COSTS, buffers) as url:
            answers = [asked_for(url, load, args.seed) for _ in range(args.requests + 2)]
        # Blocks of the first may be on their way to storage when the second asks for them.
        tracks = [spans(trace_of(role, folder), answers[2].start_s) for role in Role]
    taken = [parts(answer, tracks) for answer in answers[2:]]
    columns = zip(*taken, strict=True)
    return (str(length), *(f"{middle(list(column)) * 1e3:.1f}" for column in columns))


def asked_for(url: str, load: Load, seed: int) -> Answer:
    """Ask for the one prompt of a seed."""
    (answer,) = asyncio.run(play(url, TokenIds(), load, str(seed)))
    return answer


def parts(answer: Answer, tracks: Sequence[dict[str, list[Span]]]) -> tuple[float, ...]:
    """Return TTFT, its share with a transfer under way, the computation beside that, the rest."""
    moved = [span for of_engine in tracks for t in _TRANSFERS for span in of_engine.get(t, ())]
    computed = [span for of_engine in tracks for t in _COMPUTATION for span in of_engine.get(t, ())]
    transfers_s = covered_s(moved, answer.start_s, answer.first_s)
    all_s = covered_s([*moved, *computed], answer.start_s, answer.first_s)
    return answer.ttft_s, transfers_s, all_s - transfers_s, answer.ttft_s - all_s


def covered_s(found: Iterable[Span], start_s: float, end_s: float) -> float:
    """Return how much of a time is in at least one span."""
    covered, reached_s = 0.0, start_s
    for span in sorted(found, key=lambda span: span.start_s):
        first_s, last_s = max(span.start_s, reached_s), min(span.end_s, end_s)
        covered += max(last_s - first_s, 0.0)
        reached_s = max(reached_s, last_s)
    return covered
