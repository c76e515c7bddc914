"""Metrics of engines: read from their latest reports at every scrape, nothing is stored here."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from dualpath.core.cluster import Role
from dualpath.engine.counters import BYTES_OF, Counter
from dualpath.engine.passes.attention_times import (
    ERROR_BOUNDS,
    MEASURED_S,
    PREDICTED_S,
    AttentionErrors,
)
from dualpath.plan import movements
from dualpath.plan.traffic_class import TrafficClass
from dualpath.router.scheduler.registry import EngineState, Registry

#: Path as in ``GET /dualpath/v1/status`` → counters of prefill and of decode engines.
PATH_COUNTERS: dict[str, tuple[tuple[Role, Counter], ...]] = {
    "pe_path": ((Role.PREFILL, Counter.STORAGE_READ_BYTES),),
    "de_path": ((Role.DECODE, Counter.STORAGE_READ_BYTES),),
    "de_to_pe": ((Role.PREFILL, Counter.DE_TO_PE_BYTES), (Role.DECODE, Counter.DE_TO_PE_BYTES)),
    "pe_to_de": ((Role.PREFILL, Counter.PE_TO_DE_BYTES), (Role.DECODE, Counter.PE_TO_DE_BYTES)),
    "de_to_de": ((Role.DECODE, Counter.DE_TO_DE_BYTES),),
    "h2d": ((Role.PREFILL, Counter.H2D_BYTES), (Role.DECODE, Counter.H2D_BYTES)),
    "storage_write": (
        (Role.PREFILL, Counter.STORAGE_WRITE_BYTES),
        (Role.DECODE, Counter.STORAGE_WRITE_BYTES),
    ),
}


class KvBytes(msgspec.Struct, frozen=True):
    """A row of ``dualpath:kv_bytes``: which counter of which engines has its bytes, its labels.

    All but the counter follow from the plan's movement.  A transfer between engines is counted
    once, at the engine that starts it.
    """

    step: str
    path: str
    link: str
    traffic_class: TrafficClass
    role: Role
    counter: Counter


#: What is generated is written with the prompt's blocks: one counter, one row.
MOVEMENTS = tuple(
    KvBytes(
        step=movement.label,
        path=movement.read_path,
        link=movement.network,
        traffic_class=movement.traffic_class,
        role=movement.engine,
        counter=BYTES_OF[movement.label][-1],
    )
    for movement in movements.MOVEMENTS
    if movement is not movements.PERSIST_GENERATED
)

_REPORTED = (
    ("read_queue_tokens", "Tokens waiting to be read from storage."),
    ("free_buffer_tokens", "Free DRAM buffer in tokens."),
    ("cached_buffer_tokens", "Free slots of the DRAM buffer with cached KV, in tokens."),
    (
        "quarantined_buffer_tokens",
        "DRAM buffer in tokens that processes of unknown state may still write to.",
    ),
    ("free_hbm_tokens", "Free HBM in tokens."),
    (
        "quarantined_hbm_tokens",
        "HBM in tokens, reserved for prompts, that processes of unknown state may still write to.",
    ),
    ("unfinished_tokens", "Tokens of unfinished requests."),
    ("unfinished_requests", "Unfinished requests."),
)

_ENGINE_LABELS = ("engine", "role", "node")


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


class EngineCollector:
    """Turns the registry into metrics; ``clock`` is the one by which the registry notes times."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield all families, also those without a sample yet; engines may change in between."""
        engines = self._registry.all()
        yield from self._liveness(engines)

        def reporting() -> list[EngineState]:
            # Once for each family: engines come and go while a consumer waits between two of them.
            return [engine for engine in engines if engine.alive and engine.report is not None]

        for field, text in _REPORTED:
            yield _gauge(reporting(), field, text, functools.partial(_reported, field))
        yield from _usage(reporting)
        yield from _storage(reporting)
        totals = [(engine, engine.totals()) for engine in engines]
        yield _kv_bytes(totals)
        yield from _attention(totals)
        for counter in Counter:
            if not counter.help:
                continue
            name = f"dualpath:{counter.metric}"
            family = CounterMetricFamily(name, counter.help, labels=_ENGINE_LABELS)
            for engine, counted in totals:
                if counter in counted:
                    family.add_metric(_labels(engine), counted[counter])
            yield family

    def _liveness(self, engines: Sequence[EngineState]) -> Iterator[Metric]:
        up = GaugeMetricFamily("dualpath:engines_up", "Live engines by role.", labels=["role"])
        for role in Role:
            up.add_metric([role.value], len(self._registry.alive(role)))
        yield up
        # An engine that deregistered is not missed.
        expected = [engine for engine in engines if not engine.left]
        yield _gauge(
            expected,
            "engine_up",
            "1 while an engine lives, 0 once it is lost; none after it left on purpose.",
            lambda e: float(e.alive),
        )
        waits = GaugeMetricFamily(
            "dualpath:engine_waits_for_group",
            "1 while a rank of a data-parallel group waits for the other ranks, else 0.",
            labels=[*_ENGINE_LABELS, "group"],
        )
        for engine in engines:
            group = engine.info.dp.group if engine.info.dp is not None else ""
            waiting = float(self._registry.waiting(engine) is not None)
            waits.add_metric([*_labels(engine), group], waiting)
        yield waits
        now_s = self._clock()
        yield _gauge(
            expected,
            "engine_silence_seconds",
            "Time since an engine's last message; heartbeats come every 0.5 s, with more than 500 "
            "engines less often.",
            lambda e: max(now_s - e.heard_s, 0.0),
        )


