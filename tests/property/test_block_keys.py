"""Keys made fast and keys remembered are the chain's definition, whatever the tokens are."""

import hashlib

import cbor2
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.core.blocks import (
    KeyExtras,
    PromptItem,
    are_tokens,
    block_keys,
    chain_root,
    encoded_blocks,
    token_array,
)
from dualpath.core.key_cache import RUN_TOKENS, KeyCache

#: Around every width of CBOR's integers, and beyond those that numpy encodes.
EDGES = [n for edge in (24, 1 << 8, 1 << 16, 1 << 32) for n in (edge - 1, edge)]
TOKENS = st.one_of(st.sampled_from([0, 1, *EDGES[:-1]]), st.integers(0, 200_000))
ANY_IDS = st.one_of(TOKENS, st.sampled_from([-1, EDGES[-1], 1 << 64]))
SALTS = st.none() | st.text(max_size=3)


def defined(tokens, block_tokens, salt=None, extra=(), items=()):
    """The keys as ``core.blocks`` defines them, block by block."""
    keys, parent = [], chain_root()
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        touching = [
            ("mm", item.identifier, item.first_token - start)
            for item in items
            if item.first_token < start + block_tokens and start < item.end_token
        ]
        extras = (*extra, *touching)
        if start == 0 and salt:
            extras = (*extras, ("cache_salt", salt))
        link = (parent, tuple(tokens[start : start + block_tokens]), extras or None)
        parent = hashlib.sha256(cbor2.dumps(link, canonical=True)).digest()
        keys.append(parent)
    return keys


@given(st.lists(ANY_IDS, max_size=70), st.sampled_from([1, 3, 16, 23, 24, 64]))
def test_tokens_encoded_at_once_are_canonical_cbor(tokens, block_tokens):
    whole = range(0, len(tokens) - block_tokens + 1, block_tokens)
    expected = [cbor2.dumps(tokens[n : n + block_tokens], canonical=True) for n in whole]
    assert encoded_blocks(tokens, block_tokens) == expected


@given(
    st.lists(st.integers(-3, 40) | st.sampled_from([2**31, 2**32 - 1, 2**32, 2**70]), max_size=20),
    st.integers(1, 2**33),
)
def test_tokens_are_numbers_of_the_vocabulary_in_a_list_and_in_an_array(tokens, vocab_size):
    expected = all(0 <= token < vocab_size for token in tokens)
    assert are_tokens(tokens, vocab_size) == expected
    assert are_tokens(token_array(tokens), vocab_size) == expected
    assert list(token_array(tokens)) == tokens


@given(st.lists(ANY_IDS, max_size=40), SALTS, st.sampled_from([(), ("adapter",), (7, "x")]))
def test_block_keys_are_the_chain(tokens, salt, extra):
    keys = block_keys(tokens, 8, cache_salt=salt, extra_keys=extra)
    assert keys == defined(tokens, 8, salt, extra)
    assert block_keys(tuple(tokens), 8, cache_salt=salt, extra_keys=extra) == keys


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), SALTS, st.integers(0, 3 * RUN_TOKENS), TOKENS),
        min_size=1, max_size=12,
    ),
    capacity_runs=st.integers(0, 5),
    block_tokens=st.sampled_from([64, 400, 2 * RUN_TOKENS]),
)  # fmt: skip
def test_cached_keys_equal_computed_keys(turns, capacity_runs, block_tokens):
    """Prompts share prefixes, differ in a token or in salt only, and push each other out."""
    memory = KeyCache(block_tokens, capacity_runs)
    for agent, salt, length, odd_one in turns:
        prompt = list(range(agent, agent + length))
        if odd_one < length:
            prompt[odd_one] = 999_999
        expected = block_keys(prompt, block_tokens, cache_salt=salt)
        assert memory.keys(prompt, KeyExtras(cache_salt=salt)) == expected
        assert memory.keys(prompt, KeyExtras(cache_salt=salt)) == expected
        assert len(memory) <= capacity_runs


@st.composite
def images(draw):
    """Consecutive images of a prompt, with few contents so that prompts share some."""
    found, at = [], 0
    places = st.tuples(st.integers(0, 700), st.integers(1, 300))
    for gap, length in draw(st.lists(places, max_size=5)):
        found.append(PromptItem(draw(st.sampled_from("ab")), at + gap, length))
        at = found[-1].end_token
    return tuple(found)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(images(), SALTS, st.sampled_from([(), (("lora", "x", "/x"),)])),
        min_size=1, max_size=5,
    ),
    length=st.integers(0, 3 * RUN_TOKENS),
    block_tokens=st.sampled_from([64, 400]),
)  # fmt: skip
def test_prompts_of_equal_tokens_share_keys_up_to_the_first_different_extra(
    prompts, length, block_tokens
):
    """With other images, adapters or salts a prompt never gets another prompt's cached keys."""
    memory, tokens = KeyCache(block_tokens), list(range(length))
    for items, salt, every in prompts:
        extras = KeyExtras(every, salt, items)
        expected = defined(tokens, block_tokens, salt, every, items)
        assert memory.keys(tokens, extras) == expected
        assert memory.keys(tokens, extras) == expected


def test_a_cached_prefix_is_not_computed_again(monkeypatch):
    memory = KeyCache(64)
    context = list(range(10 * RUN_TOKENS))
    memory.keys(context)
    computed = []

    def counting(tokens, block_tokens):
        computed.append(len(tokens))
        return encoded_blocks(tokens, block_tokens)

    monkeypatch.setattr("dualpath.core.blocks.encoded_blocks", counting)
    memory.keys([*context, *range(100)])
    memory.keys([*context, *range(100)], KeyExtras(cache_salt="tenant"))
    assert computed == [100, 10 * RUN_TOKENS + 100]


def test_the_first_run_of_a_prompt_is_evicted_last(monkeypatch):
    memory = KeyCache(64, capacity_runs=2)
    context = list(range(4 * RUN_TOKENS))
    memory.keys(context)
    monkeypatch.setattr(
        "dualpath.core.blocks.encoded_blocks",
        lambda tokens, _: [] if len(tokens) == 0 else [b""] * 99,
    )
    assert len(memory.keys(context[: 2 * RUN_TOKENS])) == 2 * RUN_TOKENS // 64


@given(st.integers(8, 40), st.integers(0, 40), st.sampled_from([None, "salt"]), st.booleans())
def test_a_chain_continues_after_known_keys(length, known_tokens, salt, pictured):
    tokens, memory = list(range(length)), KeyCache(8)
    items = (PromptItem("picture", 13, 7),) if pictured else ()
    known = defined(tokens[:known_tokens], 8, salt, items=items)
    extras = KeyExtras(cache_salt=salt, items=items)
    assert memory.continued(known, tokens, extras) == defined(tokens, 8, salt, items=items)
    # An answer that ended before its first token has no KV of the prompt's last one.
    assert memory.continued(known, tokens[:7], extras) == []
    assert len(memory) == 0
