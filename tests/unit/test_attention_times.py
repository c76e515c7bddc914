"""The error of predicted attention times: counted by an engine, shown by the router."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dashboard_cluster import ReportedCluster
from tests.unit.scraped_cluster import Scrape

from dualpath.core.cluster import Role
from dualpath.engine.passes.attention_times import (
    ERROR_BOUNDS,
    MEASURED_S,
    PREDICTED_S,
    AttentionErrors,
    AttentionTimes,
)
from dualpath.engine.trace import TraceRecorder
from dualpath.router.observe.engine_metrics import EngineCollector, text_format
from dualpath.router.observe.status import _attention

NO_TRACE = TraceRecorder(None, "pe-0")


def counted(*passes: tuple[float, float]) -> AttentionTimes:
    times = AttentionTimes(NO_TRACE)
    for predicted_s, measured_s in passes:
        times.passed(predicted_s, measured_s, 0, 1)
    return times


def test_errors_are_relative_to_what_was_measured() -> None:
    totals = counted((0.3, 0.2), (0.1, 0.2), (0.2, 0.2)).totals()
    assert totals[PREDICTED_S] == pytest.approx(0.6)
    assert totals[MEASURED_S] == pytest.approx(0.6)
    errors = AttentionErrors(totals)
    assert errors.passes == 3
    assert errors.mean == pytest.approx(1 / 3)


def test_a_quantile_is_found_within_its_bucket() -> None:
    # 90 passes with an error of 4 %, 10 with one of 40 %.
    errors = AttentionErrors(counted(*[(1.04, 1.0)] * 90, *[(0.6, 1.0)] * 10).totals())
    assert errors.mean == pytest.approx((90 * 0.04 + 10 * 0.4) / 100)
    assert errors.quantile(0.5) == pytest.approx(0.02 + 0.03 * 50 / 90)
    assert errors.quantile(0.95) == pytest.approx(0.3 + 0.2 * 5 / 10)
    assert AttentionErrors(counted((9.0, 1.0)).totals()).quantile(0.95) == ERROR_BOUNDS[-2]


def test_an_engine_without_measured_passes_reports_nothing() -> None:
    none = counted((0.1, 0.0))
    assert none.totals() == {}
    errors = AttentionErrors(none.totals())
    assert (errors.passes, errors.mean, errors.quantile(0.95)) == (0, None, None)


def test_a_trace_has_both_times_of_each_pass(tmp_path: Path) -> None:
    trace = TraceRecorder(str(tmp_path / "trace.json"), "pe-0")
    AttentionTimes(trace).passed(0.25, 0.2, 1_000_000, 4_000_000)
    trace.write()
    (event,) = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (event["tid"], event["ts"], event["dur"]) == ("attention", 1000.0, 3000.0)
    assert event["args"] == {"predicted_s": 0.25, "measured_s": 0.2}


def test_the_router_shows_the_errors_of_engines_that_have_measured_passes() -> None:
    cluster = ReportedCluster()
    cluster.join("pe-0", Role.PREFILL)
    cluster.join("de-0", Role.DECODE)
    totals: dict[str, Any] = {**counted((1.04, 1.0), (0.6, 1.0), (9.0, 1.0)).totals()}
    cluster.report("pe-0", **totals)
    cluster.report("de-0")
    families = EngineCollector(cluster.registry, lambda: cluster.now_s).collect()
    shown = Scrape(text_format(families).decode())
    name = "dualpath:attention_error_ratio"
    assert shown.families[name].type == "histogram"
    assert shown.labels(f"{name}_count")["engine"] == {"pe-0"}
    assert shown.value(f"{name}_count", engine="pe-0") == 3
    assert shown.value(f"{name}_sum", engine="pe-0") == pytest.approx(0.04 + 0.4 + 8.0)
    buckets = {"0.02": 0, "0.05": 1, "0.5": 2, "2.0": 2, "+Inf": 3}
    for bound, passes in buckets.items():
        assert shown.value(f"{name}_bucket", engine="pe-0", le=bound) == passes
    assert shown.value("dualpath:attention_measured_seconds_total") == pytest.approx(3.0)
    prefill, decode = (cluster.registry.get(engine) for engine in ("pe-0", "de-0"))
    assert prefill is not None
    assert decode is not None
    status = _attention(prefill)
    assert status is not None
    assert (status["passes"], status["error_p95"]) == (3, 2.0)
    assert _attention(decode) is None
