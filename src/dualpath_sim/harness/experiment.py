"""What an experiment consists of, its raw data, and the page that is drawn from them."""

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from dualpath.core.settings import Settings
from dualpath.node.machine import ClientMachine
from dualpath.report.model import Block, Notes, Panel, Plots, Report, Table, Text, cell

S = TypeVar("S", bound=Settings)
P = TypeVar("P")
R = TypeVar("R")


# -------------------------------------------------------------------------------------- raw data


class Run(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """One run of a cell in a round; ``rejected`` attempts before it met a too busy machine."""

    cell: str
    round: int
    result: R
    rejected: int = 0


class RawData(msgspec.Struct, Generic[S, R], frozen=True, kw_only=True):
    """All that a page is drawn from.

    ``settings`` contain the seed.  ``versions`` are those of the measured packages, ``date`` is the
    UTC date of the last run, ``load_average`` that of the machine (15 minutes) before the first
    one.  Data that was published in an older format has no machine.
    """

    experiment: str
    settings: S
    runs: list[Run[R]]
    machine: ClientMachine | None = None
    versions: dict[str, str] = {}
    date: str = ""
    load_average: float = 0.0

    @property
    def cells(self) -> list[str]:
        """The cells that have runs, in the order of their first runs."""
        return list(dict.fromkeys(run.cell for run in self.runs))

    @property
    def results(self) -> list[R]:
        """The results of all runs."""
        return [run.result for run in self.runs]

    @property
    def rejected(self) -> int:
        """Number of attempts that were repeated because the machine was too busy."""
        return sum(run.rejected for run in self.runs)

    def of(self, cell: str) -> list[R]:
        """Return the results of a cell in the order of its runs; empty without runs."""
        return [run.result for run in self.runs if run.cell == cell]

    def median(self, cell: str, of: Callable[[R], float]) -> float | None:
        """Return the median of a number over a cell's runs, None without runs."""
        found = [of(result) for result in self.of(cell)]
        return statistics.median(found) if found else None

    def paired(self, cell: str, base: str) -> list[tuple[R, R]]:
        """Return the results of two cells that were measured in the same round."""
        bases = {run.round: run.result for run in self.runs if run.cell == base}
        return [
            (run.result, bases[run.round])
            for run in self.runs
            if run.cell == cell and run.round in bases
        ]

    def ratio(self, cell: str, base: str, of: Callable[[R], float]) -> float | None:
        """Return the median, over rounds, of one cell's number relative to another cell's.

        The runs of a round follow each other, so that changes of the machine affect both.
        """
        found = [of(result) / of(other) for result, other in self.paired(cell, base) if of(other)]
        return statistics.median(found) if found else None


# ------------------------------------------------------------------------------------------ page


class KeyResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A number that stands for an experiment; ``measured`` is None where no run gave it.

    With a ``limit`` it is a target: it must be at least, or at most, the limit.  With a
    ``tolerance``, a relative difference, a rerun must give the same: a rerun on any machine, or on
    the same processor only.
    """

    what: str
    measured: float | None
    limit: float | None = None
    at_least: bool = True
    note: str = ""
    tolerance: float | None = None
    any_machine: bool = False

    @property
    def met(self) -> bool:
        """Whether the limit is met; True without one."""
        if self.limit is None:
            return True
        if self.measured is None:
            return False
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment as a page, and the content of its JSON file.

    ``draw`` of an experiment leaves ``name`` (of the files), ``title``, ``command`` (which repeats
    the experiment) and ``data`` to ``page_of``.  ``settings`` are lines of text.
    """

    html: ClassVar[bool] = False
    """Whether the page is also written as HTML."""
    name: str = ""
    title: str = ""
    command: str = ""
    settings: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    panels: tuple[Panel, ...] = ()
    results: tuple[KeyResult, ...] = msgspec.field(name="targets", default=())
    discussion: str = ""
    data: Any = None
    too_busy: bool = False
    """Whether the machine was too busy: the numbers must be rejected."""

    def content(self) -> object:
        """Return what the JSON file holds."""
        return self

    def report(self) -> Report:
        """Return the page as a report: command, settings, targets, tables, plots."""
        blocks: list[Block] = [Text(f"Measured by `{self.command}`."), Notes(self.settings)]
        targets = tuple(result for result in self.results if result.limit is not None)
        if targets:
            blocks.append(target_table(targets))
        blocks += self.tables
        if self.panels:
            blocks.append(Plots(self.title, self.panels))
        if self.discussion:
            blocks.append(Text(self.discussion, "Discussion"))
        return Report(name=self.name, title=self.title, blocks=tuple(blocks))


def target_table(targets: Sequence[KeyResult]) -> Table:
    """Return what was aimed at, beside what was reached."""
    rows = tuple(
        (
            target.what,
            cell(target.measured, "{:.3g}"),
            f"{'≥' if target.at_least else '≤'} {target.limit:.3g}",
            "yes" if target.met else "no",
            target.note,
        )
        for target in targets
    )
    return Table("Targets", ("what", "measured", "target", "met", "note"), rows)


# ------------------------------------------------------------------------------------ experiment

Measure = Callable[[P, int], R]
"""Makes the run of a cell, given by its parameters, in a round."""


class Stage(msgspec.Struct, Generic[P, R], frozen=True):
    """Cells that share a set-up, such as a lab with stored histories or a set of servers.

    ``cells`` are their parameters by name; ``open`` makes the set-up and yields the function that
    makes a run.  With ``next_cell`` every run decides about the next one: it returns a cell, given
    all runs so far, or None at the end.
    """

    cells: Mapping[str, P]
    open: Callable[[], AbstractContextManager[Measure[P, R]]]
    next_cell: Callable[[Sequence[Run[R]]], tuple[str, P] | None] | None = None


Progress = Callable[[str], None]


class Experiment(msgspec.Struct, Generic[S, R], frozen=True, kw_only=True):
    """An experiment; its flags are those of ``settings``, its default settings, except ``fixed``.

    ``draw`` needs nothing but the raw data, and gives the title if ``title`` is empty.
    ``summary`` describes a run for progress messages.
    ``too_busy`` tells whether the machine spoilt a run, which is then repeated.  ``keep_going``: a
    failed run is reported and left out; otherwise it ends the experiment.  ``passed`` is the
    verdict of an experiment that tests the system.  ``subcommand`` is its word in a command line,
    if that is not the name.  ``published`` returns the raw data of a page that was published in an
    older format, given the settings of its command.
    """

    name: str
    title: str
    settings: S
    result: Any
    stages: Callable[[S, Progress], Iterable[Stage[Any, R]]]
    draw: Callable[[RawData[S, R]], Page]
    repeat: Callable[[S], int] = lambda settings: getattr(settings, "repeat", 1)
    summary: Callable[[R], str] = lambda result: ""
    too_busy: Callable[[S, R], bool] = lambda settings, result: False
    keep_going: bool = False
    passed: Callable[[RawData[S, R]], bool] = lambda raw: True
    subcommand: str = ""
    fixed: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("dualpath",)
    published: Callable[[Page, S], RawData[S, R]] | None = None

    def recorded(self, data: Any) -> RawData[S, R] | None:  # noqa: ANN401 - decoded JSON
        """Return the raw data of a file, None for data in an older format.

        Raises ``msgspec.ValidationError`` for the data of another experiment.
        """
        if not isinstance(data, Mapping) or "experiment" not in data:
            return None
        if data["experiment"] != self.name:
            raise msgspec.ValidationError(f"it is of the experiment {data['experiment']}")
        kind: Any = RawData[type(self.settings), self.result]  # type: ignore[misc]
        found: RawData[S, R] = msgspec.convert(data, kind)
        return found

    def page(self, raw: RawData[S, R], name: str, command: str) -> Page:
        """Return the page of raw data; ``name`` is that of its files, ``command`` repeats it."""
        drawn = self.draw(raw)
        lines = (*drawn.settings, *machine_lines(raw), *check_lines(drawn.results))
        return msgspec.structs.replace(
            drawn,
            name=name,
            title=self.title or drawn.title,
            command=command,
            settings=lines,
            data=raw,
        )


@contextlib.contextmanager
def nothing_to_set_up(run: Callable[[P, int], R]) -> Iterator[Measure[P, R]]:
    """Open a stage of cells that share nothing."""
    yield run


def one_stage(cells: Mapping[str, P], run: Callable[[P, int], R]) -> list[Stage[P, R]]:
    """Return the stages of an experiment with cells that share nothing."""
    return [Stage(cells, lambda: nothing_to_set_up(run))]


def machine_lines(raw: RawData[Any, Any]) -> tuple[str, ...]:
    """Describe the machine, the versions and the date; empty for data without them."""
    if raw.machine is None:
        return ()
    versions = ", ".join(f"{name} {number}" for name, number in raw.versions.items())
    return (
        f"{raw.machine.cores}, Python {raw.machine.python}, {versions}, {raw.date}; load average "
        f"before the first run {raw.load_average:.1f}.",
    )


def check_lines(results: Iterable[KeyResult]) -> tuple[str, ...]:
    """Describe what `--check` compares; empty if there is nothing."""
    compared = [one for one in results if one.tolerance is not None]
    compared.sort(key=lambda one: (one.any_machine, one.tolerance), reverse=True)
    counts = Counter(map(compared_words, compared))
    if not counts:
        return ()
    parts = [
        f"{count} {'number' if count == 1 else 'numbers'} {words}"
        for words, count in counts.items()
    ]
    return (f"`--check` compares a rerun with {' and '.join(parts)}.",)


def compared_words(result: KeyResult) -> str:
    """Return how a result with a tolerance is compared with that of a rerun."""
    where = "any machine" if result.any_machine else "the same processor"
    return f"{tolerance_text(result.tolerance or 0.0)} on {where}"


def tolerance_of(base: float, runs: int) -> float:
    """Return the tolerance of a median: twice ``base`` if it is of fewer than three runs."""
    return base if runs >= 3 else 2 * base


def tolerance_text(tolerance: float) -> str:
    """Return a tolerance in words."""
    return f"within {tolerance:.0%}" if tolerance else "exactly"
