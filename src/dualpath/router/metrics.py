"""Prometheus metrics of the router, in a registry of its own, named as the ecosystem does.

What the router counts itself is kept in counters and histograms; what engines report is read from
the ``Registry`` at every scrape.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualpath.core.cluster import Role
from dualpath.policy.events import Assignment
from dualpath.router.records import RequestRecord
from dualpath.router.registry import EngineState, Registry

_STAGE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

#: Path of Fig. 4 → counters of prefill and of decode engines that carry it.
PATH_COUNTERS: dict[str, tuple[tuple[Role, str], ...]] = {
    "pe_path": ((Role.PREFILL, "storage_read_bytes"),),
    "de_path": ((Role.DECODE, "storage_read_bytes"),),
    "de_to_pe": ((Role.PREFILL, "de_to_pe_bytes"), (Role.DECODE, "de_to_pe_bytes")),
    "pe_to_de": ((Role.PREFILL, "pe_to_de_bytes"), (Role.DECODE, "pe_to_de_bytes")),
    "h2d": ((Role.PREFILL, "h2d_bytes"), (Role.DECODE, "h2d_bytes")),
    "storage_write": (
        (Role.PREFILL, "storage_write_bytes"),
        (Role.DECODE, "storage_write_bytes"),
    ),
}


def bytes_by_path(registry: Registry) -> dict[str, int]:
    """Return bytes moved so far on each path, over all engines and their restarts."""
    totals = [(engine.info.role, engine.totals()) for engine in registry.all()]
    return {
        path: int(
            sum(
                counters.get(name, 0)
                for wanted, name in sources
                for role, counters in totals
                if role is wanted
            )
        )
        for path, sources in PATH_COUNTERS.items()
    }


class RouterMetrics:
    """All metrics of one router; ``exposition`` is the body of ``/metrics``."""

    def __init__(self, registry: Registry, malformed: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.hit_tokens = 0
        self.recomputed_tokens = 0
        self.prompt_tokens = 0
        self.retries = 0
        self._define()
        self.registry.register(_EngineCollector(registry, malformed))

    def _define(self) -> None:
        ours = self.registry
        self._requests = Counter(
            "dualpath:requests", "Finished requests by outcome.", ["outcome"], registry=ours
        )
        self._prompt = Counter("dualpath:prompt_tokens", "Prompt tokens prefilled.", registry=ours)
        self._hit = Counter(
            "dualpath:hit_tokens", "Prompt tokens whose KV-cache was loaded.", registry=ours
        )
        self._recomputed = Counter(
            "dualpath:recomputed_tokens",
            "Stored prompt tokens that were computed again, by reason.",
            ["reason"],
            registry=ours,
        )
        self._lookup_failures = Counter(
            "dualpath:lookup_failures",
            "Look-ups without an answer; the prompt counts as not stored.",
            ["reason"],
            registry=ours,
        )
        self._generated = Counter(
            "dualpath:generation_tokens", "Tokens streamed to clients.", registry=ours
        )
        self._retries = Counter(
            "dualpath:retries", "Attempts at requests repeated after a fault.", registry=ours
        )
        self._assignments = Counter(
            "dualpath:assignments",
            "Scheduler decisions by reason.",
            ["pe_reason", "de_reason", "read_reason"],
            registry=ours,
        )
        self._stages = Histogram(
            "dualpath:stage_seconds",
            "Time of requests in each stage.",
            ["stage"],
            buckets=_STAGE_BUCKETS_S,
            registry=ours,
        )
        self._waiting = Gauge(
            "dualpath:requests_waiting", "Requests without an assignment.", registry=ours
        )
        self._running = Gauge(
            "dualpath:requests_running", "Requests with an assignment.", registry=ours
        )

    def assigned(self, assignment: Assignment) -> None:
        """Count a decision."""
        self._assignments.labels(
            assignment.pe_reason, assignment.de_reason, assignment.read_reason
        ).inc()

    def prefilled(self, prompt_tokens: int, hit_tokens: int) -> None:
        """Count a request's prompt, once per request."""
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        self._prompt.inc(prompt_tokens)
        self._hit.inc(hit_tokens)

    def recomputed(self, tokens: int, reason: str) -> None:
        """Count stored tokens that have to be computed again."""
        self.recomputed_tokens += tokens
        self._recomputed.labels(_short(reason)).inc(tokens)

    def lookup_failed(self, reason: str) -> None:
        """Count a look-up nobody answered."""
        self._lookup_failures.labels(reason).inc()

    def retried(self) -> None:
        """Count a repeated attempt."""
        self.retries += 1
        self._retries.inc()

    def finished(self, record: RequestRecord) -> None:
        """Count a finished request and its stages."""
        self._requests.labels(record.outcome).inc()
        self._generated.inc(record.generated_tokens)
        for stage in record.stages:
            self._stages.labels(stage.stage.value).observe(stage.end_s - stage.start_s)

    def queues(self, waiting: int, running: int) -> None:
        """Set the gauges that only the service knows."""
        self._waiting.set(waiting)
        self._running.set(running)

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


