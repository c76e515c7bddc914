"""The metrics of an emulated engine at ``/metrics``, and their parser for clients of a run.

They include the totals that the engine reports to its router, so that a run needs no router.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # Clients of a run parse metrics without the libraries of an engine.
    from dualpath_lab.emulated.data_plane import DataPlane

_PREFIX = "dualpath_emulated:"
_VERIFIED = f"{_PREFIX}verified_layer_blocks"
_WRONG = f"{_PREFIX}wrong_layer_blocks"
_THREADS = f"{_PREFIX}thread_cpu_seconds"
_NS_PER_S = 1_000_000_000
#: Name for threads not started by Python: those of NIXL, UCX and numpy.
NATIVE = "native"


class EngineMetrics(Collector):
    """Reads one engine's counts at every scrape; it has no state of its own."""

    def __init__(self, plane: "DataPlane") -> None:
        self._plane = plane
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        counts = self._plane.verifier.counts()
        verified = {place.value: compared for place, (compared, _) in counts.items()}
        wrong = {place.value: bad for place, (_, bad) in counts.items()}
        totals = self._plane.manager.counters.snapshot()
        help_text = "Layer Blocks compared with their expected content."
        yield _family(_VERIFIED, help_text, "place", verified)
        yield _family(_WRONG, "Compared Layer Blocks that were wrong.", "place", wrong)
        yield _family(
            f"{_PREFIX}counter", "Totals that the engine reports to its router.", "name", totals
        )
        yield _family(_THREADS, "CPU time of the engine's threads.", "thread", thread_cpu_s())


class EngineCounts(NamedTuple):
    """Layer Blocks verified and found wrong, by place, and CPU seconds, by thread."""

    verified: dict[str, int]
    wrong: dict[str, int]
    thread_cpu_s: dict[str, float]


def engine_counts(exposition: str) -> EngineCounts:
    """Return the counts in an engine's metrics."""
    families = {family.name: family for family in text_string_to_metric_families(exposition)}

    def counts(name: str, label: str) -> dict[str, float]:
        samples = families[name].samples if name in families else []
        return {sample.labels[label]: sample.value for sample in samples}

    verified, wrong = (
        {place: int(count) for place, count in counts(name, "place").items()}
        for name in (_VERIFIED, _WRONG)
    )
    return EngineCounts(verified, wrong, counts(_THREADS, "thread"))


def thread_cpu_s() -> dict[str, float]:
    """Return CPU seconds of the running threads by name (Linux); threads of a pool are summed.

    The time of threads that have ended is not included.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = re.sub(r"[_-]\d+$", "", names.get(int(task.name), NATIVE))
        try:
            on_cpu_ns = int((task / "schedstat").read_text(encoding="ascii").split()[0])
        except (FileNotFoundError, ProcessLookupError):  # The thread has just ended.
            continue
        found[name] = found.get(name, 0.0) + on_cpu_ns / _NS_PER_S
    return found


def _family(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
