"""mini-swe-agent runs: chat messages, of which each assistant message is one turn.

The input is a ``.traj.json`` as written by the agent (``{info, messages, trajectory_format}``) or a
compact line ``{session_id, messages, turns}``.  The number of tokens to generate is the length of
the recorded answer in the served model's tokens: the recorded usage counts another model's tokens
and includes reasoning, which is not part of later contexts.  No tool delays are recorded.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.text_session import (
    ASSISTANT,
    RawMessage,
    TextSession,
    TextTurn,
    flatten,
)
from dualpath.workload.formats.lines import Document, Id, OnBroken, each

#: Role of a message that the agent writes after its last answer; it is never sent to a model.
_EXIT_ROLE = "exit"


class _Line(msgspec.Struct):
    messages: Annotated[list[RawMessage], msgspec.Meta(min_length=2)]
    session_id: Id | None = None
    instance_id: Id | None = None


def looks_like(parsed: object) -> bool:
    """Return whether a parsed line is of this format."""
    return isinstance(parsed, dict) and "messages" in parsed and "conversation_id" not in parsed


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield one session per line or file."""
    return each(documents, _session, on_broken)


def _session(document: Document) -> Session:
    line = document.decode(_Line)
    messages = [flatten(raw) for raw in line.messages if raw.role != _EXIT_ROLE]
    turns = [
        TextTurn(messages=tuple(messages[:place]), answer_text=message.text)
        for place, message in enumerate(messages)
        if message.role == ASSISTANT and place > 0
    ]
    if not turns:
        raise document.error("there is no turn: no assistant message follows a prompt")
    given = (one for one in (line.session_id, line.instance_id) if one not in (None, ""))
    return TextSession(str(next(given, document.stem)), tuple(turns))
