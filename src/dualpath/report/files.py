"""Writes reports and data as files: Markdown, JSON, PNG, HTML; deterministic for equal content."""

import importlib.util
from pathlib import Path

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.node.output_files import not_writable, write_whole
from dualpath.report import markdown
from dualpath.report.model import Report


def no_plots_reason() -> str:
    """Return why plots cannot be drawn, with the remedy; empty if they can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return f"no plots, as matplotlib is not installed; {extra('report').remedy}"


def require_plots(purpose: str) -> None:
    """Raise ``ConfigError`` if plots cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{purpose} needs matplotlib; {extra('report').remedy}")


def require_writable(flag: str, path: str | None) -> None:
    """Raise ``ConfigError`` before a long run if its file cannot be written.

    ``flag`` is the option of the file; a ``path`` of None is accepted.
    """
    if path is None:
        return
    if (reason := not_writable(path)) is not None:
        raise ConfigError(
            f"{flag} {path}: cannot be written ({reason}); give a file in a writable folder"
        )


def write_report(report: Report, data: bytes, folder: Path, *, html: bool = False) -> list[Path]:
    """Write ``<name>.md``, ``.json``, ``.png`` if it has plots, and with ``html`` ``.html``.

    Returns the paths; raises ``ConfigError`` for a folder that cannot be written. ``data`` is the
    JSON: the numbers of tables and plots. Without matplotlib no picture is written, and Markdown
    and HTML state why.
    """
    why_not = no_plots_reason()
    text = markdown.page(report, no_plots_reason=why_not)
    files = {f"{report.name}.json": data, f"{report.name}.md": text.encode()}
    files |= {} if why_not else drawn(report)
    if html:
        from dualpath.report.html import page

        files[f"{report.name}.html"] = page(report, no_plots_reason=why_not).encode()
    paths = [folder / name for name in sorted(files)]
    for path in paths:
        write_file(path, files[path.name], folders=True)
    return paths


def write_page(report: Report, path: str | Path) -> None:
    """Write one HTML page into an existing folder; raises ``ConfigError`` if that fails."""
    from dualpath.report.html import page

    write_file(path, page(report, no_plots_reason=no_plots_reason()).encode())


def drawn(report: Report) -> dict[str, bytes]:
    """Return the PNG pictures of a report and its parts, by file name."""
    from dualpath.report.plots import png

    return {f"{name}.png": png(plots.panels) for name, plots in report.pictures()}


def write_file(path: str | Path, content: bytes, *, folders: bool = False) -> None:
    """Write a file, with ``folders`` also its parents; raises ``ConfigError`` if that fails."""
    try:
        write_whole(path, content, folders=folders)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); give a writable path"
        ) from None


def as_json(content: object, digits: int | None = None) -> bytes:
    """Return plain data or structs as indented JSON, numbers rounded to significant digits."""
    plain = msgspec.to_builtins(content)
    if digits is not None:
        plain = _rounded(plain, digits)
    return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"


def _rounded(value: object, digits: int) -> object:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _rounded(one, digits) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one, digits) for one in value]
    return value
