"""Draw the pictures of measurements on a lab again, from the numbers that are stored with them.

    python docs/draw_lab.py

Reads ``docs/evaluation/lab/*.json`` and writes the ``.png`` beside each that has plots.  Medians
get the spread of the runs that they are of, where those are stored.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dualpath.laboratory.experiments.node_lines import merged_by_role
from dualpath.laboratory.experiments.report import ExperimentReport, as_report
from dualpath.report.files import drawn
from dualpath.report.model import Panel, Series

LAB = Path(__file__).parent / "evaluation" / "lab"
_OWN_STACKS = "dualpath-"
_NODE = re.compile(r"[pd]e\d+")


def draw(path: Path) -> None:
    """Write the picture of one experiment."""
    stored = msgspec.json.decode(path.read_bytes(), type=ExperimentReport)
    panels = tuple(_with_spread(_legible(p), _jcts_s(stored.data)) for p in stored.panels)
    report = as_report(msgspec.structs.replace(stored, panels=panels))
    for picture in drawn(report).values():
        path.with_suffix(".png").write_bytes(picture)


def _legible(panel: Panel) -> Panel:
    nodes = [series for series in panel.series if _NODE.fullmatch(series.name)]
    if len(nodes) < len(panel.series) or panel.kind != "lines":
        return panel
    return msgspec.structs.replace(panel, series=merged_by_role(nodes))


def _jcts_s(data: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """Return each series' job completion times: for every cluster, those of its runs."""
    jobs: dict[str, list[list[float]]] = defaultdict(list)
    for job in data.get("jobs", ()):
        for mode, runs in job.get("runs", {}).items():
            jobs[mode].append([run["jct_s"] for run in runs])
    stacks: dict[str, list[float]] = defaultdict(list)
    for run in data.get("runs", ()):
        if isinstance(run, dict) and "stack" in run:
            stacks[run["stack"].removeprefix(_OWN_STACKS)].append(run["jct_s"])
    return jobs | {stack: [times] for stack, times in stacks.items()}


def _with_spread(panel: Panel, jcts_s: Mapping[str, list[list[float]]]) -> Panel:
    if panel.title != "Job completion time":
        return panel
    return msgspec.structs.replace(
        panel, series=tuple(_spread(series, jcts_s.get(series.name)) for series in panel.series)
    )


def _spread(series: Series, jcts_s: list[list[float]] | None) -> Series:
    if not jcts_s or len(jcts_s) != len(series.y):
        return series
    low, high = (tuple(map(bound, jcts_s)) for bound in (min, max))
    return msgspec.structs.replace(series, low=low, high=high)


def main() -> None:
    """Draw all of them."""
    for path in sorted(LAB.glob("*.json")):
        # Campaigns of faults are stored in a form of their own and have no pictures.
        if path.with_suffix(".png").exists():
            draw(path)


if __name__ == "__main__":
    main()
