"""A trace written in any format and read again is the same sessions."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.request import Round, Trajectory
from dualpath.workload.columns.sessions_to_columns import as_lengths
from dualpath.workload.conversation.block_session import BlockSession, BlockTurn, SubAgent
from dualpath.workload.conversation.prompts import Contents, Vocabulary
from dualpath.workload.conversation.sessions import AgentSettings, Session
from dualpath.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import FORMATS, detect_format, read_trace, writable, write_trace

BLOCK = 16
#: Whole milliseconds that are exact in seconds as well, so that no format rounds them.
DELAYS = st.integers(0, 64).map(lambda eighths: eighths / 8)


def again(sessions: Sequence[Session], format: str) -> list[Session]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(sessions, path, format)
        assert detect_format(path) == format
        return read_trace(path)


@st.composite
def block_turns(draw: st.DrawFn, first_id: int) -> tuple[BlockTurn, ...]:
    """Turns of one conversation: each goes on after the one before, or after a part of it."""
    turns: list[BlockTurn] = []
    ids: list[int] = list(range(draw(st.integers(0, 3))))  # what all sessions begin with
    for index in range(draw(st.integers(1, 4))):
        prefix_tokens = ids if draw(st.booleans()) else ids[: len(ids) // 2]
        new = draw(st.integers(1, 4))
        start = first_id + 100 * index
        ids = [*prefix_tokens, *range(start, start + new)]
        runs: list[tuple[int, int]] = []
        for one in ids:
            if runs and runs[-1][1] + 1 == one:
                runs[-1] = (runs[-1][0], one)
            else:
                runs.append((one, one))
        turns.append(
            BlockTurn(
                prompt_tokens=len(ids) * BLOCK + draw(st.integers(0, BLOCK - 1)),
                generate_tokens=draw(st.integers(1, 40)),
                id_ranges=tuple(runs),
                delay_s=draw(DELAYS) if index else 0.0,
            )
        )
    return tuple(turns)


@st.composite
def block_sessions(draw: st.DrawFn) -> list[BlockSession]:
    found: list[BlockSession] = []
    for number in range(draw(st.integers(1, 3))):
        turns = draw(block_turns(10_000 * (number + 1)))
        helpers: tuple[SubAgent, ...] = ()
        if draw(st.booleans()):
            own = draw(block_turns(10_000 * (number + 1) + 5_000))
            after = draw(st.integers(0, len(turns) - 1))
            name = f"s{number}/helper-0"
            helpers = (SubAgent(after, BlockSession(name, BLOCK, own)),)
        found.append(BlockSession(f"s{number}", BLOCK, turns, helpers))
    return found


def recorded_fields(session: Session) -> object:
    """Return what all formats say of a session."""
    assert isinstance(session, BlockSession)
    turns = [
        (t.prompt_tokens, t.generate_tokens, t.id_ranges, t.delay_s) for t in session.block_turns
    ]
    helpers = [(sub.after_turn, recorded_fields(sub.session)) for sub in session.sub_agents]
    return session.session_id, session.block_tokens, turns, helpers


@pytest.mark.parametrize("format", writable("blocks"))
@given(sessions=block_sessions())
def test_sessions_of_block_ids(format: str, sessions: list[BlockSession]):
    read = again(sessions, format)

    assert sorted(map(recorded_fields, read), key=repr) == sorted(
        map(recorded_fields, sessions), key=repr
    )


@pytest.mark.parametrize("format", ["bailian", "mooncake", "otel"])
@given(sessions=block_sessions())
def test_ids_that_several_sessions_have_are_known_to_be_shared(
    format: str, sessions: list[BlockSession]
):
    def ids(session: BlockSession) -> set[int]:
        own = {i for t in session.block_turns for a, b in t.id_ranges for i in range(a, b + 1)}
        return own.union(*(ids(sub.session) for sub in session.sub_agents))

    read = again(sessions, format)

    for session in read:
        assert isinstance(session, BlockSession)
        others = [ids(o) for o in read if isinstance(o, BlockSession) and o is not session]
        assert session.shared_ids == ids(session) & set().union(*others)


LENGTHS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 40), DELAYS, st.none() | st.integers(0, 30)),
    min_size=1,
    max_size=6,
)


@given(recorded=LENGTHS)
def test_sessions_of_lengths(recorded: list[tuple[int, int, float, int | None]]):
    rounds = tuple(Round(append, generated, delay) for append, generated, delay, _ in recorded)
    prefix_tokens = [None, *(None if k is None else min(k, 30) for *_, k in recorded[1:])]
    total = 0
    for index, one in enumerate(rounds):
        if (prefix := prefix_tokens[index]) is not None and prefix >= total:
            prefix_tokens[index] = None
        context = total if prefix_tokens[index] is None else prefix_tokens[index]
        total = (context or 0) + one.append_tokens + one.generated_tokens
    edited = any(one is not None for one in prefix_tokens)
    session = TokenSession(Trajectory("s", rounds), tuple(prefix_tokens) if edited else ())

    assert again([session], "rounds") == [session]
    assert list(as_lengths([session])) == [session]


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@pytest.mark.parametrize("format", writable("text"))
@given(
    recorded=st.lists(st.tuples(TEXTS, TEXTS, st.integers(1, 9), DELAYS), min_size=1, max_size=5)
)
def test_sessions_of_texts(format: str, recorded: list[tuple[str, str, int, float]]):
    counted = format == "agentperf"  # it has no answers, only how long they were
    turns = tuple(
        TextTurn(
            messages=(Message("user", asked),),
            answer_text="" if counted else answer,
            generate_tokens=tokens if counted else None,
            delay_s=delay_s if index else 0.0,
        )
        for index, (asked, answer, tokens, delay_s) in enumerate(recorded)
    )
    session = TextSession("s", turns)

    assert again([session], format) == [session]


@given(sessions=block_sessions())
def test_lengths_of_block_ids_preserve_shared_prefixes(sessions: list[BlockSession]):
    for session in sessions:
        alone = msgspec.structs.replace(session, sub_agents=())
        (lengths,) = as_lengths([alone])
        conversation = alone.start(AgentSettings(), Contents(Vocabulary()))
        planned = list(lengths.planned(AgentSettings()))

        for one in planned:
            turn = conversation.next_turn()
            assert turn is not None
            assert one.context_tokens + one.append_tokens == turn.prompt.tokens
            # At least one token is appended, as by every prompt of lengths.
            assert one.context_tokens >= turn.context_tokens - 1
            conversation.record()
        assert conversation.next_turn() is None


def test_every_kind_of_session_has_a_format_that_writes_it():
    assert {kind for kind in FORMATS.values() if kind} == {"lengths", "blocks", "text"}
