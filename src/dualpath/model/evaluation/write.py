"""Figures as files: Markdown, JSON, PNG and HTML, the same bytes for the same runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dualpath.model.evaluation.document import document
from dualpath.model.evaluation.report import FigureReport, as_report
from dualpath.report import markdown
from dualpath.report.files import as_json, drawn, write_file, write_report

#: Fewer than those in which the order of a summation shows, which differs between machines.
_JSON_DIGITS = 10
#: Where the plots of the page over all figures lie, beside it.
_PICTURES = "images/evaluation/"


def write_figure(figure: FigureReport, folder: Path) -> list[Path]:
    """Write ``<name>.md``, ``.json``, ``.html`` and, where it has plots, ``.png``."""
    return write_report(as_report(figure), figure_json(figure), folder, html=True)


def write_document(figures: Sequence[FigureReport], path: Path) -> None:
    """Write the page over all figures, its plots into ``images/evaluation`` beside it."""
    report = document(figures)
    for name, content in drawn(report).items():
        write_file(path.parent / _PICTURES / name, content, folders=True)
    write_file(path, markdown.page(report, _PICTURES).encode(), folders=True)


def figure_json(figure: FigureReport) -> bytes:
    """Return the figure with the paper's numbers and the errors, indented."""
    content: dict[str, Any] = msgspec.to_builtins(figure)
    content["compared"] = [
        {
            "key": one.key,
            "what": one.quoted.what,
            "section": one.quoted.section,
            "unit": one.quoted.unit,
            "relation": one.quoted.relation,
            "model": one.model,
            "paper": one.quoted.value,
            "relative_error": one.relative_error,
            "fitted": one.fitted,
        }
        for one in figure.compared
    ]
    return as_json(content, _JSON_DIGITS)
