"""Passes that follow each other on an emulated prefill engine, measured without a lab.

Prompts come at once to a ``traced_cluster``, more than a pass may hold, each with its beginning in
the storage.  Mode oracle computes the same, and moves nothing.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.overhead.between_passes import Idle, idle_times, print_idle, spans
from benchmarks.overhead.client import Load, TokenIds, play
from benchmarks.overhead.measure import middle, print_table
from benchmarks.overhead.traced_cluster import LAYER_BUFFERS, trace_of, traced_cluster

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode

#: A pass holds two or three prompts of 512 new tokens, and cuts the last.
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
    """Of a mode: seconds until all prompts of each round were answered; the GPU's idle times."""

    round_s: list[float]
    idle: list[Idle]


def _run(mode: Mode, args: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder, round_s = Path(name), []
        quota = ("--compute-quota-s", str(_QUOTA_S))
        with traced_cluster(mode, folder, _COSTS, quota) as url:

            def answered(prompt: int) -> float:
                """Ask for all prompts at once; each begins as that of the round before."""
                load = Load(streams=args.prompts, requests=1, prompt=prompt, tokens=2)
                start_s = time.monotonic()
                asyncio.run(play(url, TokenIds(), load, str(args.seed)))
                return time.monotonic() - start_s

            answered(args.prompt)
            since_s = time.monotonic()
            for number in range(1, args.rounds + 1):
                round_s.append(answered(args.prompt + number * args.append))
        tracks = spans(trace_of(Role.PREFILL, folder), since_s)
        return Measured(round_s, idle_times(tracks, LAYER_BUFFERS))


def measure_passes(args: argparse.Namespace) -> None:
    """Print how long both modes took, and where the GPU's time went between passes."""
    found = {mode: _run(mode, args) for mode in (Mode.DUALPATH, Mode.ORACLE)}
    rows = [
        (mode.value, f"{statistics.fmean(m.round_s):.2f}", f"{middle(m.round_s):.2f}")
        for mode, m in found.items()
    ]
    print_table(f"{args.prompts} prompts at once", ("mode", "mean of rounds, s", "median"), rows)
    print_idle("dualpath", found[Mode.DUALPATH].idle)
