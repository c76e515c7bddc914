"""The page of a check, drawn from the results in its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dualpath.node.output_files import write_whole
from dualpath.report import markdown
from dualpath.report.model import NOTHING, Block, Report, Table
from dualpath_lab.gpu.results import PhaseResult, read_result
from dualpath_lab.gpu.settings import PHASES

PAGE = "report.md"
_REHEARSAL = "A rehearsal with tiny sizes: its times mean nothing."


def write_page(out: Path) -> Path:
    """Write the page of the results in a folder."""
    results = [result for name in PHASES if (result := read_result(out, name)) is not None]
    path = out / PAGE
    write_whole(path, markdown.page(report(results)).encode())
    return path


def report(results: Sequence[PhaseResult]) -> Report:
    """Return a table of the phases, and a part for each phase with findings."""
    rows = tuple(
        (one.phase, one.state, f"{one.seconds:.0f}", one.reason or NOTHING) for one in results
    )
    rehearsed = any(result.found.get("rehearsal") for result in results)
    return Report(
        name="gpu-check",
        title="Check of a machine with GPUs",
        blocks=(Table("", ("phase", "state", "s", "reason"), rows, "llrl"),),
        warnings=(_REHEARSAL,) if rehearsed else (),
        parts=tuple(
            Report(name=one.phase, title=one.phase, blocks=_blocks(one.found))
            for one in results
            if _blocks(one.found)
        ),
    )


def _blocks(found: Mapping[str, Any]) -> tuple[Block, ...]:
    """Return single values as one table, and each list of rows as another.

    Objects, such as the tokens of ``plain``, are for programs and are in the JSON file only.
    """
    single = {
        name: value
        for name, value in found.items()
        if not _is_rows(value) and not isinstance(value, dict)
    }
    values = tuple(
        (name, _text(value)) for name, value in single.items() if "\n" not in _text(value)
    )
    tables = [Table(name, *_grid(value)) for name, value in found.items() if _is_rows(value)]
    return (*((Table("", ("finding", "value"), values, "ll"),) if values else ()), *tables)


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _grid(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    return columns, tuple(
        tuple(_text(row.get(column)).replace("\n", " ") for column in columns) for row in rows
    )


def _text(value: object) -> str:
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or NOTHING
    return str(value)
