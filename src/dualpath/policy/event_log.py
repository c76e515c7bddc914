"""The calls that one ``RequestScheduler`` got and what it answered, as values in order.

The scheduler knows no clock and no randomness, so the log of a live run holds all there is to
know: whoever makes the same calls again gets the same answers.  ``replay`` makes them on a fresh
``RequestScheduler``, as the router does, or on anything else with these calls, so that a
simulator's scheduler can be held against a live run decision by decision.

A log is JSON lines: ``Begin`` first, then one event per call with its answer.  Fetches of groups
while no request waits are left out: they change nothing, and a long-polling router makes several
with every report.  There is no text of any request in a log, only lengths.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol, Self, TypeVar

import msgspec

from dualpath.core.errors import DualPathError, TraceError
from dualpath.core.request import Request
from dualpath.policy.events import (
    Assignment,
    EngineReport,
    EngineSpec,
    Granted,
    SchedulerSettings,
    Thresholds,
)
from dualpath.policy.scheduler import RequestScheduler

#: Raised when logs written before can no longer be read.
FORMAT = 2
#: No count, sum or threshold of the scheduler exceeds it (``policy.events.UNLIMITED_TOKENS``).
LARGEST_NUMBER = 1 << 60


class SchedulerCalls(Protocol):
    """The calls of ``RequestScheduler`` that change it; see there."""

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """α and β are others from now on."""

    def engine_joined(self, spec: EngineSpec) -> None:
        """An engine may get requests from now on."""

    def engine_lost(self, engine_id: str) -> list[str]:
        """An engine is gone; return the unfinished requests it had."""

    def engine_paused(self, engine_id: str) -> None:
        """An engine gets nothing new for now."""

    def engine_resumed(self, engine_id: str) -> None:
        """A paused engine may get requests again."""

    def report(self, report: EngineReport) -> None:
        """An engine reported its load."""

    def submit(self, request: Request) -> None:
        """A request waits for engines."""

    def fetch(self, group: str) -> list[Assignment]:
        """A group asks for work."""

    def granted(self, grant: Granted) -> list[Assignment]:
        """A request's DE has granted its slots; return the assignment if its reads are others."""

    def read_done(self, request_id: str) -> None:
        """A request's storage reads are over."""

    def prefill_done(self, request_id: str) -> None:
        """A request's PE is through with it."""

    def finished(self, request_id: str) -> None:
        """A request is over."""

    def cancel(self, request_id: str) -> None:
        """A request was given up."""


class Line(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="event",
):
    """One line of a log."""


class Begin(Line, frozen=True, tag="begin"):
    """The first line: which dualpath wrote the log, and the scheduler's settings."""

    version: str
    settings: SchedulerSettings
    format: int


class Call(Line, frozen=True, kw_only=True):
    """A call: the tag is the method of ``SchedulerCalls``, the first field its argument.

    ``refused`` is the class of the error that it raised; ``ANSWER`` names the field that holds what
    it returned, for a method that returns anything.
    """

    ANSWER: ClassVar[str | None] = None

    refused: str = ""

    def asked(self) -> Self:
        """Return the call without its answer."""
        return self._answered(())

    def made(self, scheduler: SchedulerCalls) -> Self:
        """Make the call and return it with the answer; raises what the call raises."""
        method = getattr(scheduler, str(self.__struct_config__.tag))
        return self._answered(method(getattr(self, self.__struct_fields__[0])))

    def _answered(self, answer: Iterable[object] | None) -> Self:
        changes = {} if self.ANSWER is None else {self.ANSWER: tuple(answer or ())}
        return msgspec.structs.replace(self, refused="", **changes)


class ThresholdsSet(Call, frozen=True, tag="set_thresholds"):
    """α and β from now on; until the first, those of ``Begin`` hold."""

    thresholds: Thresholds


class EngineJoined(Call, frozen=True, tag="engine_joined"):
    """An engine came."""

    spec: EngineSpec


class EngineLost(Call, frozen=True, tag="engine_lost"):
    """An engine went; ``requests`` is the answer, what it had, oldest first."""

    ANSWER: ClassVar[str | None] = "requests"

    engine_id: str
    requests: tuple[str, ...] = ()


class EnginePaused(Call, frozen=True, tag="engine_paused"):
    """An engine gets nothing new."""

    engine_id: str


