"""Columns of the simulator equal what a replay sends to a perfect store, round by round."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.errors import TraceError
from dualpath.core.request import Round, Trajectory
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.conversation.block_session import BlockSession, BlockTurn, SubAgent
from dualpath.workload.conversation.prompts import Contents, Vocabulary
from dualpath.workload.conversation.sessions import Conversation, Session, Turn, make_agents
from dualpath.workload.conversation.spans import StoredPrefixes, TokenIds, hit_tokens
from dualpath.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.workload.conversation.token_session import TokenSession

#: Above all tokens that sessions send; the server's answers never repeat.
GENERATED = 1 << 30
Row = tuple[int, int, int]
Played = list[list[Row]]


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


class Cluster:
    """A perfect store and a server with answers that never repeat."""

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings
        self._answers = iter(range(GENERATED, 1 << 32))
        self._stored: StoredPrefixes[TokenIds] = StoredPrefixes()

    def play(self, sessions: Sequence[Session]) -> Played:
        """(prompt, hit, generated) of every conversation, round by round side by side."""
        vocabulary = Vocabulary(self._settings.seed, 1000, GENERATED, encode)
        lanes: list[Played] = [[[]] for _ in sessions]
        active: list[tuple[int, Conversation, list[Row]]] = [
            (number, session.start(self._settings, Contents(vocabulary)), lanes[number][0])
            for number, session in enumerate(sessions)
        ]
        while active:
            taken = [(one, turn) for one in active if (turn := self._sent(*one[1:])) is not None]
            active = []
            for (number, conversation, rows), turn in taken:
                self._answer(conversation, turn)
                active.append((number, conversation, rows))
                for helper in conversation.spawned():
                    lanes[number].append([])
                    active.append((number, helper, lanes[number][-1]))
        return [rows for session in lanes for rows in session if rows]

    def _sent(self, conversation: Conversation, rows: list[Row]) -> Turn | None:
        turn = conversation.next_turn()
        if turn is not None:
            prompt = conversation.token_ids(turn)
            common = self._stored.common_tokens(TokenIds.of(prompt))
            hit = hit_tokens(common, len(prompt), self._settings.block_tokens)
            rows.append((len(prompt), hit, turn.generate_tokens))
        return turn

    def _answer(self, conversation: Conversation, turn: Turn) -> None:
        answer = [next(self._answers) for _ in range(turn.generate_tokens)]
        prompt = conversation.token_ids(turn)
        conversation.record(answer)
        self._stored.add(TokenIds.of([*prompt, *answer[:-1]]))


def played(sessions: Sequence[Session], settings: WorkloadSettings) -> Played:
    agents = make_agents(sessions, settings.agents, settings.seed)
    match settings.share_across_sessions:
        case "parallel":
            return Cluster(settings).play(agents)
        case "sequential":
            cluster = Cluster(settings)
            return [rows for agent in agents for rows in cluster.play([agent])]
    return [rows for agent in agents for rows in Cluster(settings).play([agent])]


def rows_of(table: AgentTable) -> Played:
    columns = (table.prompt_tokens, table.hit_tokens, table.generated_tokens)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    begin = table.first_round.tolist()
    return [rows[a:b] for a, b in pairwise(begin)]


def simulated(sessions: Sequence[Session], settings: WorkloadSettings) -> Played:
    try:
        return rows_of(agents_from_sessions(sessions, settings, encode=encode))
    except TraceError:
        return []


LIMITS = st.builds(
    lambda **values: values,
    agents=st.none() | st.integers(1, 6),
    seed=st.integers(0, 5),
    max_turns=st.none() | st.integers(1, 6),
    max_context_tokens=st.none() | st.integers(1, 200),
    scale_generate=st.sampled_from([1.0, 0.5, 2.5]),
)
PAIRS = st.tuples(st.integers(0, 30), st.integers(1, 10))
ROUNDS = st.lists(PAIRS, min_size=1, max_size=8).filter(lambda pairs: pairs[0][0] > 0)


def token_session(name: str, pairs: Sequence[tuple[int, int]]) -> TokenSession:
    return TokenSession(Trajectory(name, tuple(Round(a, g) for a, g in pairs)))


@given(
    pairs=st.lists(ROUNDS, min_size=1, max_size=3),
    limits=LIMITS,
    scale=st.sampled_from([1.0, 0.5, 3.0]),
    block=st.integers(1, 9),
)
def test_pure_appends(
    pairs: list[list[tuple[int, int]]], limits: dict[str, Any], scale: float, block: int
):
    sessions = [token_session(f"s{n}", rounds) for n, rounds in enumerate(pairs)]
    settings = WorkloadSettings(**limits, scale_append=scale, block_tokens=block)

    assert simulated(sessions, settings) == played(sessions, settings)


@given(
    # Scaled down, a round that appends nothing may keep nothing either; that is refused.
    pairs=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=8),
    prefix_tokens=st.lists(st.none() | st.integers(1, 120), min_size=8, max_size=8),
    limits=LIMITS,
    scale=st.sampled_from([1.0, 0.5, 3.0]),
    block=st.integers(1, 9),
)
def test_rounds_that_edit_their_context(
    pairs: list[tuple[int, int]],
    prefix_tokens: list[int | None],
    limits: dict[str, Any],
    scale: float,
    block: int,
):
    session = TokenSession(
        token_session("s", pairs).trajectory, (None, *prefix_tokens[: len(pairs) - 1])
    )
    settings = WorkloadSettings(**limits, scale_append=scale, block_tokens=block)

    assert simulated([session], settings) == played([session], settings)


BLOCK_TOKENS = 4
BLOCK_TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(-3, 9), st.integers(1, 9)
    ),
    min_size=1,
    max_size=6,
)
#: Sessions that mostly go on: the ids of one long prompt, taken up to some place.
GROWING_TURNS = st.lists(
    st.tuples(
        st.integers(1, 12).map(lambda blocks: list(range(blocks))),
        st.integers(-3, 9),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=6,
)


def block_turns(recorded: list[tuple[list[int], int, int]]) -> tuple[BlockTurn, ...]:
    return tuple(
        BlockTurn(BLOCK_TOKENS * len(ids) + rest, generated, tuple((i, i) for i in ids))
        for ids, rest, generated in recorded
    )


@st.composite
def block_sessions(draw: Callable[[Any], Any]) -> BlockSession:
    turns = st.one_of(BLOCK_TURNS, GROWING_TURNS)

    def helpers(rounds: int) -> tuple[SubAgent, ...]:
        return tuple(
            SubAgent(after, BlockSession(f"w/{n}", BLOCK_TOKENS, block_turns(draw(turns)), (), "w"))
            for n, after in enumerate(draw(st.lists(st.integers(-1, rounds - 1), max_size=2)))
        )

    own = block_turns(draw(turns))
    return BlockSession("w", BLOCK_TOKENS, own, helpers(len(own)), "w")


@given(session=block_sessions(), limits=LIMITS, multiple=st.integers(1, 3))
def test_block_ids_and_sub_agents(session: BlockSession, limits: dict[str, Any], multiple: int):
    settings = WorkloadSettings(**(limits | {"agents": None}), block_tokens=multiple * BLOCK_TOKENS)

    assert simulated([session], settings) == played([session], settings)


@given(session=block_sessions(), limits=LIMITS, block=st.integers(1, 9))
def test_block_ids_out_of_step_with_blocks_hit_as_in_a_replay(
    session: BlockSession, limits: dict[str, Any], block: int
):
    """Behind a synthetic round, and with blocks of any size."""
    settings = WorkloadSettings(**limits, block_tokens=block)

    assert simulated([session], settings) == played([session], settings)


MESSAGES = st.builds(
    Message, st.sampled_from(["user", "assistant", "tool"]), st.text("ab", max_size=6)
)
TEXT_TURNS = st.lists(
    st.builds(
        TextTurn,
        st.lists(MESSAGES, min_size=1, max_size=5).map(tuple),
        st.text("ab", max_size=5),
        st.none() | st.integers(1, 5),
    ),
    min_size=1,
    max_size=4,
)


@given(
    recorded=st.lists(TEXT_TURNS, min_size=1, max_size=3),
    limits=LIMITS,
    block=st.integers(1, 40),
    share=st.sampled_from(["none", "parallel", "sequential"]),
)
def test_text(recorded: list[list[TextTurn]], limits: dict[str, Any], block: int, share: Any):
    sessions = [TextSession(f"t{n}", tuple(turns)) for n, turns in enumerate(recorded)]
    if share != "none":
        # Additional agents share no blocks here: a replay's might, after the synthetic round.
        limits = limits | {"agents": None}
    settings = WorkloadSettings(**limits, block_tokens=block, share_across_sessions=share)

    assert simulated(sessions, settings) == played(sessions, settings)


SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8)


@given(stored=SEQUENCES, prompt=st.lists(st.integers(0, 2), max_size=12))
def test_the_longest_stored_prefix_is_found(stored: list[list[int]], prompt: list[int]):
    prefixes: StoredPrefixes[TokenIds] = StoredPrefixes()
    for sequence in stored:
        prefixes.add(TokenIds.of(sequence))

    def common(sequence: list[int]) -> int:
        pairs = zip(sequence, prompt, strict=False)
        return next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(len(sequence), len(prompt))
        )

    found = prefixes.common_tokens(TokenIds.of(prompt))
    assert found == max(map(common, stored), default=0)
