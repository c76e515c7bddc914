"""LMCache's agent traces (github.com/LMCache/lmcache-agent-trace): prompts and answers as text.

A line is a request: ``{timestamp, input, output, session_id}``.  ``input`` is the whole prompt as
one text and ``timestamp`` when it was sent, in microseconds since 1970 or in seconds since the
trace began; lines of a session may be out of order.  What prompts share is in their text, as the
repository's own analysis takes it: recorded answers do not stand in later prompts.

The delay before a turn is the time since the turn before was sent, that turn's own time included.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from dualpath.laboratory.workload.conversation.session import Session
from dualpath.laboratory.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.laboratory.workload.formats.lines import MAX_DELAY_S, Document, OnBroken, each

#: No trace is longer than that in seconds; larger times are milli- or microseconds since 1970.
_MOST_S, _MOST_MS = 1e11, 1e14


class _Line(msgspec.Struct):
    session_id: str
    input: Annotated[str, msgspec.Meta(min_length=1)]
    output: str = ""
    timestamp: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def at_s(self) -> float:
        """When it was sent, in seconds."""
        if self.timestamp < _MOST_S:
            return self.timestamp
        return self.timestamp / (1e3 if self.timestamp < _MOST_MS else 1e6)


def looks_like(parsed: object) -> bool:
    """Return whether a parsed line is of this format."""
    return isinstance(parsed, dict) and {"input", "output", "session_id"} <= parsed.keys()


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield the sessions in order of appearance, their turns in order of time."""
    sessions: dict[str, list[_Line]] = {}
    for line in each(documents, _parse, on_broken):
        sessions.setdefault(line.session_id, []).append(line)
    for name, lines in sessions.items():
        yield TextSession(name, tuple(_turns(sorted(lines, key=lambda line: line.at_s))))


def write(sessions: Sequence[TextSession]) -> Iterator[bytes]:
    """Yield a line per request, each a delay after the one before; several messages become one."""
    for session in sessions:
        now_s = 0.0
        for turn in session.text_turns:
            now_s += turn.delay_s
            line = _Line(session.session_id, _as_one(turn.messages), turn.answer_text, now_s)
            yield msgspec.json.encode(line)


def _parse(document: Document) -> _Line:
    return document.decode(_Line)


def _turns(lines: Sequence[_Line]) -> Iterator[TextTurn]:
    sent_s = lines[0].at_s
    for line in lines:
        delay_s = min(line.at_s - sent_s, MAX_DELAY_S)
        sent_s = line.at_s
        yield TextTurn((Message("user", line.input),), line.output, None, delay_s)


def _as_one(messages: Sequence[Message]) -> str:
    if len(messages) == 1:
        return messages[0].text
    return "\n\n".join(f"{message.role}: {message.text}" for message in messages)
