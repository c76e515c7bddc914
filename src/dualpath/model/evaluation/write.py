"""Reports as files: Markdown, JSON, PNG and HTML, the same bytes for the same runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.model.evaluation import document, markdown
from dualpath.model.evaluation.drawing import png
from dualpath.model.evaluation.page import html_page
from dualpath.model.evaluation.report import FigureReport

#: Fewer than those in which the order of a summation shows, which differs between machines.
_JSON_DIGITS = 10


def write_report(report: FigureReport, folder: Path) -> list[Path]:
    """Write ``<name>.md``, ``.json``, ``.html`` and, where it has plots, ``.png``."""
    files: dict[str, bytes] = {
        "json": as_json(report),
        "html": html_page(report).encode(),
    }
    if report.panels:
        files["png"] = png(report.panels)
    picture = f"{report.name}.png" if report.panels else None
    files["md"] = markdown.report(report, picture=picture).encode()
    paths = []
    for ending, content in sorted(files.items()):
        path = folder / f"{report.name}.{ending}"
        _write(path, content)
        paths.append(path)
    return paths


def write_document(reports: Sequence[FigureReport], path: Path) -> None:
    """Write the page over all reports, its plots into ``images/evaluation`` beside it."""
    pictures = {}
    for report in reports:
        if report.panels:
            address = f"images/evaluation/{report.name}.png"
            _write(path.parent / address, png(report.panels))
            pictures[report.name] = address
    _write(path, document.document(reports, pictures).encode())


def as_json(report: FigureReport) -> bytes:
    """Return the report with the paper's numbers and the errors, indented."""
    content: dict[str, Any] = msgspec.to_builtins(report)
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
        for one in report.compared
    ]
    return (
        msgspec.json.format(msgspec.json.encode(rounded(content, _JSON_DIGITS)), indent=1) + b"\n"
    )


def rounded(value: object, digits: int) -> object:
    """Return plain data whose numbers have ``digits`` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(one, digits) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one, digits) for one in value]
    return value


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}); give a writable path") from None
