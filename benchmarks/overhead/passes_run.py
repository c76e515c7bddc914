"""Consecutive passes of an emulated prefill engine, measured without a lab.

Concurrent prompts, more than a pass may hold, are sent to a ``traced_cluster``, each with a prefix
in storage.  Mode oracle computes the same without transfers.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.overhead.between_passes import Idle, idle_times, print_idle, spans
from benchmarks.overhead.client import Load, TokenIds, run_load
from benchmarks.overhead.measure import median, print_table
from benchmarks.overhead.traced_cluster import LAYER_BUFFERS, trace_path, traced_cluster

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode

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


class Measured(NamedTuple):
    """A mode's duration of each round of prompts, and the GPU's idle times."""

    round_s: list[float]
    idle: list[Idle]


def _run(mode: Mode, args: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder, round_s = Path(name), []
        quota = ("--compute-quota-s", str(_QUOTA_S))
        with traced_cluster(mode, folder, _COSTS, quota) as url:

            def run_round(prompt: int) -> float:
                """Send all prompts concurrently; each starts like that of the previous round."""
                load = Load(streams=args.prompts, requests=1, prompt=prompt, tokens=2)
                start_s = time.monotonic()
                asyncio.run(run_load(url, TokenIds(), load, str(args.seed)))
                return time.monotonic() - start_s

            run_round(args.prompt)
            since_s = time.monotonic()
            for number in range(1, args.rounds + 1):
                round_s.append(run_round(args.prompt + number * args.append))
        tracks = spans(trace_path(Role.PREFILL, folder), since_s)
        return Measured(round_s, idle_times(tracks, LAYER_BUFFERS))


def measure_passes(args: argparse.Namespace) -> None:
    """Print the durations of both modes, and the GPU's idle time between passes by cause."""
    found = {mode: _run(mode, args) for mode in (Mode.DUALPATH, Mode.ORACLE)}
    rows = [
        (mode.value, f"{statistics.fmean(m.round_s):.2f}", f"{median(m.round_s):.2f}")
        for mode, m in found.items()
    ]
    print_table(f"{args.prompts} concurrent prompts", ("mode", "mean of rounds, s", "median"), rows)
    print_idle("dualpath", found[Mode.DUALPATH].idle)
