"""Traces, read and written: one module per format, one contract.

To add a format, write a module with the functions of ``TraceFormat`` and give it a row of
``FORMATS``: commands, messages and ``auto`` follow.

    sessions = read_trace("trace.jsonl.xz")
    write_trace(sessions, "trace.mooncake.jsonl", "mooncake")
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from dualpath.core.errors import TraceError
from dualpath.laboratory.workload.formats.lines import Document, OnBroken, documents

if TYPE_CHECKING:
    from dualpath.laboratory.workload.conversation.session import Session

Kind = Literal["lengths", "blocks", "text"]
"""What sessions are made of: ``TokenSession``, ``BlockSession`` or ``TextSession``."""

#: Modules of this folder, asked in this order by ``auto``, and what they write: None if they only
#: read.  Imported when needed, so that commands can list them at no cost.  A hyphen in a name is
#: an underscore in the module's.
FORMATS: dict[str, Kind | None] = {
    "rounds": "lengths",
    "agentperf": "text",
    "weka": "blocks",
    "bailian": "blocks",
    "otel": "blocks",
    "lmcache": "text",
    "mooncake": "blocks",
    "mini-swe": None,
}
AUTO = "auto"
#: The names of ``conversation``'s classes, by what they are made of.
_KINDS: dict[str, Kind] = {
    "TokenSession": "lengths",
    "BlockSession": "blocks",
    "TextSession": "text",
}


class TraceFormat(Protocol):
    """What a format module has; ``write`` only where ``FORMATS`` says what."""

    def looks_like(self, parsed: object) -> bool:
        """Return whether the first JSON document of a trace, parsed, is of this format."""

    def read(
        self, documents: Iterable[Document], on_broken: OnBroken | None
    ) -> "Iterator[Session]":
        """Yield the sessions; hand the errors of broken documents to ``on_broken``, or raise."""

    def write(self, sessions: Sequence[Any]) -> Iterator[bytes]:
        """Yield the lines of at least one session, all of the format's kind."""


def writable(kind: Kind) -> tuple[str, ...]:
    """Return the formats that sessions of a kind can be written in."""
    return tuple(name for name, written in FORMATS.items() if written == kind)


def write_trace(sessions: "Sequence[Session]", path: str | Path, format: str) -> None:
    """Write sessions of one kind as a trace, whole or not at all.

    Read again they are the same sessions, as far as the format can say it.  Raises ``TraceError``
    where the format cannot hold them, there are none, or the file cannot be written.
    """
    place = Path(path)
    kinds = {_KINDS[type(session).__name__] for session in sessions}
    module = _format(format)
    if len(kinds) != 1 or FORMATS[format] not in kinds:
        known = " or ".join(name for kind in sorted(kinds) for name in writable(kind))
        raise TraceError(
            f"{place}: sessions of {' and '.join(sorted(kinds)) or 'nothing'} cannot be written as "
            f"{format}; {f'give {{format}} {known}' if known else 'there is nothing to write'}"
        )
    partial = place.with_name(f".{place.name}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(line + b"\n" for line in module.write(sessions))
        partial.replace(place)
    except OSError as error:
        raise TraceError(f"{place}: cannot be written ({error}); check folder and disk") from None


def read_trace(
    path: str | Path,
    format: str = AUTO,
    *,
    on_broken: OnBroken | None = None,
    limit: int | None = None,
) -> "list[Session]":
    """Return the sessions of a trace file, folder or archive, at most ``limit`` of them.

    ``format`` is one of ``FORMATS`` or ``auto``.  Without ``on_broken`` the first broken line
    raises ``TraceError`` with file, line, fault and remedy; with it, broken lines are left out
    and each error is handed over.  Sessions get unique ids.
    """
    place = Path(path)
    texts = documents(place)
    if format == AUTO:
        name, texts = _detected(place, texts, on_broken)
    else:
        name = format
    found = _unique(islice(_format(name).read(texts, on_broken), limit))
    if not found:
        raise TraceError(
            f"{place}: no session could be read as {name}; check file and --trace-format"
        )
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
        for name in FORMATS:
            if _format(name).looks_like(parsed):
                return name, chain(seen, texts)
        raise TraceError(
            f"{document.source}, line {document.line}: format not recognised; name it with "
            f"--trace-format ({', '.join(FORMATS)})"
        )
    raise TraceError(f"{place}: holds no readable JSON; check the path")


def _format(name: str) -> TraceFormat:
    if name not in FORMATS:
        known = ", ".join([AUTO, *FORMATS])
        raise TraceError(f"trace format {name!r} is unknown; known are {known}")
    return cast(TraceFormat, import_module(f"{__name__}.{name.replace('-', '_')}"))


def _unique(sessions: "Iterable[Session]") -> "list[Session]":
    unique: list[Session] = []
    copies: dict[str, int] = {}
    for session in sessions:
        count = copies[session.session_id] = copies.get(session.session_id, 0) + 1
        unique.append(session if count == 1 else session.renamed(f"{session.session_id}#{count}"))
    return unique
