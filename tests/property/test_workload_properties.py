"""Invariants of sessions, hit lengths and the event stream."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.core.blocks import block_keys
from dualpath.core.request import Round, Trajectory
from dualpath.router.token_api.wire import EventLines
from dualpath.workload.arrivals import arrival_times_s
from dualpath.workload.conversation.block_session import BlockSession, BlockTurn
from dualpath.workload.conversation.prompts import Contents, Vocabulary
from dualpath.workload.conversation.sessions import AgentSettings, make_agents
from dualpath.workload.conversation.spans import Spans, StoredPrefixes, TokenIds, hit_tokens
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import weka
from dualpath.workload.formats.lines import Document
from dualpath.workload.replay.result import distribution

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=6)
ROUNDS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=8)


@given(sent=SEQUENCES, prompt=st.lists(st.integers(0, 2), max_size=24), size=st.integers(1, 5))
def test_the_ideal_hit_is_the_longest_run_of_known_block_keys(
    sent: list[list[int]], prompt: list[int], size: int
):
    stored: StoredPrefixes[TokenIds] = StoredPrefixes()
    known: set[bytes] = set()
    for tokens in sent:
        stored.add(TokenIds.of(tokens))
        known.update(block_keys(tokens, size))

    expected = 0
    for key in block_keys(prompt[:-1], size):
        if key not in known:
            break
        expected += size
    common = stored.common_tokens(TokenIds.of(prompt))
    assert hit_tokens(common, len(prompt), size) == expected


RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 4)), max_size=6)


def spans(runs: list[tuple[int, int, int]]) -> Spans:
    return Spans().then(*(Spans.of(content, a, a + count) for content, a, count in runs))


def places(sequence: Spans) -> list[tuple[int, int]]:
    return [(content, i) for content, a, b, _ in sequence.spans for i in range(a, b)]


@given(left=RUNS, right=RUNS, start=st.integers(0, 20), stop=st.integers(0, 20))
def test_sequences_of_spans_behave_as_lists_of_their_tokens(
    left: list[tuple[int, int, int]], right: list[tuple[int, int, int]], start: int, stop: int
):
    one, two = spans(left), spans(right)
    ours, theirs = places(one), places(two)

    assert ours == [(content, i) for content, a, n in left for i in range(a, a + n)]
    assert one.tokens == len(ours)
    assert (one == two) == (ours == theirs)
    assert places(one.then(two)) == ours + theirs
    assert one.first(stop) == spans([(content, i, 1) for content, i in ours[:stop]])
    assert one.between(start, stop) == spans([(content, i, 1) for content, i in ours[start:stop]])
    pairs = list(zip(ours, theirs, strict=False))
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert one.common_tokens(two) == same


@given(pairs=ROUNDS, seed=st.integers(0, 2**40))
def test_pure_appends_chain_prompt_answer_append(pairs: list[tuple[int, int]], seed: int):
    session = TokenSession(Trajectory("s", tuple(Round(a, g) for a, g in pairs)))
    conversation = session.start(AgentSettings(), Contents(Vocabulary(seed, 10, 99)))
    context: list[int] = []

    for append, generate in pairs:
        turn = conversation.next_turn()
        assert turn is not None
        prompt = conversation.token_ids(turn)
        assert prompt[: len(context)] == context
        assert len(prompt) == len(context) + append
        assert turn.generate_tokens == generate
        assert all(10 <= token < 99 for token in prompt[len(context) :])
        answer = [7] * generate
        conversation.record(answer)
        context = prompt + answer
    assert conversation.next_turn() is None


@given(pairs=ROUNDS, limit=st.integers(1, 120))
def test_no_turn_exceeds_the_context_limit(pairs: list[tuple[int, int]], limit: int):
    session = TokenSession(Trajectory("s", tuple(Round(a, g) for a, g in pairs)))
    conversation = session.start(AgentSettings(max_context_tokens=limit), Contents(Vocabulary()))
    whole = sum(append + generated for append, generated in pairs)

    while (turn := conversation.next_turn()) is not None:
        assert turn.generate_tokens >= 1
        assert len(conversation.token_ids(turn)) + turn.generate_tokens <= limit
        conversation.record([7] * turn.generate_tokens)
    assert conversation.truncated == (whole > limit)


BLOCK_TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 9)
    ),
    min_size=1,
    max_size=6,
)


@given(recorded=BLOCK_TURNS)
def test_a_block_id_never_changes_its_tokens(recorded: list[tuple[list[int], int, int]]):
    turns = tuple(
        BlockTurn(4 * len(ids) + rest, generated, tuple((i, i) for i in ids))
        for ids, rest, generated in recorded
    )
    conversation = BlockSession("s", 4, turns).start(AgentSettings(), Contents(Vocabulary()))
    tokens_of: dict[int, list[int]] = {}

    for number, (ids, rest, generated) in enumerate(recorded):
        turn = conversation.next_turn()
        assert turn is not None
        prompt = conversation.token_ids(turn)
        assert len(prompt) == 4 * len(ids) + rest
        for place, block_id in enumerate(ids):
            block = prompt[4 * place : 4 * place + 4]
            assert tokens_of.setdefault(block_id, block) == block
        conversation.record([90000 + number] * generated)


@given(ids=st.lists(st.integers(0, 20), min_size=1, max_size=40))
def test_weka_ids_survive_the_short_form(ids: list[int]):
    trace = {"id": "w", "block_size": 1, "requests": [{"in": len(ids), "out": 1, "hash_ids": ids}]}

    (session,) = weka.read([Document("t.json", 1, json.dumps(trace).encode())])

    assert isinstance(session, BlockSession)
    ranges = session.block_turns[0].id_ranges
    assert [i for first, last in ranges for i in range(first, last + 1)] == ids


@given(
    payloads=st.lists(st.text(st.characters(blacklist_categories=["Cs", "Zs", "Cc"])), max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_the_event_stream_may_be_cut_anywhere(payloads: list[str], cuts: list[int]):
    raw = "".join(f": comment\r\ndata: {p}\r\n\r\n" for p in payloads).encode()
    places = sorted({0, len(raw), *(c for c in cuts if c < len(raw))})
    lines = EventLines()

    received = [
        payload for start, end in pairwise(places) for payload in lines.feed(raw[start:end])
    ]

    assert received == [p.encode().strip() for p in payloads]


@given(agents=st.integers(1, 12), seed=st.integers(0, 100))
def test_agents_have_unique_ids_and_begin_with_the_recorded_ones(agents: int, seed: int):
    recorded = [TokenSession(Trajectory(name, (Round(4, 1),))) for name in "abc"]

    made = make_agents(recorded, agents, seed)

    assert len({agent.session_id for agent in made}) == len(made) == agents
    assert made[:3] == recorded[:agents]
    assert made == make_agents(recorded, agents, seed)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_poisson_arrivals_have_the_rate(seed: int):
    times_s = arrival_times_s(4000, 2.0, seed)

    assert times_s == sorted(times_s)
    assert 1.8 < 4000 / times_s[-1] < 2.2


@given(values=st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_ordered_and_bounded(values: list[float]):
    result = distribution([*values, None])

    assert result is not None
    assert result.count == len(values)
    assert min(values) <= result.p50 <= result.p90 <= result.p99 <= result.max == max(values)
