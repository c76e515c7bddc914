"""One phase of load on one server: what clients saw, what the server counted, what it cost."""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.overhead.client import Answer, Load, Window, play
from benchmarks.overhead.servers import Server, cpu_s, metrics

from dualpath.report import markdown
from dualpath.report.model import Table

#: What follows a request's last token is counted within it.
_SETTLE_S = 0.3


class Phase(NamedTuple):
    """``counted`` are the growths of the server's metrics, by the name of who counts.

    ``steady`` is the router's CPU time while all first answers streamed.
    """

    answers: list[Answer]
    wall_s: float
    router_cpu_s: float
    all_cpu_s: float
    steady: Window
    counted: dict[str, dict[str, float]]

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(answer.tokens for answer in self.answers)

    def quantile_s(self, of: Callable[[Answer], float], share: float) -> float:
        """Return a quantile over all answers."""
        values = sorted(map(of, self.answers))
        return values[min(int(share * len(values)), len(values) - 1)]

    def mean_ttft_s(self) -> float:
        """Return the clients' mean TTFT."""
        return statistics.fmean(answer.ttft_s for answer in self.answers)

    def mean_s(self, who: str, metric: str, stage: str = "") -> float:
        """Return the mean of a histogram over what it observed in this phase, 0 if nothing."""
        suffix = f"/{stage}" if stage else ""
        counted = self.counted[who]
        observed = counted.get(f"{metric}_count{suffix}", 0.0)
        return counted.get(f"{metric}_sum{suffix}", 0.0) / observed if observed else 0.0


def run_phase(server: Server, load: Load, seed: str) -> Phase:
    """Put a load on a server.  Raises ``DualPathError`` if one request fails."""
    before = {name: metrics(url) for name, url in server.metric_urls.items()}
    router_s, all_s, start_s = cpu_s(server.router), _all_cpu_s(server), time.perf_counter()
    steady = Window(load.streams, lambda: cpu_s(server.router))
    answers = asyncio.run(play(server.url, server.api, load, seed, steady))
    wall_s = time.perf_counter() - start_s
    router_s, all_s = cpu_s(server.router) - router_s, _all_cpu_s(server) - all_s
    time.sleep(_SETTLE_S)
    after = {name: metrics(url) for name, url in server.metric_urls.items()}
    counted = {
        name: {sample: value - before[name].get(sample, 0.0) for sample, value in samples.items()}
        for name, samples in after.items()
    }
    print(f"{server.name}: {load.streams} streams, {wall_s:.1f} s", file=sys.stderr, flush=True)
    return Phase(answers, wall_s, router_s, all_s, steady, counted)


def idle_share(server: Server, seconds: float) -> float:
    """Return the CPU seconds per second of the router without any load."""
    start_s = cpu_s(server.router)
    time.sleep(seconds)
    return (cpu_s(server.router) - start_s) / seconds


def _all_cpu_s(server: Server) -> float:
    return sum(map(cpu_s, server.processes))


def middle(rounds: Sequence[float]) -> float:
    """Return the median over rounds."""
    return statistics.median(rounds)


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{markdown.table(Table(title, tuple(head), tuple(map(tuple, rows))))}", flush=True)
