"""Many concurrent streams through the router, all of which must complete."""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

from benchmarks.overhead.client import Load, Response
from benchmarks.overhead.measure import Phase, print_table, run_phase
from benchmarks.overhead.servers import FrontEndOptions, Pace, paced_cluster

from dualpath.laboratory.models.tiny import make_tiny_model
from dualpath.router.requests.limits import allow_many_streams

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
