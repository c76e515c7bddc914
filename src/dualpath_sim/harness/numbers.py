"""Experiments with runs that give numbers by name: their tables and key results."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dualpath.report.model import NOTHING, Table, cell
from dualpath_sim.harness.experiment import KeyResult, Page, RawData, tolerance_of

Numbers = dict[str, float]
"""The result of a run; names end with the unit."""


class Column(NamedTuple):
    """A column: its head, the number of the runs, the format, and how rounds are summarized.

    With a ``tolerance`` its cells are key results, on ``any_machine`` or on the same processor.
    """

    head: str
    number: str
    form: str = "{:.2f}"
    of: Callable[[Sequence[float]], float] = statistics.median
    tolerance: float | None = None
    any_machine: bool = False


def numbers_page(
    title: str,
    columns: Sequence[Column],
    first: str = "",
    settings: Callable[[Any], tuple[str, ...]] = lambda settings: (),
) -> Callable[[RawData[Any, Numbers]], Page]:
    """Return the function that draws a page with one table: a row per cell, medians over rounds.

    ``first`` heads the names of the cells; ``settings`` returns lines about the settings.
    """

    def draw(raw: RawData[Any, Numbers]) -> Page:
        return Page(
            settings=settings(raw.settings),
            tables=(number_table(raw, title, columns, first),),
            results=tuple(key_results(raw, columns)),
        )

    return draw


def number_table(
    raw: RawData[Any, Numbers], title: str, columns: Sequence[Column], first: str = ""
) -> Table:
    """Return a row per cell that has one of the numbers."""
    rows = [
        (name, *(cell(summary(raw, name, column), column.form) for column in columns))
        for name in raw.cells
    ]
    rows = [row for row in rows if set(row[1:]) != {NOTHING}]
    heads = (first, *(column.head for column in columns))
    return Table(title, heads, tuple(rows), align="l" + "r" * len(columns))


def summary(raw: RawData[Any, Numbers], name: str, column: Column) -> float | None:
    """Return a column's number of a cell over its rounds, None if its runs do not have it."""
    found = [numbers[column.number] for numbers in raw.of(name) if column.number in numbers]
    return column.of(found) if found else None


def key_results(raw: RawData[Any, Numbers], columns: Sequence[Column]) -> list[KeyResult]:
    """Return what a rerun is compared with: the cells of all columns with a tolerance."""
    return [
        KeyResult(
            f"{name}: {column.head}",
            found,
            tolerance=tolerance_of(column.tolerance, len(raw.of(name))),
            any_machine=column.any_machine,
        )
        for column in columns
        if column.tolerance is not None
        for name in raw.cells
        if (found := summary(raw, name, column)) is not None
    ]
