"""CPU per token and request of one and two front ends with a scheduler and many stub engines.

Tokens per CPU-second of all front ends and the scheduler give the throughput of a machine with a
core for each front end: the number of front ends times this figure.
"""

import argparse
import asyncio
import http.client
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from dualpath.router.requests.limits import allow_many_streams
from dualpath_lab.benchmarks.overhead.client import Chat, Load, Response, TokenIds, run_load
from dualpath_lab.benchmarks.overhead.servers import (
    LIGHT,
    FrontEndOptions,
    LinkedServers,
    Pace,
    cpu_s,
    linked_servers,
    print_table,
)
from dualpath_lab.models.random_models import make_tiny_model

# ------------------------------------------------------------------------------------------- probe
# Latency of event loops under load, measured by a separate process.

_GAP_S = 0.02
_TIMEOUT_S = 30.0
_PAGE_BYTES = 4096


class ProcessSamples(NamedTuple):
    """A process's latency of each ``GET /health``, and its initial and peak resident memory."""

    latency_s: list[float]
    before_bytes: int
    max_bytes: int

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the latencies."""
        values = sorted(self.latency_s)
        return values[min(int(share * len(values)), len(values) - 1)]


class Probes:
    """Samples by process name, available after the block."""

    def __init__(self) -> None:
        self.by_process: dict[str, ProcessSamples] = {}


@contextmanager
def probing(processes: Mapping[str, tuple[int, int]]) -> Iterator[Probes]:
    """Probe processes, given by name as (HTTP port, process id), in turn during the block."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    prober = context.Process(target=_probe, args=(dict(processes), theirs))
    prober.start()
    probes = Probes()
    try:
        yield probes
        ours.send(None)
        probes.by_process = ours.recv()
    finally:
        prober.terminate()
        prober.join()


def _probe(processes: dict[str, tuple[int, int]], control: Connection) -> None:
    latencies: dict[str, list[float]] = {name: [] for name in processes}
    before = {name: resident_bytes(pid) for name, (_, pid) in processes.items()}
    peak = dict(before)
    while not control.poll(_GAP_S):
        for name, (port, pid) in processes.items():
            latencies[name].append(_latency_s(port))
            peak[name] = max(peak[name], resident_bytes(pid))
    control.send(
        {name: ProcessSamples(latencies[name], before[name], peak[name]) for name in processes}
    )


def _latency_s(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    start_s = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    duration_s = time.perf_counter() - start_s
    connection.close()
    return duration_s


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


_WARM_UP = Load(streams=16, requests=2, prompt=100, tokens=16)


class Measured(NamedTuple):
    """A load on ``count`` front ends of a kind, and its CPU seconds."""

    kind: str
    count: int
    responses: Sequence[Response]
    front_ends_s: float
    scheduler_s: float
    probes: Probes

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens per CPU second of front ends and scheduler together."""
        tokens = sum(response.tokens for response in self.responses)
        return tokens / (self.front_ends_s + self.scheduler_s)


def measure(args: argparse.Namespace) -> None:
    """Measure and print the tables.  Raises ``DualPathError`` if one stream fails."""
    model = make_tiny_model("qwen2")
    pace = Pace(prefill_s=args.prefill_ms / 1e3, step_s=args.step_ms / 1e3)
    found = []
    for kind in args.kinds:
        api = TokenIds() if args.ids or kind == LIGHT else Chat()
        options = FrontEndOptions(args.max_model_len, args.stream_interval, api)
        for count in args.front_ends:
            with (
                tempfile.TemporaryDirectory() as name,
                linked_servers(
                    model, Path(name), kind, count, args.nodes, pace, options
                ) as servers,
            ):
                # After the servers have started, since they must raise their own limits.
                allow_many_streams()
                found.append(_run(args, kind, count, servers))
    _print(args, found)


def _run(args: argparse.Namespace, kind: str, count: int, servers: LinkedServers) -> Measured:
    load = Load(
        streams=args.streams, requests=args.requests, prompt=args.prompt, tokens=args.tokens,
        ramp_s=args.ramp_s,
    )  # fmt: skip
    asyncio.run(_run_load(servers, _WARM_UP, "warm-up"))
    spent = [cpu_s(pid) for pid in (*servers.front_ends.values(), servers.scheduler.pid)]
    named = {f"front end {n}": at for n, at in enumerate(servers.front_ends.items(), 1)}
    named["scheduler"] = (servers.scheduler.port, servers.scheduler.pid)
    # Probing costs CPU as well.
    with probing(named if args.probe else {}) as probes:
        responses = asyncio.run(_run_load(servers, load, str(args.seed)))
        time.sleep(args.settle_s)
    after = [cpu_s(pid) for pid in (*servers.front_ends.values(), servers.scheduler.pid)]
    *front_ends_s, scheduler_s = (now - then for now, then in zip(after, spent, strict=True))
    return Measured(kind, count, responses, sum(front_ends_s), scheduler_s, probes)


async def _run_load(servers: LinkedServers, load: Load, seed: str) -> list[Response]:
    """Distribute a load's streams among the front ends."""
    ports = list(servers.front_ends)
    parts = []
    for number, port in enumerate(ports):
        streams = load.streams // len(ports) + (number < load.streams % len(ports))
        part = Load(
            streams=streams, requests=load.requests, prompt=load.prompt, tokens=load.tokens,
            ramp_s=load.ramp_s,
        )  # fmt: skip
        parts.append(run_load(f"http://127.0.0.1:{port}", servers.api, part, f"{seed}/{number}"))
    return [response for part in await asyncio.gather(*parts) for response in part]


def _print(args: argparse.Namespace, found: Sequence[Measured]) -> None:
    one = {m.kind: m.tokens_per_cpu_s for m in found if m.count == 1}
    rows, probed = [], []
    for each in found:
        requests = len(each.responses)
        ttft_s = sorted(response.ttft_s for response in each.responses)
        single = one.get(each.kind)
        rows.append([
            each.kind, str(each.count), str(requests), str(sum(r.tokens for r in each.responses)),
            f"{each.front_ends_s / requests * 1e3:.2f}",
            f"{each.scheduler_s / requests * 1e3:.2f}",
            f"{each.tokens_per_cpu_s:.0f}",
            f"{each.count * each.tokens_per_cpu_s / single:.2f}" if single else "",
            f"{ttft_s[requests // 2] * 1e3:.0f}", f"{ttft_s[int(requests * 0.99)] * 1e3:.0f}",
        ])  # fmt: skip
        for name, process in each.probes.by_process.items():
            grown = (
                (process.max_bytes - process.before_bytes)
                / 1024
                / args.streams
                * (each.count if name.startswith("front end") else 1)
            )
            latencies = (f"{process.quantile_s(q) * 1e3:.1f}" for q in (0.5, 0.99))
            probed.append([each.kind, str(each.count), name, *latencies, f"{grown:.0f}"])
    print_table(
        f"{args.streams} streams to {args.nodes} stub engines",
        ["front ends", "number", "requests", "tokens", "CPU ms per request: front ends",
         "scheduler", "tokens per CPU-second", "tokens/s, relative to one", "TTFT p50 ms",
         "p99 ms"],
        rows,
    )  # fmt: skip
    if not args.probe:
        return
    print_table(
        "Latency of `GET /health` under load, and memory",
        ["front ends", "number", "process", "p50 ms", "p99 ms", "KiB per stream"],
        probed,
    )
