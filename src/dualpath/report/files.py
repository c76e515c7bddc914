"""Reports and numbers as files: Markdown, JSON, PNG, HTML; the same bytes for the same content."""

import importlib.util
import os
from pathlib import Path

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.report import markdown
from dualpath.report.model import Report


def undrawn() -> str:
    """Say that plots are left out, and what to install; empty if they are drawn."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return f"plots are left out, they need matplotlib: {extra('report').remedy}"


def require_plots(purpose: str) -> None:
    """Raise ``ConfigError`` if no plot can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{purpose} needs matplotlib; {extra('report').remedy}")


def require_writable(flag: str, path: str | None) -> None:
    """Raise ``ConfigError`` for a file that cannot be written: now, not after a long run.

    ``flag`` is the option that names it; nothing is wrong with a ``path`` that is not given.
    """
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"{flag} {path}: cannot be written; give a file in a writable folder")


def write_report(report: Report, data: bytes, folder: Path, *, html: bool = False) -> list[Path]:
    """Write ``<name>.md``, ``.json``, ``.png`` where it has plots, ``.html`` if wanted.

    Returns the paths; raises ``ConfigError`` for a folder that cannot be written. ``data`` is the
    JSON: the numbers behind tables and plots. Without matplotlib there is no picture, and Markdown
    and page say why.
    """
    why_not = undrawn()
    text = markdown.page(report, undrawn=why_not)
    files = {f"{report.name}.json": data, f"{report.name}.md": text.encode()}
    files |= {} if why_not else drawn(report)
    if html:
        from dualpath.report.html import page

        files[f"{report.name}.html"] = page(report, undrawn=why_not).encode()
    paths = [folder / name for name in sorted(files)]
    for path in paths:
        write_file(path, files[path.name], folders=True)
    return paths


def write_page(report: Report, path: str | Path) -> None:
    """Write one HTML page into a folder that is there; raises ``ConfigError`` where it is not."""
    from dualpath.report.html import page

    write_file(path, page(report, undrawn=undrawn()).encode())


def drawn(report: Report) -> dict[str, bytes]:
    """Return the pictures of a report and its parts by the names of their files."""
    from dualpath.report.pictures import png

    return {f"{name}.png": png(plots.panels) for name, plots in report.pictures()}


def write_file(path: str | Path, content: bytes, *, folders: bool = False) -> None:
    """Write a file, and make the ``folders`` it is in; raises ``ConfigError`` if that fails."""
    try:
        if folders:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}); give a writable path") from None


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
