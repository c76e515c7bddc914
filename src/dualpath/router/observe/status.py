"""The JSON answer of ``GET /dualpath/v1/status``."""

from collections.abc import Iterable
from typing import Any

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.engine.counters import Counter
from dualpath.engine.passes.attention_times import MEASURED_S, PREDICTED_S, AttentionErrors
from dualpath.policy.events import Assignment
from dualpath.router.observe.engine_metrics import bytes_by_path
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.scheduler.control_server import LivenessProbes
from dualpath.router.scheduler.dispatch import Placement
from dualpath.router.scheduler.registry import EngineState, Registry
from dualpath.router.scheduler.releases import Releases
from dualpath.router.scheduler.thresholds import ClusterThresholds

ORACLE_NOTE = "no KV bytes moved; text is meaningless, only lengths are right"


def status_report(
    registry: Registry,
    metrics: RouterMetrics,
    *,
    waiting: int,
    running: int,
    thresholds: ClusterThresholds,
    placements: Iterable[Placement],
    roles: dict[str, Any],
    weights: dict[str, Any],
    quarantine: dict[str, Any],
) -> dict[str, Any]:
    """Return everything an operator or the replay client may want to know, JSON-safe.

    Model fields are None until the first engine has registered.
    """
    namespace = registry.namespace
    engines = registry.all()
    return {
        "mode": registry.mode.value if registry.mode else None,
        "mode_note": ORACLE_NOTE if registry.mode is Mode.ORACLE else None,
        "model": model_name(registry),
        "vocab_size": registry.limit("vocab_size"),
        "max_model_len": registry.limit("max_model_len"),
        "block_tokens": namespace.geometry.block_tokens if namespace else None,
        "snic_bytes_per_s": min(
            (e.info.snic_bytes_per_s for e in engines if e.info.snic_bytes_per_s), default=None
        ),
        "alpha": msgspec.to_builtins(thresholds.alpha),
        "beta": msgspec.to_builtins(thresholds.beta),
        "counters": _counters(registry, metrics),
        "engines": [_engine(engine, registry.waiting(engine)) for engine in engines],
        "roles": roles,
        "weights": weights,
        "quarantine": quarantine,
        "waiting": waiting,
        "running": running,
        "assignments": assignments(registry, placements),
    }


def assignments(registry: Registry, placements: Iterable[Placement]) -> list[dict[str, Any]]:
    """Return assignments with their reasons, JSON-safe; reads in tokens instead of blocks."""
    block_tokens = registry.namespace.geometry.block_tokens if registry.namespace else 0
    return [
        _assignment(placement.request, placement.assignment, block_tokens)
        for placement in placements
        if placement.assignment is not None
    ]


def _assignment(request: Request, assignment: Assignment, block_tokens: int) -> dict[str, Any]:
    hit_tokens = request.hit_tokens + assignment.unstored_tokens
    return {
        "request_id": request.request_id,
        "prompt_tokens": request.prompt_tokens,
        "hit_tokens": hit_tokens,
        "prefill_engine": assignment.prefill_engine,
        "decode_engine": assignment.decode_engine,
        "reads": [
            {
                "side": Role.DECODE.value if run.third else run.side.value,
                "first_token": run.blocks.first * block_tokens,
                "tokens": run.tokens(block_tokens, hit_tokens),
                **({"third_engine": run.third} if run.third else {}),
            }
            for run in assignment.reads
        ],
        "pe_reason": assignment.pe_reason,
        "de_reason": assignment.de_reason,
        "read_reason": assignment.read_reason,
        "handover": assignment.handover.value,
        "handover_reason": assignment.handover_reason,
    }


#: Quarantines that ``status`` describes; the others are only counted.
_DESCRIBED = 16


def quarantine_report(releases: Releases, probes: LivenessProbes, now_s: float) -> dict[str, Any]:
    """Return the slots that processes of unknown state may still write to, the oldest first.

    ``ends`` states what will end the quarantine, for each of the processes.
    """
    found = sorted(releases.quarantines(), key=lambda each: each.since_s)
    return {
        "attempts": len(found),
        "oldest_s": round(now_s - found[0].since_s, 3) if found else 0.0,
        "oldest": [
            {
                "request_id": each.attempt_id,
                "engine": each.holder,
                "for_s": round(now_s - each.since_s, 3),
                "ends": [probes.outlook(writer) for writer in each.writers],
            }
            for each in found[:_DESCRIBED]
        ],
    }


def model_name(registry: Registry) -> str | None:
    """Return the name that clients ask for, or else what engines call their model."""
    name = _first_limit(registry.all(), "served_model_name")
    if isinstance(name, str) and name:
        return name
    return registry.namespace.model if registry.namespace else None


def _counters(registry: Registry, metrics: RouterMetrics) -> dict[str, Any]:
    return {
        "hit_tokens": metrics.hit_tokens,
        "recomputed_tokens": metrics.recomputed_tokens,
        "prompt_tokens": metrics.prompt_tokens,
        "retries": metrics.retries,
        "bytes": bytes_by_path(registry),
        "snic_read_bytes": _per_engine(registry, Counter.STORAGE_READ_BYTES),
        "snic_write_bytes": _per_engine(registry, Counter.STORAGE_WRITE_BYTES),
        "dram_hit_bytes": _per_engine(registry, Counter.DRAM_HIT_BYTES),
    }


def _per_engine(registry: Registry, counter: Counter) -> dict[str, int]:
    return {e.info.engine_id: int(e.totals().get(counter, 0)) for e in registry.all()}


def _engine(engine: EngineState, waits_for: str | None) -> dict[str, Any]:
    info, report = engine.info, engine.report
    return {
        "engine_id": info.engine_id,
        "role": info.role.value,
        "node": info.node,
        "group": info.group,
        "dp": msgspec.to_builtins(info.dp),
        "waits_for": waits_for,
        "epoch": info.epoch,
        "api_url": info.api_url,
        "alive": engine.alive,
        "paused": sorted(engine.pauses),
        "rates": msgspec.to_builtins(info.rates),
        "attention": _attention(engine),
        "seq": report.load.unfinished_requests if report else 0,
        "tok": report.load.unfinished_tokens if report else 0,
        "read_queue_tokens": report.load.read_queue_tokens if report else 0,
        "free_hbm_tokens": report.load.free_hbm_tokens if report else info.hbm_tokens,
        "free_buffer_tokens": report.load.free_buffer_tokens if report else info.buffer_tokens,
        "quarantined_buffer_tokens": report.load.quarantined_buffer_tokens if report else 0,
        "quarantined_hbm_tokens": report.load.quarantined_hbm_tokens if report else 0,
        "cached_buffer_tokens": report.load.cached_buffer_tokens if report else 0,
    }


def _attention(engine: EngineState) -> dict[str, float | None] | None:
    """Return how well the compute quota predicts an engine's passes, None if none was measured."""
    totals = engine.totals()
    errors = AttentionErrors(totals)
    if not errors.passes:
        return None
    return {
        "passes": errors.passes,
        "predicted_s": totals[PREDICTED_S],
        "measured_s": totals[MEASURED_S],
        "error_mean": errors.mean,
        "error_p95": errors.quantile(0.95),
    }


def _first_limit(engines: Iterable[EngineState], name: str) -> object:
    return next((e.info.limits[name] for e in engines if e.info.limits.get(name)), None)
