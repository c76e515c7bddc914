"""One phase of load on one server: clients' times, growth of the server's metrics, CPU time."""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.overhead.client import Load, Response, Window, run_load
from benchmarks.overhead.servers import Server, cpu_s, read_metrics

from dualpath.report import markdown
from dualpath.report.model import Table

#: The server's work after a request's last token is done within this time.
_SETTLE_S = 0.3


class Phase(NamedTuple):
    """``metrics``: growth of the server's metrics, by the process that exports them.

    ``steady``: the router's CPU time while all streams were in their steady state.
    """

    responses: list[Response]
    wall_s: float
    router_cpu_s: float
    all_cpu_s: float
    steady: Window
    metrics: dict[str, dict[str, float]]

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(response.tokens for response in self.responses)

    def quantile_s(self, of: Callable[[Response], float], share: float) -> float:
        """Return a quantile over all responses."""
        values = sorted(map(of, self.responses))
        return values[min(int(share * len(values)), len(values) - 1)]

    def mean_ttft_s(self) -> float:
        """Return the clients' mean TTFT."""
        return statistics.fmean(response.ttft_s for response in self.responses)

    def mean_s(self, source: str, metric: str, stage: str = "") -> float:
        """Return the mean of a histogram's observations in this phase, 0 without observations."""
        suffix = f"/{stage}" if stage else ""
        growth = self.metrics[source]
        observed = growth.get(f"{metric}_count{suffix}", 0.0)
        return growth.get(f"{metric}_sum{suffix}", 0.0) / observed if observed else 0.0


def run_phase(server: Server, load: Load, seed: str) -> Phase:
    """Run a load on a server; raises ``DualPathError`` if a request fails."""
    before = {name: read_metrics(url) for name, url in server.metric_urls.items()}
    router_s, all_s, start_s = cpu_s(server.router), _all_cpu_s(server), time.perf_counter()
    steady = Window(load.streams, lambda: cpu_s(server.router))
    responses = asyncio.run(run_load(server.url, server.api, load, seed, steady))
    wall_s = time.perf_counter() - start_s
    router_s, all_s = cpu_s(server.router) - router_s, _all_cpu_s(server) - all_s
    time.sleep(_SETTLE_S)
    after = {name: read_metrics(url) for name, url in server.metric_urls.items()}
    growth = {
        name: {sample: value - before[name].get(sample, 0.0) for sample, value in samples.items()}
        for name, samples in after.items()
    }
    print(f"{server.name}: {load.streams} streams, {wall_s:.1f} s", file=sys.stderr, flush=True)
    return Phase(responses, wall_s, router_s, all_s, steady, growth)


def idle_share(server: Server, seconds: float) -> float:
    """Return the router's CPU seconds per second without load."""
    start_s = cpu_s(server.router)
    time.sleep(seconds)
    return (cpu_s(server.router) - start_s) / seconds


def _all_cpu_s(server: Server) -> float:
    return sum(map(cpu_s, server.processes))


def median(rounds: Sequence[float]) -> float:
    """Return the median over rounds."""
    return statistics.median(rounds)


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{markdown.table(Table(title, tuple(head), tuple(map(tuple, rows))))}", flush=True)
