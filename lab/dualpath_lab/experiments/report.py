"""Report of an experiment on a lab: settings, targets, tables, plots and raw numbers, as files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dualpath.report.files import as_json, write_report
from dualpath.report.model import Block, Notes, Panel, Plots, Report, Table, Text

_JSON_DIGITS = 6


class Target(msgspec.Struct, frozen=True):
    """A target of the project: ``measured`` must be at least, or at most, ``limit``."""

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

    ``name`` is that of its files; ``command`` repeats it; ``settings`` are lines of text (cluster,
    links and their shaping, workload, seed, repetitions, machine and its load); ``data`` has all
    numbers behind tables and plots.
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
    """Whether the machine was too busy for the links: the numbers must be rejected."""


def as_report(experiment: ExperimentReport) -> Report:
    """Return the experiment as a page: command, settings, targets, tables, plots."""
    blocks: list[Block] = [
        Text(f"Measured by `{experiment.command}`."),
        Notes(experiment.settings),
    ]
    if experiment.targets:
        blocks.append(_target_table(experiment.targets))
    blocks += experiment.tables
    if experiment.panels:
        blocks.append(Plots(experiment.title, experiment.panels))
    if experiment.discussion:
        blocks.append(Text(experiment.discussion, "Discussion"))
    return Report(name=experiment.name, title=experiment.title, blocks=tuple(blocks))


def write_experiment(experiment: ExperimentReport, folder: Path) -> list[Path]:
    """Write ``<name>.md``, ``.json`` and, where it has plots, ``.png``; return the paths.

    Numbers are rounded to significant digits. Raises ``ConfigError`` for a folder that cannot be
    written.
    """
    return write_report(as_report(experiment), as_json(experiment, _JSON_DIGITS), folder)


def _target_table(targets: Sequence[Target]) -> Table:
    """Return the table of measured values and targets."""
    rows = tuple(
        (
            target.what,
            f"{target.measured:.3g}",
            f"{'≥' if target.at_least else '≤'} {target.limit:.3g}",
            "yes" if target.met else "no",
            target.note,
        )
        for target in targets
    )
    return Table("Targets", ("what", "measured", "target", "met", "note"), rows)
