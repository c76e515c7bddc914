"""Trace readers: one module per format, one contract.

A format module has ``looks_like(parsed) -> bool`` for a parsed JSON document and
``read(documents, on_broken) -> Iterator[Session]``.  To add a format, write such a module and
list it in ``FORMATS``.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from dualpath.core.errors import TraceError
from dualpath.laboratory.workload.conversation.session import Session
from dualpath.laboratory.workload.formats import agentperf, mini_swe, rounds, weka
from dualpath.laboratory.workload.formats.lines import Document, OnBroken, documents


class TraceFormat(NamedTuple):
    """The two functions of a format module."""

    looks_like: Callable[[object], bool]
    read: Callable[[Iterable[Document], OnBroken | None], Iterator[Session]]


#: Asked in this order by ``auto``.
FORMATS = {
    "rounds": TraceFormat(rounds.looks_like, rounds.read),
    "agentperf": TraceFormat(agentperf.looks_like, agentperf.read),
    "weka": TraceFormat(weka.looks_like, weka.read),
    "mini-swe": TraceFormat(mini_swe.looks_like, mini_swe.read),
}
AUTO = "auto"


def read_trace(
    path: str | Path,
    format: str = AUTO,
    *,
    on_broken: OnBroken | None = None,
    limit: int | None = None,
) -> list[Session]:
    """Return the sessions of a trace file, folder or archive, at most ``limit`` of them.

    ``format`` is a key of ``FORMATS`` or ``auto``.  Without ``on_broken`` the first broken line
    raises ``TraceError`` with file, line, fault and remedy; with it, broken lines are left out
    and each error is handed over.  Sessions get unique ids.
    """
    place = Path(path)
    texts = documents(place)
    if format == AUTO:
        name, texts = _detected(place, texts, on_broken)
    else:
        name = format
    if name not in FORMATS:
        known = ", ".join([AUTO, *FORMATS])
        raise TraceError(f"trace format {name!r} is unknown; known are {known}")
    found = _unique(islice(FORMATS[name].read(texts, on_broken), limit))
    if not found:
        raise TraceError(f"{place}: no session could be read as {name}; check file and --format")
    return found


def detect_format(path: str | Path) -> str:
    """Return the format that ``auto`` reads a trace as; raise ``TraceError`` if there is none."""
    place = Path(path)
    return _detected(place, documents(place), lambda _: None)[0]


def _detected(
    place: Path, texts: Iterator[Document], on_broken: OnBroken | None
) -> tuple[str, Iterator[Document]]:
    """Name the format of the first document that parses, and give the documents back whole."""
    seen: list[Document] = []
    for document in texts:
        seen.append(document)
        try:
            parsed = document.decode(object)
        except TraceError:
            if on_broken is None:
                raise
            continue
        for name, known in FORMATS.items():
            if known.looks_like(parsed):
                return name, chain(seen, texts)
        raise TraceError(
            f"{document.source}, line {document.line}: format not recognised; name it with "
            f"--format ({', '.join(FORMATS)})"
        )
    raise TraceError(f"{place}: holds no readable JSON; check the path")


def _unique(sessions: Iterable[Session]) -> list[Session]:
    unique: list[Session] = []
    copies: dict[str, int] = {}
    for session in sessions:
        count = copies[session.session_id] = copies.get(session.session_id, 0) + 1
        unique.append(session if count == 1 else session.renamed(f"{session.session_id}#{count}"))
    return unique
