"""agentperf sessions: one line per request, with full messages, tools and tool delays.

A conversation consists of the lines with one ``conversation_id``, ordered by ``conversation_idx``.
The input is a .jsonl file, a folder with ``traces/*.jsonl`` in it (for example ``data/replays`` of
the agentperf-local package), or an archive of such a folder, such as the package's wheel.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from dualpath.workload.conversation.prompts import BYTES_PER_TOKEN
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.text_session import RawMessage, TextSession, TextTurn, flatten
from dualpath.workload.formats.lines import (
    MAX_DELAY_S,
    MAX_TURN_TOKENS,
    Document,
    Id,
    OnBroken,
    each,
)


class _Line(msgspec.Struct):
    conversation_id: Id
    conversation_idx: Annotated[int, msgspec.Meta(ge=0)]
    messages: Annotated[list[RawMessage], msgspec.Meta(min_length=1)]
    target_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TURN_TOKENS)]
    tools: list[Any] | None = None
    simulated_tool_delay_ms_after: (
        Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S * 1000)] | None
    ) = None


class _Conversation(msgspec.Struct):
    session_id: str
    lines: list[_Line] = []


def looks_like(parsed: object) -> bool:
    """Return whether a parsed line is of this format."""
    return isinstance(parsed, dict) and "conversation_id" in parsed and "messages" in parsed


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield one session per conversation, in order of appearance."""
    current: _Conversation | None = None
    for line in each(documents, _parse, on_broken):
        name = str(line.conversation_id)
        if current is None or current.session_id != name:
            if current is not None:
                yield _session(current)
            current = _Conversation(name)
        current.lines.append(line)
    if current is not None:
        yield _session(current)


def write(sessions: Sequence[TextSession]) -> Iterator[bytes]:
    """Yield one line per request; the length of an answer is estimated if it is not known."""
    for session in sessions:
        following = [*(turn.delay_s for turn in session.text_turns[1:]), None]
        for index, turn in enumerate(session.text_turns):
            delay_s = following[index]
            estimate = max(len(turn.answer_text.encode()) // BYTES_PER_TOKEN, 1)
            line = _Line(
                conversation_id=session.session_id,
                conversation_idx=index,
                messages=[RawMessage(one.role, one.text) for one in turn.messages],
                target_output_tokens=turn.generate_tokens or estimate,
                simulated_tool_delay_ms_after=None if delay_s is None else delay_s * 1000,
            )
            yield msgspec.json.encode(line)


def _parse(document: Document) -> _Line:
    return document.decode(_Line)


def _session(conversation: _Conversation) -> Session:
    turns: list[TextTurn] = []
    delay_ms = 0.0
    for line in sorted(conversation.lines, key=lambda line: line.conversation_idx):
        first, *others = line.messages
        messages = (flatten(first, line.tools), *(flatten(raw) for raw in others))
        turns.append(
            TextTurn(
                messages=messages,
                generate_tokens=max(line.target_output_tokens, 1),
                delay_s=delay_ms / 1000,
            )
        )
        delay_ms = line.simulated_tool_delay_ms_after or 0.0
    return TextSession(conversation.session_id, tuple(turns))
