"""What an experiment on a lab becomes: settings, targets, tables, plots, raw numbers, as files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.model.evaluation import markdown
from dualpath.model.evaluation.drawing import png
from dualpath.model.evaluation.report import Panel, Table
from dualpath.model.evaluation.write import rounded

_JSON_DIGITS = 6


class Target(msgspec.Struct, frozen=True):
    """A number the project set out to reach: ``measured`` at least or at most ``limit``."""

    what: str
    measured: float
    limit: float
    at_least: bool
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


class ExperimentReport(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment, complete.

    ``name`` names its files; ``command`` repeats it; ``settings`` are lines of text (cluster, links
    and who shapes them, workload, seed, repetitions, machine and how busy it was); ``data`` holds
    every number behind tables and plots.
    """

    name: str
    title: str
    command: str
    settings: tuple[str, ...]
    tables: tuple[Table, ...]
    panels: tuple[Panel, ...] = ()
    targets: tuple[Target, ...] = ()
    discussion: str = ""
    data: Mapping[str, Any] = {}
    too_busy: bool = False
    """Whether the machine was too busy for the links: the numbers are to be rejected."""


def write_experiment(report: ExperimentReport, folder: Path) -> list[Path]:
    """Write ``<name>.md``, ``.json`` and, where it has plots, ``.png``; return the paths.

    Raises ``ConfigError`` for a folder that cannot be written.
    """
    files = {"json": as_json(report), "md": as_markdown(report).encode()}
    if report.panels:
        files["png"] = png(report.panels)
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for ending, content in sorted(files.items()):
            path = folder / f"{report.name}.{ending}"
            path.write_bytes(content)
            paths.append(path)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error}); give a writable path") from None
    return paths


def as_markdown(report: ExperimentReport) -> str:
    """Return the report as a page."""
    parts = [
        f"# {report.title}",
        f"Measured by `{report.command}`.",
        "\n".join(f"- {line}" for line in report.settings),
    ]
    if report.targets:
        parts.append(markdown.table(target_table(report), 2))
    parts += [markdown.table(one, 2) for one in report.tables]
    if report.panels:
        parts.append(f"![{report.title}]({report.name}.png)")
    if report.discussion:
        parts.append(f"## Discussion\n\n{report.discussion.strip()}")
    return "\n\n".join(parts) + "\n"


def as_text(report: ExperimentReport) -> str:
    """Return settings and tables for a terminal."""
    tables = [target_table(report)] if report.targets else []
    parts = ["\n".join(report.settings)]
    parts += [markdown.table(one) for one in (*tables, *report.tables)]
    return "\n\n".join(parts)


def target_table(report: ExperimentReport) -> Table:
    """Return what was to be reached beside what was."""
    rows = tuple(
        (
            target.what,
            f"{target.measured:.3g}",
            f"{'≥' if target.at_least else '≤'} {target.limit:.3g}",
            "yes" if target.met else "no",
            target.note,
        )
        for target in report.targets
    )
    return Table("Targets", ("what", "measured", "target", "met", "note"), rows)


def as_json(report: ExperimentReport) -> bytes:
    """Return the report as JSON, numbers rounded to what a measurement can mean."""
    content = rounded(msgspec.to_builtins(report), _JSON_DIGITS)
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
