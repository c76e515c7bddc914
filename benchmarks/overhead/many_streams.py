"""Many streams at once through the router, all of which have to end as asked."""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

from benchmarks.overhead.client import Answer, Load
from benchmarks.overhead.measure import Phase, print_table, run_phase
from benchmarks.overhead.servers import Pace, Shape, paced_cluster

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
                model, Path(folder) / "cluster", pace, Shape(), light=front == LIGHT
            ) as server,
        ):
            # Not before the servers have started: they have to see to their own limits.
            allow_many_streams()
            rows.append(_row(server.name, run_phase(server, load, str(args.seed))))
    print_table(
        "All streams ended with the tokens asked for",
        ["server", "streams", "most at once", "tokens", "attempts repeated", "TTFT p50 ms",
         "p99 ms", "gap p50 ms", "p99 ms", "router's CPU share"],
        rows,
    )  # fmt: skip


def _row(name: str, phase: Phase) -> list[str]:
    gaps_s = sorted(b - a for answer in phase.answers for a, b in pairwise(answer.event_s))
    return [
        name,
        str(len(phase.answers)),
        str(most_at_once(phase.answers)),
        str(phase.tokens),
        f"{phase.counted['router']['dualpath:retries_total']:.0f}",
        *(f"{phase.quantile_s(lambda a: a.ttft_s, q) * 1e3:.0f}" for q in (0.5, 0.99)),
        *(f"{gaps_s[int(q * len(gaps_s))] * 1e3:.0f}" for q in (0.5, 0.99)),
        f"{phase.router_cpu_s / phase.wall_s:.0%}",
    ]


def most_at_once(answers: list[Answer]) -> int:
    """Return how many were between their first and their last token at the same time."""
    moments = [(a.event_s[0], 1) for a in answers] + [(a.event_s[-1], -1) for a in answers]
    now = most = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most
