"""Reads and writes traces; each format is a module with the functions of ``TraceFormat``.

To add a format, write such a module and add a row to ``FORMATS``, which commands, messages and
``auto`` use.

    sessions = read_trace("trace.jsonl.xz")
    write_trace(sessions, "trace.mooncake.jsonl", "mooncake")
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, cast

from dualpath.core.errors import TraceError
from dualpath.core.settings import Setting, Settings
from dualpath.node.output_files import OutputFile
from dualpath.workload.formats.lines import Document, OnBroken, documents

if TYPE_CHECKING:
    from dualpath.workload.conversation.sessions import Session

Kind = Literal["lengths", "blocks", "text"]
"""The kind of sessions: ``TokenSession``, ``BlockSession`` or ``TextSession``."""

#: Modules of this folder in the order in which ``auto`` tries them, and the kind that they write;
#: None if they only read.  They are imported when needed, so that commands can list them quickly.
#: A hyphen in a name is an underscore in the module's name.
FORMATS: dict[str, Kind | None] = {
    "rounds": "lengths",
    "agentperf": "text",
    "weka": "blocks",
    "bailian": "blocks",
    "otel": "blocks",
    "lmcache": "text",
    "mooncake": "blocks",
    "mini-swe": None,
    "requests": None,
}
AUTO = "auto"
#: Kinds by class name of sessions.
_KINDS: dict[str, Kind] = {
    "TokenSession": "lengths",
    "BlockSession": "blocks",
    "TextSession": "text",
}


class TraceFormat(Protocol):
    """The functions of a format module; ``write`` only if ``FORMATS`` has a kind for it."""

    def looks_like(self, parsed: object) -> bool:
        """Return whether a trace with this first JSON document, parsed, is of this format."""

    def read(
        self, documents: Iterable[Document], on_broken: OnBroken | None
    ) -> "Iterator[Session]":
        """Yield the sessions; call ``on_broken`` with errors of broken documents, or raise them."""

    def write(self, sessions: Sequence[Any]) -> Iterator[bytes]:
        """Yield the lines of the sessions, at least one and all of the format's kind."""


def writable(kind: Kind) -> tuple[str, ...]:
    """Return the formats in which sessions of a kind can be written."""
    return tuple(name for name, written in FORMATS.items() if written == kind)


def write_trace(sessions: "Sequence[Session]", path: str | Path, format: str) -> None:
    """Write sessions of one kind as a trace, atomically.

    Reading the file returns the same sessions, as far as the format can represent them.  Raises
    ``TraceError`` if the format does not support them, there are none, or the file cannot be
    written.
    """
    place = Path(path)
    kinds = {_KINDS[type(session).__name__] for session in sessions}
    module = _format(format)
    if len(kinds) != 1 or FORMATS[format] not in kinds:
        known = " or ".join(name for kind in sorted(kinds) for name in writable(kind))
        raise TraceError(
            f"{place}: sessions of {' and '.join(sorted(kinds)) or 'nothing'} cannot be written as "
            f"{format}; {f'set {{format}} to {known}' if known else 'there is nothing to write'}"
        )
    try:
        with OutputFile(place) as file:
            for line in module.write(sessions):
                file.write(line + b"\n")
    except OSError as error:
        raise TraceError(
            f"{place}: cannot be written ({error.strerror}); check folder and disk"
        ) from None


def read_trace(
    path: str | Path,
    format: str = AUTO,
    *,
    on_broken: OnBroken | None = None,
    limit: int | None = None,
) -> "list[Session]":
    """Return the sessions of a trace file, folder or archive, at most ``limit`` of them.

    ``format`` is one of ``FORMATS`` or ``auto``.  Without ``on_broken`` the first broken line
    raises ``TraceError`` with file, line, fault and remedy; with it, broken lines are left out and
    ``on_broken`` is called with each error.  Sessions get unique ids.
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
    """Return the format that ``auto`` chooses for a trace; raises ``TraceError`` if none fits."""
    place = Path(path)
    return _detected(place, documents(place), lambda _: None)[0]


def _detected(
    place: Path, texts: Iterator[Document], on_broken: OnBroken | None
) -> tuple[str, Iterator[Document]]:
    """Return the format of the first document that parses, and all documents."""
    seen: list[Document] = []
    unknown: TraceError | None = None
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
        error = _not_recognised(document, parsed)
        if on_broken is None:
            raise error
        unknown = unknown or error
    raise unknown or TraceError(f"{place}: has no readable JSON; check the path")


def _not_recognised(document: Document, parsed: object) -> TraceError:
    keys = f" by {', '.join(list(parsed)[:10])}" if isinstance(parsed, dict) else ""
    return TraceError(
        f"{document.source}, line {document.line}: the format is not recognised{keys}; give it "
        f"with --trace-format ({', '.join(FORMATS)})"
    )


def _format(name: str) -> TraceFormat:
    if name not in FORMATS:
        known = ", ".join([AUTO, *FORMATS])
        raise TraceError(f"trace format {name!r} is unknown; give one of {known}")
    return cast(TraceFormat, import_module(f"{__name__}.{name.replace('-', '_')}"))


def _unique(sessions: "Iterable[Session]") -> "list[Session]":
    unique: list[Session] = []
    copies: dict[str, int] = {}
    for session in sessions:
        count = copies[session.session_id] = copies.get(session.session_id, 0) + 1
        unique.append(session if count == 1 else session.renamed(f"{session.session_id}#{count}"))
    return unique


SkipBroken = Annotated[bool, Setting("skip and count invalid trace lines")]


class TraceSettings(Settings, frozen=True, kw_only=True):
    """The source of the agents."""

    trace: Annotated[
        str,
        Setting(
            "a trace that `dualpath replay` reads, or trajectories like those of Table 2",
            metavar="T.jsonl|32k|48k|64k",
        ),
    ]
    trace_format: Annotated[str, Setting("format of the trace", choices=(AUTO, *FORMATS))] = AUTO
    tokenizer: Annotated[
        str, Setting("tokenizer for text traces; empty: 4 bytes are a token", metavar="FOLDER")
    ] = ""
    skip_broken: SkipBroken = False
