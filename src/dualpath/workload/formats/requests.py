"""Tables of single requests with token counts and times: the Azure and BurstGPT traces.

A row is a request: its prompt tokens (``ContextTokens``, ``Request tokens``), generated tokens
(``GeneratedTokens``, ``Response tokens``) and time (``TIMESTAMP``, a date in the Azure traces and
seconds in BurstGPT's).  Rows with one ``Session ID`` are a session whose prompts contain the
earlier ones with their answers, as far as their lengths allow: the table has no content.  Any other
row is a session of one turn.

github.com/Azure/AzurePublicDataset (AzureLLMInferenceTrace), github.com/HPMLL/BurstGPT.  The delay
before a turn is the time since the previous one was sent.  When sessions start is not taken over.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from dualpath.core.request import Round, Trajectory
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats.lines import (
    MAX_DELAY_S,
    MAX_TURN_TOKENS,
    Document,
    OnBroken,
    by_file,
    each,
)

#: Names of columns, compared without case, blanks and underscores.
_PROMPT = ("contexttokens", "requesttokens")
_GENERATED = ("generatedtokens", "responsetokens")
_TIME = ("timestamp",)
_SESSION = ("sessionid",)


class _Row(NamedTuple):
    name: str
    prompt_tokens: int
    generated_tokens: int
    at_s: float


def looks_like(parsed: object) -> bool:
    """Return whether a parsed row is of this format."""
    if not isinstance(parsed, dict):
        return False
    columns = set(map(_plain, parsed))
    return bool(columns & set(_PROMPT)) and bool(columns & set(_GENERATED))


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield one session per row, or per session id, in order of appearance."""
    for prefix, of_file in by_file(documents):
        sessions: dict[str, list[_Row]] = {}
        for row in each(of_file, _parse, on_broken):
            sessions.setdefault(f"{prefix}{row.name}", []).append(row)
        for name, rows in sessions.items():
            yield _session(name, sorted(rows, key=lambda row: row.at_s))


def _session(name: str, rows: list[_Row]) -> TokenSession:
    rounds: list[Round] = []
    retained: list[int | None] = []
    total, sent_s = 0, rows[0].at_s
    for row in rows:
        continues = row.prompt_tokens > total
        kept = total if continues else 0
        retained.append(None if continues else 0)
        delay_s = min(row.at_s - sent_s, MAX_DELAY_S)
        generated = max(row.generated_tokens, 1)
        rounds.append(Round(row.prompt_tokens - kept, generated, delay_s))
        total, sent_s = row.prompt_tokens + generated, row.at_s
    edited = any(tokens is not None for tokens in retained)
    return TokenSession(Trajectory(name, tuple(rounds)), tuple(retained) if edited else ())


def _parse(document: Document) -> _Row:
    row = document.decode(dict[str, str | int | float | None])
    cells = {_plain(name): "" if cell is None else str(cell) for name, cell in row.items()}
    session_id = _cell(cells, _SESSION)
    return _Row(
        name=session_id or f"{document.stem}-{document.line}",
        prompt_tokens=_tokens(document, cells, _PROMPT, 1),
        generated_tokens=_tokens(document, cells, _GENERATED, 0),
        at_s=_seconds(document, _cell(cells, _TIME)),
    )


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("_", "")


def _cell(cells: dict[str, str], names: tuple[str, ...]) -> str:
    return next((cells[name] for name in names if cells.get(name)), "")


def _tokens(document: Document, cells: dict[str, str], names: tuple[str, ...], least: int) -> int:
    text = _cell(cells, names)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (value.is_integer() and least <= value <= MAX_TURN_TOKENS):
        raise document.error(
            f"{names[0]} is {text!r}; it must be an integer from {least} to {MAX_TURN_TOKENS}"
        )
    return int(value)


def _seconds(document: Document, text: str) -> float:
    """Return a time in seconds, of a date since 1970; 0 where no time is given."""
    try:
        return float(text or 0)
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise document.error(f"timestamp {text!r} is neither seconds nor a date") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
