"""Dashboard, alerts and documentation ask only for what a real scrape contains."""

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.dashboard_cluster import ReportedCluster
from tests.unit.scraped_cluster import Scrape, scrape_after_three_turns

from dualpath.core.cluster import Role

ROOT = Path(__file__).parents[2]
MONITORING = files("dualpath.router.observe") / "monitoring"
MONITOR_PAGE = ROOT / "docs" / "how-to" / "monitor.md"
METRICS_PAGE = ROOT / "docs" / "reference" / "metrics.md"

#: A metric with its matchers, as in ``dualpath:requests_total{outcome="error"}[5m]``.
SELECTOR = re.compile(r"(dualpath:\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left)\s*\(([^)]*)\)")
LEGEND = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def panels() -> list[dict[str, Any]]:
    board = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    return list(board["panels"])


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Every expression that is shipped or documented, with the texts that use its labels."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]
    for rule in alerts():
        yield rule["expr"], rule["annotations"]["summary"]
    for page in (MONITOR_PAGE, METRICS_PAGE):
        for block in re.findall(r"```promql\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            yield from ((line, "") for line in block.splitlines() if line.strip())


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    return asyncio.run(scrape_after_three_turns(tmp_path_factory.mktemp("storage")))


def of_vllm(expr: str) -> bool:
    return "vllm:" in expr


def test_queries_of_vllms_metrics_name_those_of_the_installed_release() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs vLLM")
    loggers = Path(spec.submodule_search_locations[0], "v1", "metrics", "loggers.py").read_text()
    names = [name for expr, _ in queries() for name in re.findall(r"vllm:\w+", expr)]
    assert names
    for name in names:
        assert f'"{name.removesuffix("_total")}"' in loggers, name


@pytest.mark.parametrize(("expr", "text"), [q for q in queries() if not of_vllm(q[0])])
def test_a_query_finds_its_metrics_and_labels(expr: str, text: str, scrape: Scrape) -> None:
    selectors = SELECTOR.findall(expr)
    assert selectors
    known: set[str] = set()
    for metric, matchers in selectors:
        labels = scrape.labels(metric)
        known |= set(labels)
        for label, operator, value in MATCHER.findall(matchers):
            wanted = set(value.split("|")) if operator == "=~" else {value}
            assert wanted <= labels[label], (metric, label)
    grouped = {name.strip() for names in GROUPING.findall(expr) for name in names.split(",")}
    assert grouped - {""} <= known
    assert set(LEGEND.findall(text)) <= known


def test_every_documented_metric_is_scraped_and_every_scraped_one_documented(
    scrape: Scrape,
) -> None:
    reference = METRICS_PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(dualpath:\w+)` \| (\w+) \| ([^|]*)\|", reference, re.MULTILINE)
    assert {(name, kind) for name, kind, _ in rows} == {
        (name, family.type) for name, family in scrape.families.items()
    }
    for name, kind, cells in rows:
        sampled = f"{name}_count" if kind == "histogram" else name
        labels = set(scrape.labels(sampled)) - {"le"}
        assert set(re.findall(r"`(\w+)`", cells)) == labels, name


def test_every_metric_is_ours_and_has_a_help_text(scrape: Scrape) -> None:
    assert all(name.startswith("dualpath:") for name in scrape.families)
    assert all(family.documentation.endswith(".") for family in scrape.families.values())


def test_every_alert_has_a_severity_a_summary_and_a_section_with_the_remedy() -> None:
    sections = re.findall(r"^### `(\w+)`$", MONITOR_PAGE.read_text("utf-8"), re.MULTILINE)
    assert sections == [rule["alert"] for rule in alerts()]
    assert {rule["labels"]["severity"] for rule in alerts()} <= {"critical", "warning", "info"}


def test_panels_have_a_title_a_unit_and_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]


async def test_a_scrape_of_many_engines_leaves_time_for_streams() -> None:
    """Other work of the event loop goes on between the families, also if engines come and go."""
    cluster = ReportedCluster()
    for number in range(8):
        cluster.join(f"e{number}", Role.PREFILL)
        cluster.report(f"e{number}")
    at_once = cluster.metrics.exposition()
    scrape = asyncio.ensure_future(cluster.metrics.scrape())
    turns = 0
    while not scrape.done():
        turns += 1
        if turns == 3:
            cluster.join("e0", Role.PREFILL, epoch="second")  # It has not reported yet.
        await asyncio.sleep(0)
    assert turns > len(Scrape(at_once.decode()).families) / 2
    assert set(Scrape((await scrape).decode()).families) == set(Scrape(at_once.decode()).families)
