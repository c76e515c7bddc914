"""What the lab measured for numbers of the paper, from the published files of its experiments.

The lab has emulated engines, other sizes and storage that binds by choice, so that its numbers
show whether the system does what the paper describes, and not whether it is as fast.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dualpath.core.errors import ConfigError
from dualpath.report.model import Table
from dualpath_sim.evaluation.report import Compared, figure_name, paper_quantity, quantity
from dualpath_sim.evaluation.speedups import mean
from dualpath_sim.harness.files import read

Look = Callable[[str, str, str, str], float]
"""From a file, a part of a table's title, the row's first cell and a column to the number."""

_SPEEDUP = ("x is ideal", "dualpath", "speed-up over basic")
_BALANCE = "Balance of storage NICs"
#: The clusters of Fig. 8.
_SHAPES = ("jct-1p1d", "jct-2p1d", "jct-1p2d")


class LabNumber(NamedTuple):
    """A number of the lab and the setting in which it was measured."""

    setting: str
    of: Callable[[Look], float]


def _reduction(mode: str) -> Callable[[Look], float]:
    return lambda look: 100 * (1 - 1 / look("jct-1p2d", "x is ideal", mode, "speed-up over basic"))


LAB_NUMBERS = {
    "fig7.660b.speedup_max": LabNumber(
        "2P4D, the links allow 3x", lambda look: look("jct-2p4d", *_SPEEDUP)
    ),
    "fig7.660b.to_oracle": LabNumber(
        "1P2D, storage suffices",
        lambda look: look("jct-balanced", "x is ideal", "dualpath", "x oracle"),
    ),
    "fig8.speedup_mean": LabNumber(
        "1P1D, 2P1D, 1P2D; the links allow 2x, 1.5x, 3x",
        lambda look: mean(look(file, *_SPEEDUP) for file in _SHAPES),
    ),
    "fig8.speedup_max": LabNumber(
        "the same", lambda look: max(look(file, *_SPEEDUP) for file in _SHAPES)
    ),
    "fig10.capacity_mean": LabNumber(
        "1P2D, mean TTFT of at most 2 s",
        lambda look: look("online", "Capacity", "dualpath", "ratio"),
    ),
    "fig12.layerwise": LabNumber("1P2D, storage binds", _reduction("layerwise")),
    "fig12.round_robin": LabNumber("1P2D, storage binds", _reduction("round-robin")),
    "fig12.dualpath": LabNumber("1P2D, storage binds", _reduction("dualpath")),
    "fig13.round_robin": LabNumber(
        "1P2D, storage binds", lambda look: look("jct-1p2d", _BALANCE, "1P2D", "round-robin")
    ),
    "fig13.dualpath": LabNumber(
        "1P2D, storage binds", lambda look: look("jct-1p2d", _BALANCE, "1P2D", "dualpath")
    ),
}


def lab_numbers(folder: Path) -> dict[str, float]:
    """Return the lab's numbers by the key of the paper's.

    Raises ``ConfigError`` for a folder without the files of the lab's experiments, and for a file
    without one of the numbers.
    """

    def look(file: str, title: str, row: str, column: str) -> float:
        path = folder / f"{file}.json"
        tables = read(path).tables
        try:
            (table,) = (one for one in tables if title in one.title)
            (found,) = (cells for cells in table.rows if cells[0] == row)
            return float(found[table.columns.index(column)].rstrip("x"))
        except ValueError:
            raise ConfigError(
                f"{path} has no number in the column {column!r} of the row {row!r} of a table "
                f"{title!r}; give --lab docs/evaluation/lab, or omit it"
            ) from None

    return {key: number.of(look) for key, number in LAB_NUMBERS.items()}


def three_columns(compared: Sequence[Compared], lab: Mapping[str, float], title: str) -> Table:
    """Return the paper's, the simulator's and the lab's number, a row for each of ``compared``."""
    rows = tuple(
        (
            f"{figure_name(one.quoted.figure)}: {one.quoted.what}",
            paper_quantity(one.quoted),
            quantity(one.model, one.quoted.unit),
            quantity(lab.get(one.key), one.quoted.unit),
            LAB_NUMBERS[one.key].setting if one.key in lab else "",
        )
        for one in compared
    )
    return Table(title, ("number", "paper", "simulator", "lab", "the lab's setting"), rows)
