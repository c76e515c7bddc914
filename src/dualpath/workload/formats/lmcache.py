"""LMCache's agent traces (github.com/LMCache/lmcache-agent-trace): prompts and answers as text.

A line is a request: ``{timestamp, input, output, session_id}``.  ``input`` is the whole prompt as
one text.  ``timestamp`` is the time at which it was sent, in microseconds since 1970 or in seconds
since the start of the trace; lines of a session may be out of order.  Shared prefixes are found in
the text, as in the repository's own analysis; recorded answers do not occur in later prompts.

Lines with an empty ``input``, as in the repository's ``magagent`` traces, are requests whose prompt
was not recorded; they are passed over.  The delay before a turn is the time since the previous turn
was sent, including that turn's time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.workload.formats.lines import MAX_DELAY_S, Document, Id, OnBroken, each

#: Timestamps below the first are seconds, below the second milliseconds, others microseconds.
_MOST_S, _MOST_MS = 1e11, 1e14


class _Line(msgspec.Struct):
    session_id: Id
    input: str
    output: str = ""
    timestamp: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def at_s(self) -> float:
        """The time at which the request was sent, in seconds."""
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
        if line.input:
            sessions.setdefault(str(line.session_id), []).append(line)
    for name, lines in sessions.items():
        yield TextSession(name, tuple(_turns(sorted(lines, key=lambda line: line.at_s))))


def write(sessions: Sequence[TextSession]) -> Iterator[bytes]:
    """Yield one line per request, timed by their delays; several messages are joined to one."""
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
