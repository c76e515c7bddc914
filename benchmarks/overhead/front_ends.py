"""One front end and two before a scheduler and many stub engines: CPU of tokens and requests.

Tokens per CPU-second of all front ends and the scheduler say what a machine with a core for each
would serve: with two front ends twice of what these two use of one core's second.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.overhead.client import Answer, Chat, Load, TokenIds, play
from benchmarks.overhead.measure import print_table
from benchmarks.overhead.probe import Probes, probing
from benchmarks.overhead.servers import LIGHT, LinkedServers, Pace, Shape, cpu_s, linked_servers

from dualpath.laboratory.models.tiny import make_tiny_model
from dualpath.router.requests.limits import allow_many_streams

_WARM_UP = Load(streams=16, requests=2, prompt=100, tokens=16)


class Measured(NamedTuple):
    """A load on ``count`` front ends of a kind, and the CPU seconds that it took."""

    kind: str
    count: int
    answers: Sequence[Answer]
    front_ends_s: float
    scheduler_s: float
    probes: Probes

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens for a second of CPU of front ends and scheduler together."""
        tokens = sum(answer.tokens for answer in self.answers)
        return tokens / (self.front_ends_s + self.scheduler_s)


def measure(args: argparse.Namespace) -> None:
    """Measure and print the tables.  Raises ``DualPathError`` if one stream fails."""
    model = make_tiny_model("qwen2")
    pace = Pace(prefill_s=args.prefill_ms / 1e3, step_s=args.step_ms / 1e3)
    found = []
    for kind in args.kinds:
        api = TokenIds() if args.ids or kind == LIGHT else Chat()
        shape = Shape(args.max_model_len, args.stream_interval, api)
        for count in args.front_ends:
            with (
                tempfile.TemporaryDirectory() as name,
                linked_servers(model, Path(name), kind, count, args.nodes, pace, shape) as servers,
            ):
                # Not before the servers have started: they have to see to their own limits.
                allow_many_streams()
                found.append(_run(args, kind, count, servers))
    _print(args, found)


def _run(args: argparse.Namespace, kind: str, count: int, servers: LinkedServers) -> Measured:
    load = Load(
        streams=args.streams, requests=args.requests, prompt=args.prompt, tokens=args.tokens,
        ramp_s=args.ramp_s,
    )  # fmt: skip
    asyncio.run(_play(servers, _WARM_UP, "warm-up"))
    spent = [cpu_s(pid) for pid in (*servers.front_ends.values(), servers.scheduler.pid)]
    named = {f"front end {n}": at for n, at in enumerate(servers.front_ends.items(), 1)}
    named["scheduler"] = (servers.scheduler.port, servers.scheduler.pid)
    # Asking costs CPU as well.
    with probing(named if args.probe else {}) as probes:
        answers = asyncio.run(_play(servers, load, str(args.seed)))
        time.sleep(args.settle_s)
    after = [cpu_s(pid) for pid in (*servers.front_ends.values(), servers.scheduler.pid)]
    *front_ends_s, scheduler_s = (now - then for now, then in zip(after, spent, strict=True))
    return Measured(kind, count, answers, sum(front_ends_s), scheduler_s, probes)


async def _play(servers: LinkedServers, load: Load, seed: str) -> list[Answer]:
    """Divide a load's streams among the front ends."""
    ports = list(servers.front_ends)
    parts = []
    for number, port in enumerate(ports):
        streams = load.streams // len(ports) + (number < load.streams % len(ports))
        part = Load(
            streams=streams, requests=load.requests, prompt=load.prompt, tokens=load.tokens,
            ramp_s=load.ramp_s,
        )  # fmt: skip
        parts.append(play(f"http://127.0.0.1:{port}", servers.api, part, f"{seed}/{number}"))
    return [answer for answers in await asyncio.gather(*parts) for answer in answers]


def _print(args: argparse.Namespace, found: Sequence[Measured]) -> None:
    one = {m.kind: m.tokens_per_cpu_s for m in found if m.count == 1}
    rows, seen = [], []
    for each in found:
        requests = len(each.answers)
        ttft_s = sorted(answer.ttft_s for answer in each.answers)
        single = one.get(each.kind)
        rows.append([
            each.kind, str(each.count), str(requests), str(sum(a.tokens for a in each.answers)),
            f"{each.front_ends_s / requests * 1e3:.2f}",
            f"{each.scheduler_s / requests * 1e3:.2f}",
            f"{each.tokens_per_cpu_s:.0f}",
            f"{each.count * each.tokens_per_cpu_s / single:.2f}" if single else "",
            f"{ttft_s[requests // 2] * 1e3:.0f}", f"{ttft_s[int(requests * 0.99)] * 1e3:.0f}",
        ])  # fmt: skip
        for name, process in each.probes.seen.items():
            grown = (
                (process.max_bytes - process.before_bytes)
                / 1024
                / args.streams
                * (each.count if name.startswith("front end") else 1)
            )
            answered = (f"{process.quantile_s(q) * 1e3:.1f}" for q in (0.5, 0.99))
            seen.append([each.kind, str(each.count), name, *answered, f"{grown:.0f}"])
    print_table(
        f"{args.streams} streams before {args.nodes} stub engines",
        ["front ends", "of them", "requests", "tokens", "CPU ms per request: front ends",
         "scheduler", "tokens per CPU-second", "tokens/s, relative to one", "TTFT p50 ms",
         "p99 ms"],
        rows,
    )  # fmt: skip
    if not args.probe:
        return
    print_table(
        "`GET /health` meanwhile, and memory",
        ["front ends", "of them", "process", "answered p50 ms", "p99 ms", "KiB per stream"],
        seen,
    )