def text_format(families: Iterable[Metric]) -> bytes:
    """Return counters, gauges and histograms in the Prometheus text format.

    As ``prometheus_client`` writes it, but in a fraction of the time: a scrape of many engines
    stops the router's event loop from streaming tokens.
    """
    lines = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
        for sample in family.samples:
            labels = ",".join([f'{key}="{_escaped(v)}"' for key, v in sample.labels.items()])
            lines.append(f"{sample.name}{{{labels}}} {float(sample.value)!r}\n")
    return "".join(lines).encode()


def _escaped(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _attention(totals: Sequence[tuple[EngineState, dict[str, float]]]) -> Iterator[Metric]:
    """Yield predicted and measured attention times of engines that have measured a pass."""
    for name, text in (
        (PREDICTED_S, "Predicted attention time of forward passes that were measured."),
        (MEASURED_S, "Measured attention time of forward passes."),
    ):
        family = CounterMetricFamily(f"dualpath:{name}", text, labels=_ENGINE_LABELS)
        for engine, counted in totals:
            if name in counted:
                family.add_metric(_labels(engine), counted[name])
        yield family
    errors = HistogramMetricFamily(
        "dualpath:attention_error_ratio",
        "Relative error of the predicted attention time of forward passes.",
        labels=_ENGINE_LABELS,
    )
    for engine, counted in totals:
        found = AttentionErrors(counted)
        if found.passes:
            below = itertools.accumulate(found.counts)
            bounds = ["+Inf" if math.isinf(bound) else str(bound) for bound in ERROR_BOUNDS]
            errors.add_metric(_labels(engine), list(zip(bounds, below, strict=True)), found.sum)
    yield errors


def _usage(reporting: Callable[[], list[EngineState]]) -> Iterator[Metric]:
    yield _gauge(
        reporting(),
        "buffer_usage_ratio",
        "Share of the DRAM buffer in use, 0 to 1.",
        lambda e: _used(e.info.buffer_tokens, e.report.load.free_buffer_tokens if e.report else 0),
    )
    yield _gauge(
        reporting(),
        "hbm_usage_ratio",
        "Share of the KV memory in HBM in use, 0 to 1.",
        lambda e: _used(e.info.hbm_tokens, e.report.load.free_hbm_tokens if e.report else 0),
    )
    yield _gauge(
        [engine for engine in reporting() if engine.info.snic_bytes_per_s],
        "snic_bytes_per_second",
        "Storage bandwidth an engine may use, where it is known.",
        lambda e: e.info.snic_bytes_per_s or 0.0,
    )


def _storage(reporting: Callable[[], list[EngineState]]) -> Iterator[Metric]:
    """Yield the storage janitor's last status that each engine has received."""
    for name, text, field in (
        ("storage_used_bytes", "Bytes in storage, as its janitor counts them.", "used_bytes"),
        ("storage_quota_bytes", "Limit of the bytes in storage, 0 for no limit.", "quota_bytes"),
        ("storage_status_age_seconds", "Time since the last status of a storage janitor.", "age_s"),
    ):
        informed = [e for e in reporting() if e.report is not None and e.report.storage is not None]
        yield _gauge(informed, name, text, functools.partial(_storage_status_value, field))


def _storage_status_value(field: str, engine: EngineState) -> float:
    assert engine.report is not None
    return float(getattr(engine.report.storage, field))


def _kv_bytes(totals: Sequence[tuple[EngineState, dict[str, float]]]) -> Metric:
    family = CounterMetricFamily(
        "dualpath:kv_bytes",
        "KV bytes moved, by step of Fig. 4, the read path that causes it, link and traffic class.",
        labels=[*_ENGINE_LABELS, "step", "path", "link", "traffic_class"],
    )
    for engine, counted in totals:
        for row in MOVEMENTS:
            if row.role is engine.info.role:
                labels = [*_labels(engine), row.step, row.path, row.link, row.traffic_class.value]
                family.add_metric(labels, counted.get(row.counter, 0))
    return family


def _gauge(
    engines: Sequence[EngineState], name: str, text: str, value: Callable[[EngineState], float]
) -> Metric:
    family = GaugeMetricFamily(f"dualpath:{name}", text, labels=_ENGINE_LABELS)
    for engine in engines:
        family.add_metric(_labels(engine), value(engine))
    return family


def _labels(engine: EngineState) -> list[str]:
    return [engine.info.engine_id, engine.info.role.value, engine.info.node]


def _reported(field: str, engine: EngineState) -> float:
    assert engine.report is not None, "only engines that have reported are scraped"
    value: float = getattr(engine.report.load, field)
    return value


def _used(capacity: int, free: int) -> float:
    return min(max(1 - free / capacity, 0.0), 1.0) if capacity else 0.0
