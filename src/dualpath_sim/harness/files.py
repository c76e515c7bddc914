"""Files of an experiment: the page as Markdown and picture, and the JSON that it is drawn from."""

from pathlib import Path
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.report.files import as_json, write_file, write_report
from dualpath_sim.harness.experiment import Experiment, Page, R, RawData, S

#: Significant digits of stored numbers.
DIGITS = 9


def stored(experiment: Experiment[S, R], raw: RawData[S, R]) -> RawData[S, R]:
    """Return raw data as it is read from its file, so that a page is the same when redrawn."""
    found = experiment.recorded(msgspec.json.decode(as_json(raw, DIGITS)))
    assert found is not None
    return found


def write(page: Page, folder: Path) -> list[Path]:
    """Write ``<name>.md``, ``.json`` and, where it has them, ``.png`` and ``.html``.

    Returns the paths; raises ``ConfigError`` for a folder that cannot be written.
    """
    return write_report(page.report(), as_json(page.content(), DIGITS), folder, html=page.html)


def write_runs(raw: RawData[Any, Any], name: str, command: str, folder: Path) -> None:
    """Replace ``<name>.json`` by the runs so far; the page is drawn after the last one."""
    content = as_json(Page(name=name, command=command, data=raw), DIGITS)
    write_file(folder / f"{name}.json", content, folders=True)


def read(path: Path) -> Page:
    """Return the page of a JSON file; its ``data`` is not converted to an experiment's structs.

    A file of runs alone, in an older format, is data without a page.  Raises ``ConfigError`` for a
    file that is missing or is no JSON object.
    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if "data" not in document:
            return Page(name=path.stem, data=document)
        return msgspec.convert(document, Page)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the JSON of an experiment") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not the JSON of an experiment: {error}") from None
