"""Overhead of the router itself, with engines that take time but hardly any CPU."""

import argparse
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dualpath.core.errors import ConfigError
from dualpath.router.requests.limits import allow_many_streams
from dualpath_lab.benchmarks.overhead.client import Chat, Load, Response, TokenIds
from dualpath_lab.benchmarks.overhead.servers import (
    FrontEndOptions,
    Pace,
    Phase,
    Server,
    idle_share,
    median,
    paced_cluster,
    plain_server,
    print_table,
    run_phase,
)
from dualpath_lab.models.random_models import make_tiny_model

# ------------------------------------------------------------------------------------ many streams
# Many concurrent streams through the router, all of which must complete.

LIGHT = "light"
FRONTS = ("router", LIGHT)


def measure_streams(args: argparse.Namespace) -> None:
    """Measure and print the table.  Raises ``DualPathError`` if one stream fails."""
    model = make_tiny_model("qwen2")
    pace = Pace(prefill_s=args.prefill_ms / 1e3, step_s=args.step_ms / 1e3)
    load = Load(
        streams=args.streams, requests=1, prompt=args.prompt, tokens=args.tokens,
        ramp_s=args.ramp_s,
    )  # fmt: skip
    rows = []
    for front in args.fronts:
        with (
            tempfile.TemporaryDirectory() as folder,
            paced_cluster(
                model, Path(folder) / "cluster", pace, FrontEndOptions(), light=front == LIGHT
            ) as server,
        ):
            # After the servers have started, since they must raise their own limits.
            allow_many_streams()
            rows.append(_row(server.name, run_phase(server, load, str(args.seed))))
    print_table(
        "All streams completed with the requested tokens",
        ["server", "streams", "max concurrent", "tokens", "retries", "TTFT p50 ms",
         "p99 ms", "gap p50 ms", "p99 ms", "router's CPU share"],
        rows,
    )  # fmt: skip


def _row(name: str, phase: Phase) -> list[str]:
    gaps_s = sorted(b - a for response in phase.responses for a, b in pairwise(response.event_s))
    return [
        name,
        str(len(phase.responses)),
        str(max_concurrent(phase.responses)),
        str(phase.tokens),
        f"{phase.metrics['router']['dualpath:retries_total']:.0f}",
        *(f"{phase.quantile_s(lambda a: a.ttft_s, q) * 1e3:.0f}" for q in (0.5, 0.99)),
        *(f"{gaps_s[int(q * len(gaps_s))] * 1e3:.0f}" for q in (0.5, 0.99)),
        f"{phase.router_cpu_s / phase.wall_s:.0%}",
    ]


def max_concurrent(responses: list[Response]) -> int:
    """Return the largest number of streams between their first and last token at one time."""
    changes = [(r.event_s[0], 1) for r in responses] + [(r.event_s[-1], -1) for r in responses]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


_STAGE = "dualpath:stage_seconds"
_WARM_UP = Load(streams=32, requests=2, prompt=100, tokens=16)


class Round(NamedTuple):
    """CPU of a server with a number of streams: idle, and with long and short responses.

    ``streaming`` has long responses, ``starting`` short ones.
    """

    idle_share: float
    streaming: Phase
    starting: Phase

    @property
    def token_cpu_s(self) -> float:
        """CPU time per token; raises ``ConfigError`` if the streams never all ran concurrently."""
        steady = self.streaming.steady
        if not steady.events:
            raise ConfigError(
                "a stream ended before the last one started, but all must stream at the same time; "
                "raise --tokens or lower --ramp-s"
            )
        return (steady.spent - self.idle_share * steady.wall_s) / steady.events

    @property
    def request_cpu_s(self) -> float:
        """CPU time per request beyond that of its tokens."""
        phase = self.starting
        cpu_s = phase.router_cpu_s - self.idle_share * phase.wall_s
        return (cpu_s - self.token_cpu_s * phase.tokens) / len(phase.responses)


def measure(args: argparse.Namespace) -> None:
    """Measure and print the table."""
    model = make_tiny_model("qwen2")
    pace = Pace(prefill_s=args.prefill_ms / 1e3, step_s=args.step_ms / 1e3)
    options = FrontEndOptions(
        args.max_model_len, args.stream_interval, TokenIds() if args.ids else Chat()
    )
    found: dict[tuple[str, int], list[Round]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        servers = [
            stack.enter_context(paced_cluster(model, folder / "full", pace, options)),
            stack.enter_context(paced_cluster(model, folder / "light", pace, options, light=True)),
        ]
        if args.plain:
            servers.append(stack.enter_context(plain_server(model, folder, options)))
        for server in servers:
            run_phase(server, _WARM_UP, "warm-up")
        for number in range(args.rounds):
            for server in servers:
                share = idle_share(server, args.idle_s)
                for streams in args.streams:
                    seed = f"{args.seed}/{number}/{streams}"
                    found[server.name, streams].append(_round(server, args, streams, share, seed))
    _print(found)


def _round(server: Server, args: argparse.Namespace, streams: int, idle: float, seed: str) -> Round:
    streaming = Load(
        streams=streams, requests=1, prompt=args.prompt, ramp_s=args.ramp_s,
        tokens=args.tokens if streams > 1 else 2 * args.tokens,
    )  # fmt: skip
    starting = Load(
        streams=streams,
        requests=args.requests if streams > 1 else 8 * args.requests,
        prompt=args.prompt,
        # Short for a single stream, so that many requests fit; longer for many streams, which share
        # a core.
        tokens=args.tokens // 3 if streams > 1 else args.tokens // 30,
        spread=0.5,
        ramp_s=args.ramp_s,
    )
    return Round(
        idle, run_phase(server, streaming, f"{seed}/long"), run_phase(server, starting, seed)
    )


def _print(found: dict[tuple[str, int], list[Round]]) -> None:
    rows = []
    for (name, streams), rounds in found.items():
        ttft_s = median([r.starting.quantile_s(lambda a: a.ttft_s, 0.5) for r in rounds])
        row = [
            name,
            str(streams),
            f"{median([r.token_cpu_s for r in rounds]) * 1e6:.0f}",
            f"{median([r.request_cpu_s for r in rounds]) * 1e3:.1f}",
            f"{median([r.idle_share for r in rounds]):.1%}",
            f"{ttft_s * 1e3:.1f}",
        ]
        if "router" in rounds[0].starting.metrics:
            forward_s = median([r.starting.mean_s("router", _STAGE, "forward") for r in rounds])
            row += [f"{forward_s * 1e3:.1f}", f"{(ttft_s - forward_s) * 1e3:.1f}"]
        rows.append(row + [""] * (8 - len(row)))
    print_table(
        "CPU of the process that serves clients; medians over rounds",
        ["server", "streams", "CPU µs per token", "CPU ms per request", "idle CPU",
         "TTFT p50 ms", "of it the PE's pass", "other"],
        rows,
    )  # fmt: skip
