"""Rounds of token counts, as in §A.3.

A line is ``{"session_id": …, "rounds": [[append, generated], …]}`` or only the list of pairs.
Rounds may also be objects ``{prompt, append, context, gen[, t, think_s, api_s]}`` as in the
kv-cache-tester figures, where ``context`` is the part of the prompt that was sent before.

A recorded round that generated nothing (an aborted call) is replayed with one token, the minimum
for a server.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from dualpath.core.request import Round, Trajectory
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats.lines import (
    MAX_DELAY_S,
    MAX_TURN_TOKENS,
    Document,
    Id,
    OnBroken,
    each,
)

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TURN_TOKENS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S)]
_Pair = tuple[_Tokens, _Tokens]


class _RoundObject(msgspec.Struct):
    prompt: _Tokens
    append: _Tokens
    context: _Tokens
    gen: _Tokens
    think_s: _Seconds | None = None


_Rounds = Annotated[list[_Pair | _RoundObject], msgspec.Meta(min_length=1)]


class _Line(msgspec.Struct):
    rounds: _Rounds
    session_id: Id | None = None


def looks_like(parsed: object) -> bool:
    """Return whether a parsed line is of this format."""
    return isinstance(parsed, list) or (isinstance(parsed, dict) and "rounds" in parsed)


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield one session per line."""
    return each(documents, _session, on_broken)


def write(sessions: Sequence[TokenSession]) -> Iterator[bytes]:
    """Yield one line per session: pairs, or objects if a round drops context or has a delay."""
    for session in sessions:
        plain = not session.retained_tokens and not any(
            r.delay_s for r in session.trajectory.rounds
        )
        rounds: list[Any] = (
            [(r.append_tokens, r.generated_tokens) for r in session.trajectory.rounds]
            if plain
            else list(_objects(session))
        )
        yield msgspec.json.encode({"session_id": session.session_id, "rounds": rounds})


def _objects(session: TokenSession) -> Iterator[_RoundObject]:
    total = 0
    for index, one in enumerate(session.trajectory.rounds):
        retained = session.retained_tokens[index] if index < len(session.retained_tokens) else None
        context = total if retained is None else retained
        prompt = context + one.append_tokens
        yield _RoundObject(prompt, one.append_tokens, context, one.generated_tokens, one.delay_s)
        total = prompt + one.generated_tokens


def _session(document: Document) -> Session:
    if document.text.lstrip().startswith(b"["):
        line = _Line(document.decode(_Rounds))
    else:
        line = document.decode(_Line)
    named = line.session_id
    session_id = f"{document.stem}-{document.line}" if named in (None, "") else str(named)
    rounds: list[Round] = []
    retained: list[int | None] = []
    total_tokens = 0
    for index, recorded in enumerate(line.rounds):
        if isinstance(recorded, _RoundObject):
            if recorded.context + recorded.append != recorded.prompt:
                raise document.error(
                    f"round {index}: context {recorded.context} + append {recorded.append} is "
                    f"not prompt {recorded.prompt}"
                )
            append, generated = recorded.append, recorded.gen
            retained.append(None if recorded.context == total_tokens else recorded.context)
            total_tokens = recorded.prompt + generated
            delay_s = recorded.think_s or 0.0
        else:
            append, generated = recorded
            retained.append(None)
            total_tokens += append + generated
            delay_s = 0.0
        if index == 0 and append == 0:
            raise document.error("round 0 appends no tokens, so its prompt would be empty")
        rounds.append(Round(append, max(generated, 1), delay_s))
    edited = any(tokens is not None for tokens in retained)
    return TokenSession(Trajectory(session_id, tuple(rounds)), tuple(retained) if edited else ())
