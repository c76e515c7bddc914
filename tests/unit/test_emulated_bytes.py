"""Checkable KV bytes per (token prefix, layer), and the checks that detect wrong ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.blocks import BlockGeometry, LayerPart, block_keys
from dualpath.core.errors import ConfigError
from dualpath.engine.counters import Counters
from dualpath_lab.emulated.checkable_kv import CheckedAt, KvFunction, TokenPrefix, Verifier
from dualpath_lab.emulated.data_plane import EmulatedHbm
from dualpath_lab.emulated.settings import Verify, block_geometry, part_geometry

GEOMETRY = BlockGeometry.uniform(layers=3, block_tokens=4, layer_block_bytes=4 * 3 * 8)
VOCAB = 1000
TOKENS = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def prefix(tokens: list[int], salt: str | None = None, room: int = 64) -> TokenPrefix:
    return TokenPrefix(tokens, 4, cache_salt=salt, vocab_size=VOCAB, capacity_tokens=room)


def filled_hbm(made: TokenPrefix) -> tuple[EmulatedHbm, KvFunction, tuple[int, ...]]:
    function = KvFunction(GEOMETRY)
    hbm = EmulatedHbm(function, GEOMETRY.layers, 8 * GEOMETRY.full_block_bytes)
    blocks = hbm.allocate(3)
    assert blocks is not None
    for layer in range(GEOMETRY.layers):
        hbm.write_blocks(layer, blocks, made.seeds[:3])
    return hbm, function, blocks


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    st.integers(0, 40),
    st.sampled_from([None, "salt"]),
)
def test_a_prefix_is_the_same_whether_it_grew_or_was_given(
    tokens: list[int], first: int, salt: str | None
) -> None:
    given_at_once = prefix(tokens, salt)
    grown = prefix(tokens[:first], salt)
    for token in tokens[first:]:
        grown.append(token)
    assert grown.keys == given_at_once.keys == block_keys(tokens, 4, cache_salt=salt)
    assert np.array_equal(grown.seeds, given_at_once.seeds)
    assert grown.next_token == given_at_once.next_token
    assert 0 <= grown.next_token < VOCAB
    assert grown.tokens == len(tokens)


def test_every_token_changes_the_seeds_of_all_that_follow() -> None:
    seeds, other = prefix(TOKENS).seeds, prefix([5, 99, *TOKENS[2:]]).seeds
    same = (seeds == other).ravel()[: len(TOKENS)]
    assert same.tolist() == [True] + [False] * (len(TOKENS) - 1)


def test_a_salt_separates_kv_but_not_answers() -> None:
    plain, salted = prefix(TOKENS), prefix(TOKENS, "salt")
    assert plain.next_token == salted.next_token
    assert not (plain.seeds[1:3] == salted.seeds[1:3])[0].any()


def test_no_two_words_of_different_layers_or_tokens_are_equal() -> None:
    function, seeds = KvFunction(GEOMETRY), prefix(TOKENS).seeds[:2]
    words = np.stack([function.part_blocks(seeds, layer, 0) for layer in range(GEOMETRY.layers)])
    assert len(np.unique(words)) == words.size


def test_tokens_written_one_by_one_make_the_block_that_is_written_at_once() -> None:
    made = prefix(TOKENS)
    hbm, function, blocks = filled_hbm(made)
    (other,) = hbm.allocate(1) or ()
    for place in range(4):
        hbm.write_token(other, place, made.seeds[1, place])
    written = [hbm.layer(layer)[0][other].ravel() for layer in range(GEOMETRY.layers)]
    assert np.array_equal(np.concatenate(written), function.full_block(made.seeds[1]))
    for layer in range(GEOMETRY.layers):
        (words,) = hbm.layer(layer)
        assert np.array_equal(words[other], words[blocks[1]])


def test_right_blocks_are_counted_and_none_is_wrong() -> None:
    made = prefix(TOKENS)
    hbm, function, blocks = filled_hbm(made)
    verifier = Verifier(function, Verify.FULL, Counters())
    for layer in range(GEOMETRY.layers):
        region = hbm.layer(layer)
        assert verifier.layer_blocks(CheckedAt.PE_HBM, region, blocks, made.seeds, layer) == []
    assert verifier.counts()[CheckedAt.PE_HBM] == (9, 0)


@pytest.mark.parametrize(("verify", "found"), [(Verify.FULL, [1]), (Verify.CHECKSUM, [])])
def test_one_flipped_byte_is_found_where_every_byte_is_compared(
    verify: Verify, found: list[int]
) -> None:
    made = prefix(TOKENS)
    hbm, function, blocks = filled_hbm(made)
    hbm.layer(2)[0][blocks[1]].view(np.uint8)[0, 3, 7] ^= 1
    verifier = Verifier(function, verify, Counters())
    assert verifier.layer_blocks(CheckedAt.DE_HBM, hbm.layer(2), blocks, made.seeds, 2) == found
    assert verifier.counts()[CheckedAt.DE_HBM][1] == len(found)


def test_samples_find_a_block_of_another_prefix_and_of_another_layer() -> None:
    made = prefix(TOKENS)
    hbm, function, blocks = filled_hbm(made)
    verifier = Verifier(function, Verify.SAMPLED, Counters())
    swapped = (blocks[1], blocks[0], blocks[2])
    assert verifier.layer_blocks(CheckedAt.PE_HBM, hbm.layer(0), swapped, made.seeds, 0) == [0, 1]
    assert verifier.layer_blocks(CheckedAt.PE_HBM, hbm.layer(1), blocks, made.seeds, 0) == [0, 1, 2]
    assert verifier.layer_blocks(CheckedAt.PE_HBM, hbm.layer(1), blocks, made.seeds, 1) == []


@pytest.mark.parametrize("verify", [Verify.FULL, Verify.SAMPLED])
def test_full_blocks_in_dram_are_compared_layer_by_layer(verify: Verify) -> None:
    made, function = prefix(TOKENS), KvFunction(GEOMETRY)
    right = memoryview(bytearray(function.full_block(made.seeds[0]).tobytes()))
    torn = memoryview(bytearray(right))
    torn[: GEOMETRY.bytes_of(0)] = bytes(GEOMETRY.bytes_of(0))
    verifier = Verifier(function, verify, Counters())
    seeds = made.seeds[[0, 0]]
    assert verifier.full_blocks(CheckedAt.DE_BUFFER, [right, torn], seeds) == [1]
    assert verifier.counts()[CheckedAt.DE_BUFFER] == (6, 1)


def test_hbm_is_allocated_completely_or_not_at_all() -> None:
    hbm = EmulatedHbm(KvFunction(GEOMETRY), 2, 5 * 2 * GEOMETRY.bytes_of(0))
    assert (hbm.blocks, hbm.layout().capacity_tokens) == (5, 20)
    layers = [[part.region.name for part in parts] for parts in hbm.layout().layers]
    assert layers == [["hbm.0"], ["hbm.1"], ["hbm.0"]]
    held = hbm.allocate(3)
    assert held is not None
    assert hbm.allocate(3) is None
    assert hbm.free_tokens == 8
    hbm.free(held)
    assert hbm.free_tokens == 20


def test_geometry_is_rounded_to_words_and_impossible_ones_are_refused() -> None:
    assert block_geometry(4, 16, 1000.0).bytes_of(0) == 16 * 31 * 8
    assert block_geometry(4, 16, 1.0).bytes_of(0) == 16 * 8
    with pytest.raises(ConfigError, match="above 0"):
        block_geometry(0, 16, 1000.0)
    with pytest.raises(ConfigError, match="multiple of 8 bytes"):
        KvFunction(BlockGeometry.uniform(layers=1, block_tokens=4, layer_block_bytes=36))
    with pytest.raises(ConfigError, match="raise the HBM"):
        EmulatedHbm(KvFunction(GEOMETRY), 3, 100)


@pytest.mark.parametrize(("words", "verify"), [(1, Verify.FULL), (1 << 15, Verify.SAMPLED)])
def test_small_blocks_are_compared_fully_and_large_ones_by_samples(
    words: int, verify: Verify
) -> None:
    geometry = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=4 * words * 8)
    assert Verify.fitting(geometry) is verify


UNEQUAL = part_geometry("24+8,16,8*2,8+16+8", 4)


@pytest.mark.parametrize("regions", [2, UNEQUAL.layers])
def test_every_part_of_unequal_layers_has_bytes_of_its_own(regions: int) -> None:
    made, function = prefix(TOKENS), KvFunction(UNEQUAL)
    hbm = EmulatedHbm(function, regions, 1 << 14)
    verifier = Verifier(function, Verify.FULL, Counters())
    (blocks, other) = (hbm.allocate(3) or (), hbm.allocate(1) or ())
    found = []
    for layer in range(UNEQUAL.layers):  # one at a time, as they share regions
        hbm.write_blocks(layer, blocks, made.seeds[: len(blocks)])
        parts = hbm.layer(layer)
        assert verifier.layer_blocks(CheckedAt.PE_HBM, parts, blocks, made.seeds, layer) == []
        found += [part[blocks[1]].flatten() for part in parts]
        parts[-1][blocks[2]].view(np.uint8)[0, 0] ^= 1
        assert verifier.layer_blocks(CheckedAt.PE_HBM, parts, blocks, made.seeds, layer) == [2]
    assert np.array_equal(np.concatenate(found), function.full_block(made.seeds[1]))
    if regions == UNEQUAL.layers:
        for place in range(4):
            hbm.write_token(other[0], place, made.seeds[1, place])
        written = [p[other[0]].ravel() for layer in range(regions) for p in hbm.layer(layer)]
        assert np.array_equal(np.concatenate(written), function.full_block(made.seeds[1]))


@pytest.mark.parametrize("part", UNEQUAL.parts)
def test_a_wrong_part_of_a_full_block_is_found_in_its_layer(part: LayerPart) -> None:
    made, function = prefix(TOKENS), KvFunction(UNEQUAL)
    block = memoryview(bytearray(function.full_block(made.seeds[0]).tobytes()))
    verifier = Verifier(function, Verify.FULL, Counters())
    assert verifier.full_blocks(CheckedAt.DE_BUFFER, [block], made.seeds) == []
    block[part.offset_bytes + part.size_bytes - 1] ^= 1
    assert verifier.full_blocks(CheckedAt.DE_BUFFER, [block], made.seeds) == [0]
    assert verifier.counts()[CheckedAt.DE_BUFFER] == (2 * UNEQUAL.layers, 1)


def test_layers_and_their_parts_are_described_in_short() -> None:
    assert part_geometry("656+136*2,8", 64).layer_parts == (
        (656 * 64, 136 * 64),
        (656 * 64, 136 * 64),
        (8 * 64,),
    )
    windowed = part_geometry("16@1024*2,8", 4)
    assert windowed.layer_windows == (1024, 1024, 0)
    for wrong in ("", "8@0", "8*2@5", "8*0", "0", "8+", "8,,8", "8*1001", "-8"):
        with pytest.raises(ConfigError, match="layer_parts has"):
            part_geometry(wrong, 64)