#: (metric, engine counter, HELP)
_ENGINE_COUNTERS = (
    ("snic_read_bytes", "storage_read_bytes", "Bytes read from storage."),
    ("snic_write_bytes", "storage_write_bytes", "Bytes written to storage."),
    ("loaded_blocks", "loaded_blocks", "Blocks loaded into a prefill engine's HBM."),
    ("persisted_blocks", "persisted_blocks", "Full Blocks newly written to storage."),
    ("persist_dropped_blocks", "persist_dropped_blocks", "Blocks not persisted."),
    (
        "verify_failures",
        "verify_failures",
        "Reads that ended at a block that was missing, short or failed its checksum.",
    ),
    ("read_deadlines", "read_deadlines", "Storage reads given up at their deadline."),
    ("transfer_failures", "transfer_failures", "Requests whose KV transfer failed."),
    (
        "stale_hand_overs",
        "stale_hand_overs",
        "Hand-overs refused because their buffer slots had changed hands.",
    ),
)


class _EngineCollector(Collector):
    def __init__(self, registry: Registry, malformed: Callable[[], int]) -> None:
        self._registry = registry
        self._malformed = malformed

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        paths = CounterMetricFamily(
            "dualpath:kv_bytes", "KV bytes moved, by path of Fig. 4.", labels=["path"]
        )
        for path, moved in bytes_by_path(self._registry).items():
            paths.add_metric([path], moved)
        yield paths
        for name, counter, text in _ENGINE_COUNTERS:
            yield self._per_engine(name, counter, text)
        malformed = CounterMetricFamily(
            "dualpath:malformed_control_frames", "Control frames that were not understood."
        )
        malformed.add_metric([], self._malformed())
        yield malformed

    def _per_engine(self, name: str, counter: str, text: str) -> Metric:
        family = CounterMetricFamily(f"dualpath:{name}", text, labels=["engine", "role"])
        for engine in self._registry.all():
            labels = [engine.info.engine_id, engine.info.role.value]
            family.add_metric(labels, engine.totals().get(counter, 0))
        return family

    def _gauges(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("dualpath:engines_up", "Live engines by role.", labels=["role"])
        for role in Role:
            up.add_metric([role.value], len(self._registry.alive(role)))
        yield up
        fields = (
            ("read_queue_tokens", "Tokens waiting to be read from storage."),
            ("free_buffer_tokens", "Free DRAM buffer in tokens."),
            ("free_hbm_tokens", "Free HBM in tokens."),
            ("unfinished_tokens", "Tokens of unfinished requests."),
            ("unfinished_requests", "Unfinished requests."),
        )
        reporting = [e for e in self._registry.all() if e.alive and e.report is not None]
        for field, text in fields:
            yield _gauge(reporting, field, text)


def _gauge(engines: list[EngineState], field: str, text: str) -> Metric:
    family = GaugeMetricFamily(f"dualpath:{field}", text, labels=["engine", "role"])
    for engine in engines:
        labels = [engine.info.engine_id, engine.info.role.value]
        family.add_metric(labels, getattr(engine.report, field))
    return family


def _short(reason: str) -> str:
    """Return a reason's stable head: details after a colon would make endless label values."""
    return reason.split(":", 1)[0]
