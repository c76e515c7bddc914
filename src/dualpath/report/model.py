"""Content of reports, independent of the medium: tables, plots and text in reading order.

Cells are text, with the unit in the column's head: the producer knows how many digits are
significant, and every medium shows the same ones. Writers handle what depends on the medium:
widths, wrapping, escaping, headings, addresses of pictures.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Literal, TypeVar

import msgspec

#: Text of a number that is unknown or not applicable.
NOTHING = "-"
_NUMBER_BEGINS = "0123456789+-≈<≥x"


def cell(value: float | str | None, form: str) -> str:
    """Return a value in a format such as ``{:.2f} s``, ``NOTHING`` for None."""
    return NOTHING if value is None else form.format(value)


class Table(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows of cells; the first column is the name of the row.

    ``align`` has a letter per column, ``l`` or ``r``; without it columns with only numbers are
    right-aligned. ``rules`` are the indices of rows with a line above.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str = ""
    rules: tuple[int, ...] = ()

    @property
    def right(self) -> tuple[bool, ...]:
        """Which columns are right-aligned."""
        if self.align:
            return tuple(letter == "r" for letter in self.align)
        return tuple(
            bool(self.rows) and all(row[index][:1] in _NUMBER_BEGINS for row in self.rows)
            for index in range(len(self.columns))
        )


class Series(msgspec.Struct, frozen=True):
    """One curve, or one colour of bars; ``low`` and ``high`` are the range of each point."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


class Panel(msgspec.Struct, frozen=True):
    """One pair of axes.

    ``steps`` are lines that hold a value until the next one. Bars of ``grouped`` are side by side,
    those of ``stacked`` on top of each other.
    """

    title: str
    kind: Literal["lines", "steps", "grouped", "stacked"]
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    limit_y: float | None = None
    """A horizontal line, such as an SLO."""
    from_zero: bool = True


class Text(msgspec.Struct, frozen=True):
    """Prose in Markdown; ``heading`` may be empty."""

    text: str
    heading: str = ""


class Notes(msgspec.Struct, frozen=True):
    """Single lines of context: settings, seed, machine, conclusion."""

    lines: tuple[str, ...]


class Plots(msgspec.Struct, frozen=True):
    """Panels of one picture."""

    caption: str
    panels: tuple[Panel, ...]


Block = Table | Text | Notes | Plots


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A titled sequence of blocks, followed by ``parts`` with their own titles.

    ``name`` is the base name of its files. ``headline`` is the result in a few lines, shown first.
    ``warnings`` are conditions that invalidate a run or a comparison.
    """

    name: str
    title: str
    blocks: tuple[Block, ...]
    headline: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    parts: tuple["Report", ...] = ()

    def pictures(self) -> Iterator[tuple[str, Plots]]:
        """Yield the file name (without suffix) and plots of each picture."""
        drawn = [block for block in self.blocks if isinstance(block, Plots)]
        for number, plots in enumerate(drawn, start=1):
            yield self.name if number == 1 else f"{self.name}-{number}", plots
        for part in self.parts:
            yield from part.pictures()


_Run = TypeVar("_Run")


class SideBySide(Generic[_Run]):
    """Builds a table of runs: one column per run, one row per quantity, in sections."""

    def __init__(self, columns: Sequence[str], runs: Sequence[_Run]) -> None:
        self._columns = columns
        self._runs = runs
        self._rows: list[tuple[str, ...]] = []
        self._rules: list[int] = []
        self._section = ""

    def add(
        self,
        section: str,
        name: str,
        of: Callable[[_Run], float | str | None],
        form: str = "{}",
    ) -> None:
        """Add a quantity in a format; omitted if ``of`` returns None for every run."""
        values = [of(run) for run in self._runs]
        if all(value is None for value in values):
            return
        if self._rows and section != self._section:
            self._rules.append(len(self._rows))
        self._section = section
        self._rows.append((name, *(cell(value, form) for value in values)))

    def table(self) -> Table:
        """Return the table, with rules between sections."""
        align = "l" + "r" * len(self._columns)
        rows, rules = tuple(self._rows), tuple(self._rules)
        return Table("", ("", *self._columns), rows, align, rules)
