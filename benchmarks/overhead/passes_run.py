"""Passes that follow each other on an emulated prefill engine, measured without a lab.

A light front door, one prefill and one decode engine, all processes of this machine; transfers go
over its own network, storage is a folder that nobody throttles.  Prompts come at once, more than a
pass may hold, each with its beginning in the storage.  Mode oracle computes the same, and moves
nothing.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.overhead.between_passes import Idle, idle_times, print_idle, spans
from benchmarks.overhead.client import Load, TokenIds, play
from benchmarks.overhead.measure import middle, print_table
from benchmarks.overhead.servers import BLOCK_TOKENS, wait_ready

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.laboratory.models.tiny import VOCABULARY_TOKENS
from dualpath.ops.launch.cluster_keys import LOOPBACK_DEVICES
from dualpath.ops.launch.ports import claim_port
from dualpath.ops.launch.process import SpawnedProcess, Supervisor

_LAYER_BUFFERS = 2
#: For the default's 24 prompts with all rounds; touched, so that only as much as is needed.
_MEMORY_BYTES = 1 << 29
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


@contextmanager
def _cluster(mode: Mode, folder: Path) -> Iterator[str]:
    costs = folder / "costs.toml"
    costs.write_text(_COSTS)
    port, control_port = claim_port(), claim_port()
    router = ["emulate", "router", "--port", str(port), "--control-port", str(control_port)]
    engine = [
        "--router", f"tcp://127.0.0.1:{control_port}", "--model", str(costs),
        "--storage", str(folder / "storage"), "--block-tokens", str(BLOCK_TOKENS),
        "--vocab-size", str(VOCABULARY_TOKENS), "--mode", mode.value, "--verify", "sampled",
        "--hbm-bytes", str(_MEMORY_BYTES), "--buffer-bytes", str(_MEMORY_BYTES),
        "--layer-buffers", str(_LAYER_BUFFERS), "--touch-memory",
        "--compute-quota-s", str(_QUOTA_S),
        "--progress-delay-us", "1000",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with Supervisor() as servers:
        words = [*router, "--mode", mode.value, "--no-dram-tier"]
        servers.add(_process("router", words, folder), ends_last=True)
        for role in Role:
            trace = folder / f"{role.value}.json"
            words = ["emulate", role.value, "--engine-id", role.value, *engine]
            words += ["--trace-out", str(trace)]
            servers.add(_process(role.value, words, folder))
        wait_ready(url, servers)
        yield url


def _process(name: str, words: Sequence[str], folder: Path) -> SpawnedProcess:
    argv = (sys.executable, "-m", "dualpath.cli.main", *words)
    return SpawnedProcess(name, argv, folder / f"{name}.log", {**os.environ, **LOOPBACK_DEVICES})


def _run(mode: Mode, args: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder, round_s = Path(name), []
        with _cluster(mode, folder) as url:

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
        tracks = spans(folder / f"{Role.PREFILL.value}.json", since_s)
        return Measured(round_s, idle_times(tracks, _LAYER_BUFFERS))


def measure(args: argparse.Namespace) -> None:
    """Print how long both modes took, and where the GPU's time went between passes."""
    found = {mode: _run(mode, args) for mode in (Mode.DUALPATH, Mode.ORACLE)}
    rows = [
        (mode.value, f"{statistics.fmean(m.round_s):.2f}", f"{middle(m.round_s):.2f}")
        for mode, m in found.items()
    ]
    print_table(f"{args.prompts} prompts at once", ("mode", "mean of rounds, s", "median"), rows)
    print_idle("dualpath", found[Mode.DUALPATH].idle)
