"""The events that one ``RequestScheduler`` got, with their effects, in order.

The scheduler knows no clock and no randomness, so the log of a live run is complete: another
scheduler that gets the same events must have the same effects.  ``replay`` applies them to a fresh
``RequestScheduler``, as the router does, or to anything else with ``apply``, so that a simulator's
scheduler can be compared with a live run decision by decision.

A log is JSON lines: ``Begin`` first, then an ``Entry`` for each event.  Fetches while no request
waits are left out: they have no effect, and a router that fetches for all groups after each report
makes several.  A log has no text of any request, only lengths.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from dualpath.core.errors import DualPathError, TraceError
from dualpath.policy.events import (
    NO_EFFECTS,
    Assignment,
    Effects,
    Event,
    Fetch,
    SchedulerSettings,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler

#: Raised when logs written before can no longer be read.
FORMAT = 4
#: No count, sum or threshold of the scheduler exceeds it (``policy.events.UNLIMITED_TOKENS``).
LARGEST_NUMBER = 1 << 60


class Line(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="line",
):
    """One line of a log."""


class Begin(Line, frozen=True, tag="begin"):
    """The first line: which dualpath wrote the log, and the scheduler's settings."""

    version: str
    settings: SchedulerSettings
    format: int


class Entry(Line, frozen=True, tag="event"):
    """An event with its effects; ``refused`` is the class of the error that it raised instead."""

    event: Event
    effects: Effects = NO_EFFECTS
    refused: str = ""


class EventLog(msgspec.Struct, frozen=True):
    """A whole log; line 1 of the file is ``begin``, line n + 2 is ``entries[n]``."""

    begin: Begin
    entries: tuple[Entry, ...]


class Applies(Protocol):
    """A scheduler: ``RequestScheduler``, or another that is to decide like it."""

    def apply(self, event: Event) -> Effects:
        """As ``RequestScheduler.apply``."""
        ...


class Replayed(NamedTuple):
    """An entry as recorded, and the entry of the same event in a replay."""

    recorded: Entry
    got: Entry


def replay(log: EventLog, scheduler: Applies | None = None) -> list[Replayed]:
    """Apply the events of a log; return each entry with the one it has now.

    Without ``scheduler`` they go to a fresh ``RequestScheduler`` with the settings of the log.  The
    first entry that differs is the last one: later events follow from the recorded effects and
    would contradict the new ones.  An error of ``core.errors`` is recorded as ``refused``, any
    other error is raised.
    """
    driven = RequestScheduler(log.begin.settings) if scheduler is None else scheduler
    replayed: list[Replayed] = []
    for entry in log.entries:
        replayed.append(Replayed(entry, _apply(driven, entry.event)))
        if replayed[-1].recorded != replayed[-1].got:
            break
    return replayed


def _apply(scheduler: Applies, event: Event) -> Entry:
    try:
        return Entry(event, scheduler.apply(event))
    except DualPathError as error:
        return refusal(event, error)


def refusal(event: Event, error: Exception) -> Entry:
    """Return the entry of an event that raised ``error``."""
    return Entry(event, refused=type(error).__name__)


def difference(log: EventLog, scheduler: Applies | None = None) -> str | None:
    """Return the first difference that ``replay`` finds, with its line, None without any."""
    replayed = replay(log, scheduler)
    if not replayed or replayed[-1].recorded == replayed[-1].got:
        return None
    recorded, got = replayed[-1]
    return f"line {len(replayed) + 1}: recorded {recorded}, got {got}"


def assignments(log: EventLog) -> list[Assignment]:
    """Return every assignment of a log in order, without those that were planned again."""
    placing = (entry for entry in log.entries if isinstance(entry.event, Fetch | Submitted))
    return [assignment for entry in placing for assignment in entry.effects.assignments]


def encode_line(line: Line) -> bytes:
    """Return one line of a log with its newline."""
    return _ENCODER.encode(line) + b"\n"


def decode(lines: Iterable[bytes]) -> EventLog:
    """Return the log that is written in ``lines``.

    Raises ``TraceError`` with line, value, limit and remedy for one that is cut off, malformed, of
    another format or out of range.
    """
    parsed = [_parse(number, text) for number, text in enumerate(lines, start=1)]
    if not parsed or not isinstance(parsed[0], Begin):
        raise TraceError(
            f"event log of {len(parsed)} lines does not begin with a line 'begin', which holds the "
            "scheduler's settings; give the whole file, first line included"
        )
    entries: list[Entry] = []
    for number, line in enumerate(parsed[1:], start=2):
        if isinstance(line, Begin):
            raise _error(number, "a second 'begin', a log has 1", "split the file before it")
        entries.append(line)
    return EventLog(begin=parsed[0], entries=tuple(entries))


_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Begin | Entry] = msgspec.json.Decoder(Begin | Entry)


def _parse(number: int, text: bytes) -> Begin | Entry:
    if number == 1 and text.startswith(b'{"event":'):
        raise _error(
            number,
            f"format 2 or older, this version reads {FORMAT}",
            "read it with its own version",
        )
    try:
        line = _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = text[:60].decode("utf-8", "replace").strip()
        raise _error(
            number,
            f"{error} in {shown!r}",
            "a last line may be cut off and is best removed, else record the run again",
        ) from error
    for value in _numbers(msgspec.to_builtins(line)):
        if abs(value) > LARGEST_NUMBER:
            raise _error(number, f"{value} exceeds {LARGEST_NUMBER}", "correct the line")
    if isinstance(line, Begin):
        _check_begin(number, line)
    return line


def _check_begin(number: int, begin: Begin) -> None:
    if begin.format != FORMAT:
        raise _error(
            number,
            f"format {begin.format} of dualpath {begin.version}, this version reads {FORMAT}",
            "read it with that version",
        )
    if begin.settings.block_tokens < 1:
        raise _error(
            number,
            f"block_tokens {begin.settings.block_tokens} must be at least 1",
            "correct the line",
        )


def _numbers(value: object) -> Iterable[int | float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield value


def _error(number: int, what: str, remedy: str) -> TraceError:
    return TraceError(f"event log, line {number}: {what}; {remedy}")
