"""The agents of the demo."""

import importlib.util
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.request import Round, Trajectory
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.spans import common_items
from dualpath.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import read_trace
from dualpath.workload.formats.lines import OnBroken, SkippedLines
from dualpath_lab.demo.settings import DemoSettings

# ------------------------------------------------------------------------------------------ midway
# Agents that start in the middle of a session, for small models and short runs.
#
# The earlier context of such an agent is its *history*: one prompt, sent and stored before the run
# starts.  The run replays the turns that follow, so that few turns have the hit rate of a long
# session.  The history is short: only the last tokens of the agent's context, as if older ones had
# been trimmed.  The real context is many times longer, so turns that append much would lower the
# hit rate below that of the session; so the windows of turns that append least are chosen.


log = logging.getLogger(__name__)


class MidSessionAgent(msgspec.Struct, frozen=True):
    """One agent: ``history`` is a session of one prompt, and ``rest`` continues that prompt.

    Both have the same id, so that a replay with the same ``run_id`` hits the stored history.
    """

    history: Session
    rest: Session


class _Window(NamedTuple):
    """The window of turns from ``first`` on in session ``place``.

    ``new_tokens`` is the number of prompt tokens that are not shared with the previous turn.
    """

    new_tokens: int
    place: int
    first: int


def mid_session_agents(
    sessions: Sequence[Session],
    agents: int,
    turns: int,
    history_tokens: int,
    encode: Callable[[str], Sequence[int]],
) -> list[MidSessionAgent]:
    """Return ``agents`` agents with ``turns`` turns each; no turn of a session is used twice.

    A history has ``history_tokens`` tokens, of text approximately.  Only text sessions and
    pure-append sessions of token counts are supported.  Raises ``ConfigError`` if there are too few
    windows.
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
            f"{turns} turns after at least {history_tokens} tokens; use fewer agents, a lower "
            "{max_turns}, or other sessions with --trace"
        )
    return [_agent(sessions[w.place], w.first, turns, history_tokens, count) for w in chosen]


def _windows(
    place: int, session: Session, turns: int, history_tokens: int, count: Callable[[str], int]
) -> Iterator[_Window]:
    match session:
        case TokenSession() if not session.retained_tokens:
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
                f"session {session.session_id} cannot be started in the middle; give sessions of "
                "text or of [append, generated] rounds with --trace"
            )


def _text_windows(
    place: int, session: TextSession, turns: int, history_tokens: int, count: Callable[[str], int]
) -> Iterator[_Window]:
    ends = [list(accumulate(count(m.text) for m in t.messages)) for t in session.text_turns]
    pairs = pairwise(session.text_turns)
    shared = [0, *(common_items(a.messages, b.messages) for a, b in pairs)]
    new_tokens = [
        end[-1] - (end[same - 1] if same else 0) for end, same in zip(ends, shared, strict=True)
    ]
    for first in range(1, len(ends) - turns + 1):
        window = slice(first, first + turns)
        # Windows in which the agent edits messages of its history are skipped.
        if _cut(ends[first - 1], history_tokens) < min(shared[window]):
            yield _Window(sum(new_tokens[window]), place, first)


def _cut(ends: Sequence[int], tokens: int) -> int:
    """Return the index of the message in which the last ``tokens`` tokens begin.

    It is beyond the last message if there are fewer tokens.
    """
    return bisect_right(ends, ends[-1] - tokens) if ends[-1] >= tokens else len(ends)


def _agent(
    session: Session, first: int, turns: int, history_tokens: int, count: Callable[[str], int]
) -> MidSessionAgent:
    name = f"{session.session_id}@{first}"
    if isinstance(session, TextSession):
        return _text_agent(session, name, slice(first, first + turns), history_tokens, count)
    assert isinstance(session, TokenSession), "other kinds have no windows"
    begun, *others = session.trajectory.rounds[first : first + turns]
    rounds = (Round(history_tokens + begun.append_tokens, begun.generated_tokens), *others)
    return MidSessionAgent(
        # A session's tokens are drawn in order, so the shorter prompt is a prefix of the longer.
        TokenSession(Trajectory(name, (Round(history_tokens, 1),))),
        TokenSession(Trajectory(name, rounds)),
    )


def _text_agent(
    session: TextSession,
    name: str,
    window: slice,
    history_tokens: int,
    count: Callable[[str], int],
) -> MidSessionAgent:
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
    return MidSessionAgent(TextSession(name, (history,)), TextSession(name, rest))


SESSIONS_PACKAGE = "agentperf_local"


def sessions_of(trace: str, on_broken: OnBroken | None) -> tuple[list[Session], str]:
    """Return the sessions to replay, of the trace or else of the package, and their source."""
    if trace:
        return read_trace(trace, on_broken=on_broken), trace
    spec = importlib.util.find_spec(SESSIONS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the sessions of the package agentperf-local are not installed; run `make install` or "
            "give other sessions with --trace"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data" / "replays"
    return read_trace(folder), SESSIONS_PACKAGE


def demo_agents(
    demo: DemoSettings, encode: Callable[[str], Sequence[int]]
) -> tuple[list[MidSessionAgent], str]:
    """Return the agents of the demo, and the source of their sessions."""
    skipped = SkippedLines()
    sessions, name = sessions_of(demo.trace, skipped if demo.skip_broken else None)
    for line in skipped.report():
        log.warning("%s", line)
    return mid_session_agents(
        sessions, demo.agents, demo.max_turns, demo.history_tokens, encode
    ), name
