"""Agents met in the middle of their work, for models and runs that are small.

What an agent did before is its *history*: one prompt, sent and stored before a run begins.  The run
replays turns that go on from there, so that few turns have the hit rate of a long session.  A
history is short: the newest tokens of what the agent had, as if older ones had been trimmed.  An
agent's own context is many times as long, so turns that append much would lower the hit rate below
what the session really has: those windows are taken that append least.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.request import Round, Trajectory
from dualpath.laboratory.workload.conversation.session import Session
from dualpath.laboratory.workload.conversation.spans import common_items
from dualpath.laboratory.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.laboratory.workload.conversation.token_session import TokenSession


class Midway(msgspec.Struct, frozen=True):
    """One agent: ``history`` is a session of one prompt, with which ``rest`` begins.

    Both have one id, so that a replay with the same ``run_id`` finds the history stored.
    """

    history: Session
    rest: Session


class _Window(NamedTuple):
    """Turns ``first`` and following of session ``place``, in which ``new_tokens`` are not shared.

    What is shared is so with the turn before each: the rest has to be computed.
    """

    new_tokens: int
    place: int
    first: int


def met_midway(
    sessions: Sequence[Session],
    agents: int,
    turns: int,
    history_tokens: int,
    encode: Callable[[str], Sequence[int]],
) -> list[Midway]:
    """Return ``agents`` agents with ``turns`` turns each, no turn of a session twice.

    A history is ``history_tokens`` long, one of text within a few tokens.  Text sessions and pure
    appends of token counts can be met so.  Raises ``ConfigError`` where they are too few.
    """
    count = cache(lambda text: len(encode(text)))
    found: list[_Window] = []
    for place, session in enumerate(sessions):
        found += _windows(place, session, turns, history_tokens, count)
    chosen: list[_Window] = []
    for window in sorted(found):
        if len(chosen) == agents:
            break
        if all(w.place != window.place or abs(w.first - window.first) >= turns for w in chosen):
            chosen.append(window)
    if len(chosen) < agents:
        raise ConfigError(
            f"{{agents}} is {agents}, but {len(sessions)} sessions have {len(chosen)} windows of "
            f"{turns} turns that go on from at least {history_tokens} tokens; take fewer agents or "
            "less {max_turns}, or name other sessions with --trace"
        )
    return [_met(sessions[w.place], w.first, turns, history_tokens, count) for w in chosen]


def _windows(
    place: int, session: Session, turns: int, history_tokens: int, count: Callable[[str], int]
) -> Iterator[_Window]:
    match session:
        case TokenSession() if not session.kept_tokens:
            rounds = session.trajectory.rounds
            ends = list(accumulate(r.append_tokens + r.generated_tokens for r in rounds))
            for first in range(1, len(rounds) - turns + 1):
                if ends[first - 1] >= history_tokens:
                    new_tokens = sum(r.append_tokens for r in rounds[first : first + turns])
                    yield _Window(new_tokens, place, first)
        case TextSession():
            yield from _text_windows(place, session, turns, history_tokens, count)
        case _:
            raise ConfigError(
                f"session {session.session_id} cannot be met in the middle; name sessions of text "
                "or of [append, generated] rounds with --trace"
            )


def _text_windows(
    place: int, session: TextSession, turns: int, history_tokens: int, count: Callable[[str], int]
) -> Iterator[_Window]:
    ends = [list(accumulate(count(m.text) for m in t.messages)) for t in session.text_turns]
    pairs = pairwise(session.text_turns)
    shared = [0, *(common_items(a.messages, b.messages) for a, b in pairs)]
    new_tokens = [
        end[-1] - (end[kept - 1] if kept else 0) for end, kept in zip(ends, shared, strict=True)
    ]
    for first in range(1, len(ends) - turns + 1):
        window = slice(first, first + turns)
        # An agent that edits what its history would consist of is not met there.
        if _cut(ends[first - 1], history_tokens) < min(shared[window]):
            yield _Window(sum(new_tokens[window]), place, first)


def _cut(ends: Sequence[int], tokens: int) -> int:
    """Return which message the last ``tokens`` tokens begin in; past all if there are fewer."""
    return bisect_right(ends, ends[-1] - tokens) if ends[-1] >= tokens else len(ends)


def _met(
    session: Session, first: int, turns: int, history_tokens: int, count: Callable[[str], int]
) -> Midway:
    name = f"{session.session_id}@{first}"
    if isinstance(session, TextSession):
        return _text_met(session, name, slice(first, first + turns), history_tokens, count)
    assert isinstance(session, TokenSession), "others have no windows"
    begun, *going_on = session.trajectory.rounds[first : first + turns]
    rounds = (Round(history_tokens + begun.append_tokens, begun.generated_tokens), *going_on)
    return Midway(
        # A session's tokens are drawn one after the other: the shorter prompt is a prefix.
        TokenSession(Trajectory(name, (Round(history_tokens, 1),))),
        TokenSession(Trajectory(name, rounds)),
    )


def _text_met(
    session: TextSession,
    name: str,
    window: slice,
    history_tokens: int,
    count: Callable[[str], int],
) -> Midway:
    before = session.text_turns[window.start - 1]
    ends = list(accumulate(count(m.text) for m in before.messages))
    cut = _cut(ends, history_tokens)
    message = before.messages[cut]
    share = (ends[cut] - ends[-1] + history_tokens) / count(message.text)
    begins = len(message.text) - round(share * len(message.text))
    oldest = Message(message.role, message.text[begins:])

    def trimmed(turn: TextTurn) -> TextTurn:
        return msgspec.structs.replace(turn, messages=(oldest, *turn.messages[cut + 1 :]))

    history = msgspec.structs.replace(trimmed(before), generate_tokens=1, delay_s=0.0)
    rest = tuple(map(trimmed, session.text_turns[window]))
    return Midway(TextSession(name, (history,)), TextSession(name, rest))
