"""The prompts that each kind of session sends, turn by turn."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dualpath.core.errors import ConfigError
from dualpath.core.request import Round, Trajectory
from dualpath.workload.conversation.block_session import BlockSession, BlockTurn, SubAgent
from dualpath.workload.conversation.prompts import (
    Contents,
    Vocabulary,
    load_encoder,
    token_range,
)
from dualpath.workload.conversation.sessions import AgentSettings, Conversation, Session
from dualpath.workload.conversation.spans import StoredPrefixes, TokenIds, hit_tokens
from dualpath.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import read_trace


def encode(text: str) -> list[int]:
    """One token per character."""
    return [ord(character) for character in text]


SETTINGS = AgentSettings()


def contents() -> Contents:
    return Contents(Vocabulary(encode=encode))


GENERATED = 7_000_000


def play(conversation: Conversation) -> tuple[list[list[int]], list[list[int]]]:
    """Run a session against a server with recognizable answers; return both sides."""
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    while (turn := conversation.next_turn()) is not None:
        prompts.append(conversation.token_ids(turn))
        base = GENERATED + 1000 * len(answers)
        answers.append(list(range(base, base + turn.generate_tokens)))
        conversation.record(answers[-1])
    return prompts, answers


def rounds(*pairs: tuple[int, int]) -> TokenSession:
    return TokenSession(Trajectory("s", tuple(Round(a, g) for a, g in pairs)))


def text(prompt: Sequence[int]) -> str:
    return "".join(chr(token) if token < GENERATED else "#" for token in prompt)


def test_scaling_multiplies_lengths_and_preserves_the_prefix_chain():
    settings = AgentSettings(scale_append=2.0, scale_generate=0.5)

    prompts, answers = play(rounds((10, 4), (3, 1)).start(settings, contents()))

    assert [len(p) for p in prompts] == [20, 28]
    assert [len(a) for a in answers] == [2, 1]
    assert prompts[1][:22] == prompts[0] + answers[0]


def test_an_edited_context_retains_its_share_when_scaled():
    session = TokenSession(Trajectory("s", (Round(10, 10), Round(4, 1))), (None, 10))

    prompts, _ = play(
        session.start(AgentSettings(scale_append=3.0, scale_generate=3.0), contents())
    )

    assert len(prompts[1]) == 30 + 12
    assert prompts[1][:30] == prompts[0]


def test_the_context_limit_cuts_the_last_turn_and_ends_the_conversation():
    conversation = rounds((10, 4), (3, 9), (1, 1)).start(
        AgentSettings(max_context_tokens=20), contents()
    )

    _, answers = play(conversation)

    assert [len(answer) for answer in answers] == [4, 3]
    assert conversation.truncated


def test_most_turns():
    assert (
        len(play(rounds((5, 1), (5, 1), (5, 1)).start(AgentSettings(max_turns=2), contents()))[0])
        == 2
    )


def test_next_turn_and_record_must_alternate():
    conversation = rounds((5, 1), (5, 1)).start(SETTINGS, contents())

    with pytest.raises(RuntimeError, match="no turn to record"):
        conversation.record([1])
    conversation.next_turn()
    with pytest.raises(RuntimeError, match="record"):
        conversation.next_turn()


@pytest.mark.parametrize(
    ("vocab_size", "expected"), [(None, (1000, 30000)), (49152, (1000, 49152)), (100, (50, 100))]
)
def test_random_tokens_avoid_the_low_special_ones(
    vocab_size: int | None, expected: tuple[int, int]
):
    assert token_range(vocab_size) == expected


SYSTEM, USER = Message("system", "S"), Message("user", "U")
ANSWER, TOOL = Message("assistant", "recorded"), Message("user", "T")


def test_a_text_prompt_continues_after_the_generated_tokens():
    session = TextSession(
        "s",
        (
            TextTurn((SYSTEM, USER), "recorded"),
            TextTurn((SYSTEM, USER, ANSWER, TOOL), "yes"),
        ),
    )

    prompts, answers = play(session.start(SETTINGS, contents()))

    opening = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text(prompts[0]) == opening
    assert [len(answer) for answer in answers] == [len("recorded"), len("yes")]
    assert prompts[1][: len(prompts[0]) + 8] == prompts[0] + answers[0]
    assert text(prompts[1]).endswith(
        "########<|im_end|>\n<|im_start|>user\nT<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_replaced_last_message_shortens_the_common_prefix_but_not_the_answer():
    counter = [Message("user", f"turn {n}") for n in range(2)]
    session = TextSession(
        "s",
        (
            TextTurn((SYSTEM, USER, counter[0]), generate_tokens=5),
            TextTurn((SYSTEM, USER, ANSWER, TOOL, counter[1]), generate_tokens=5),
        ),
    )
    conversation = session.start(SETTINGS, contents())
    first = conversation.next_turn()
    conversation.record(range(GENERATED, GENERATED + 5))
    second = conversation.next_turn()
    assert first is not None
    assert second is not None

    common = len("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n")
    sent = [conversation.token_ids(turn) for turn in (first, second)]
    assert second.context_tokens == common
    assert sent[1][:common] == sent[0][:common]
    assert "<|im_start|>assistant\n#####<|im_end|>\n" in text(sent[1])
    assert "recorded" not in text(sent[1])


def test_text_needs_a_tokenizer_and_cannot_be_scaled():
    session = TextSession("s", (TextTurn((USER,)),))

    with pytest.raises(ConfigError, match="--tokenizer"):
        session.start(SETTINGS, Contents(Vocabulary()))
    with pytest.raises(ConfigError, match="scale_append is 2"):
        session.start(AgentSettings(scale_append=2.0), contents())


def blocks(*turns: tuple[int, int, tuple[tuple[int, int], ...]], **more: Any) -> BlockSession:
    return BlockSession("w", 4, tuple(BlockTurn(p, g, r) for p, g, r in turns), **more)


def test_equal_block_ids_are_equal_tokens_and_others_differ():
    session = blocks((8, 1, ((1, 2),)), (8, 1, ((7, 7), (2, 2))), (8, 1, ((1, 1), (3, 3))))

    prompts, _ = play(session.start(SETTINGS, contents()))

    assert prompts[1][4:] == prompts[0][4:]
    assert prompts[2][:4] == prompts[0][:4]
    assert prompts[1][:4] != prompts[0][:4]


def test_a_prompt_of_blocks_continues_after_the_generated_tokens():
    # 10 prompt tokens are 2 blocks and a partial one, which the next prompt's block 3 completes.
    session = blocks((10, 5, ((1, 2),)), (20, 1, ((1, 5),)), (20, 1, ((1, 5),)))

    prompts, answers = play(session.start(SETTINGS, contents()))

    assert prompts[1][:15] == prompts[0] + answers[0]
    assert prompts[2] == prompts[1]


def test_a_compacted_prompt_of_blocks_does_not_contain_the_answer():
    session = blocks((8, 4, ((1, 2),)), (12, 1, ((1, 1), (8, 9))))

    prompts, _ = play(session.start(SETTINGS, contents()))

    assert prompts[1][:4] == prompts[0][:4]
    assert max(prompts[1]) < GENERATED


def test_sub_agents_share_their_parents_blocks_and_change_nothing_for_it():
    helper = BlockSession("w/h", 4, (BlockTurn(8, 2, ((1, 1), (9, 9))),), (), "w")
    session = blocks((8, 2, ((1, 2),)), (16, 1, ((1, 4),)), sub_agents=(SubAgent(0, helper),))
    alone = play(session.start(SETTINGS, contents()))[0]

    parent = session.start(SETTINGS, contents())
    first = parent.next_turn()
    assert first is not None
    parent.record([GENERATED, GENERATED + 1])
    (child,) = parent.spawned()
    child_prompts, _ = play(child)

    assert child_prompts[0][:4] == parent.token_ids(first)[:4]
    assert parent.spawned() == []
    second = parent.next_turn()
    assert second is not None
    assert parent.token_ids(second)[:8] == alone[1][:8]


def test_blocks_cannot_be_scaled():
    with pytest.raises(ConfigError, match="scale_append is 2"):
        blocks((8, 1, ((1, 2),))).start(AgentSettings(scale_append=2.0), contents())


DATA = Path(os.environ.get("DUALPATH_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))


def ideal_hit_rate(sessions: Sequence[Session]) -> float:
    """Replay with a perfect store with blocks of 64 tokens."""
    hits = tokens = 0
    for session in sessions:
        stored: StoredPrefixes[TokenIds] = StoredPrefixes()
        conversation = session.start(SETTINGS, contents())
        while (turn := conversation.next_turn()) is not None:
            prompt = conversation.token_ids(turn)
            common = stored.common_tokens(TokenIds.of(prompt))
            hits += hit_tokens(common, len(prompt), 64)
            tokens += len(prompt)
            answer = [5] * turn.generate_tokens
            conversation.record(answer)
            stored.add(TokenIds.of(prompt + answer))
    return hits / tokens


@pytest.mark.skipif(not DATA.is_dir(), reason=f"real traces not found at {DATA}")
def test_real_pure_appends_hit_as_published():
    sessions = read_trace(DATA / "mini_swe_gemini3/rounds_dev_dsv3tok.jsonl.xz", limit=40)

    assert 0.95 < ideal_hit_rate(sessions) < 0.985


@pytest.mark.skipif(not DATA.is_dir(), reason=f"real traces not found at {DATA}")
def test_real_block_ids_and_their_recorded_rounds_hit_alike():
    by_blocks = ideal_hit_rate(read_trace(DATA / "kv_cache_tester/dev.jsonl.xz", limit=2))
    by_rounds = ideal_hit_rate(read_trace(DATA / "kv_cache_tester/rounds_dev.jsonl.xz", limit=2))

    assert by_blocks == pytest.approx(by_rounds, abs=0.02)


def test_a_tokenizer_without_its_file_is_refused_with_the_call_that_writes_it(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json; write one with .*save_pretrained"):
        load_encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a usable tokenizer"):
        load_encoder(tmp_path)