class EngineResumed(Call, frozen=True, tag="engine_resumed"):
    """A paused engine gets requests again."""

    engine_id: str


class Reported(Call, frozen=True, tag="report"):
    """A report as the ledger takes it, in the scheduler's numbering of assignments."""

    report: EngineReport


class Submitted(Call, frozen=True, tag="submit"):
    """A request, or one attempt of it."""

    request: Request


class Fetched(Call, frozen=True, tag="fetch"):
    """A group's fetch; ``assignments`` is the answer."""

    ANSWER: ClassVar[str | None] = "assignments"

    group: str
    assignments: tuple[Assignment, ...] = ()


class SlotsGranted(Call, frozen=True, tag="granted"):
    """A DE's word on what it keeps of a hit; ``assignments`` is the answer, one or none."""

    ANSWER: ClassVar[str | None] = "assignments"

    grant: Granted
    assignments: tuple[Assignment, ...] = ()


class ReadEnded(Call, frozen=True, tag="read_done"):
    """All reads of a request are over."""

    request_id: str


class PrefillEnded(Call, frozen=True, tag="prefill_done"):
    """The PE is through with a request."""

    request_id: str


class Finished(Call, frozen=True, tag="finished"):
    """A request is over."""

    request_id: str


class Cancelled(Call, frozen=True, tag="cancel"):
    """A request was dropped."""

    request_id: str


Event = (
    ThresholdsSet
    | EngineJoined
    | EngineLost
    | EnginePaused
    | EngineResumed
    | Reported
    | Submitted
    | Fetched
    | SlotsGranted
    | ReadEnded
    | PrefillEnded
    | Finished
    | Cancelled
)
E = TypeVar("E", bound=Call)


class EventLog(msgspec.Struct, frozen=True):
    """A whole log; line 1 of the file is ``begin``, line n + 2 is ``events[n]``."""

    begin: Begin
    events: tuple[Event, ...]


class Outcome(NamedTuple):
    """An event as recorded, and the same call with the answer it got when it was made again."""

    expected: Event
    got: Event


def refused(event: E, error: Exception) -> E:
    """Return an event whose call raised ``error``, without any other answer."""
    return msgspec.structs.replace(event.asked(), refused=type(error).__name__)


def replay(log: EventLog, scheduler: SchedulerCalls | None = None) -> list[Outcome]:
    """Make the calls of a log and return every event beside what it was answered now.

    Without ``scheduler`` they go to a fresh ``RequestScheduler`` with the settings of the log.  The
    first event that is answered otherwise is the last one: the calls after it were made because
    of the recorded answer, and would contradict the new one.  An error of ``core.errors`` is an
    answer, any other error is raised.
    """
    driven = RequestScheduler(log.begin.settings) if scheduler is None else scheduler
    outcomes: list[Outcome] = []
    for event in log.events:
        outcomes.append(Outcome(event, _answer(driven, event)))
        if outcomes[-1].expected != outcomes[-1].got:
            break
    return outcomes


def _answer(scheduler: SchedulerCalls, event: Event) -> Event:
    try:
        return event.made(scheduler)
    except DualPathError as error:
        return refused(event, error)


def difference(log: EventLog, scheduler: SchedulerCalls | None = None) -> str | None:
    """Return what ``replay`` is answered otherwise, with its line, None if nothing is."""
    outcomes = replay(log, scheduler)
    if not outcomes or outcomes[-1].expected == outcomes[-1].got:
        return None
    expected, got = outcomes[-1]
    return f"line {len(outcomes) + 1}: recorded {expected}, got {got}"


def assignments(log: EventLog) -> list[Assignment]:
    """Return every decision of a log in order."""
    return [a for event in log.events if isinstance(event, Fetched) for a in event.assignments]


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
            f"event log of {len(parsed)} lines does not begin with a line of event 'begin', "
            "which holds the scheduler's settings; give the whole file, first line included"
        )
    events: list[Event] = []
    for number, line in enumerate(parsed[1:], start=2):
        if isinstance(line, Begin):
            raise _error(number, "a second 'begin', a log has 1", "split the file before it")
        events.append(line)
    return EventLog(begin=parsed[0], events=tuple(events))


_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Begin | Event] = msgspec.json.Decoder(Begin | Event)


def _parse(number: int, text: bytes) -> Begin | Event:
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
