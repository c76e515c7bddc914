"""A Full Block is its layers in order, a layer its parts in order."""

import msgspec
import pytest

from dualpath.core.blocks import BlockGeometry, LayerPart, StoreNamespace

UNEQUAL = BlockGeometry(4, ((700, 50), (100,), (30, 20, 10)))


def test_parts_are_adjacent() -> None:
    assert UNEQUAL.parts == (
        LayerPart(0, 0, 0, 700),
        LayerPart(0, 1, 700, 50),
        LayerPart(1, 0, 750, 100),
        LayerPart(2, 0, 850, 30),
        LayerPart(2, 1, 880, 20),
        LayerPart(2, 2, 900, 10),
    )
    assert [UNEQUAL.bytes_of(layer) for layer in (None, 0, 1, 2)] == [910, 750, 100, 60]
    assert [UNEQUAL.slice_of(layer) for layer in range(3)] == [
        slice(0, 750),
        slice(750, 850),
        slice(850, 910),
    ]


def test_equal_layers_have_one_part_each() -> None:
    assert BlockGeometry.uniform(2, 64, 100) == BlockGeometry(64, ((100,), (100,)))


def test_only_layers_with_a_window_are_window_layers() -> None:
    windowed = msgspec.structs.replace(UNEQUAL, layer_windows=(0, 128, 0))
    assert [windowed.is_window_layer(layer) for layer in range(3)] == [False, True, False]
    assert not any(map(UNEQUAL.is_window_layer, range(3)))


def test_blocks_of_a_hit_within_the_longest_window_need_all_layers() -> None:
    windowed = msgspec.structs.replace(UNEQUAL, layer_windows=(0, 4, 9))
    # Token 40 is computed next: a window of 4 sees 37 to 40, one of 9 sees 32 to 40.
    assert [windowed.seen_from(layer, 40) for layer in range(3)] == [0, 9, 8]
    assert windowed.whole_from(10) == 8
    assert (windowed.whole_from(0), windowed.whole_from(2)) == (0, 0)
    assert UNEQUAL.whole_from(10) == 0
    assert (windowed.bytes_of(None, whole=False), UNEQUAL.bytes_of(None, whole=False)) == (750, 910)


@pytest.mark.parametrize(
    ("block_tokens", "layer_parts", "layer_windows", "message"),
    [
        (0, ((1,),), (), "blocks of 0 tokens in 1 layers"),
        (4, (), (), "blocks of 4 tokens in 0 layers"),
        (4, ((1,), ()), (), r"layer 1 has parts of \[\] bytes"),
        (4, ((1, 0),), (), r"layer 0 has parts of \[1, 0\] bytes"),
        (4, ((1,),), (0, 8), "windows of .* for 1 layers"),
        (4, ((1,),), (-1,), "windows of .* for 1 layers"),
        (4, ((1,),), (0,), "windows of .* for 1 layers"),
    ],
)
def test_impossible_blocks_are_refused_also_where_they_are_decoded(
    block_tokens: int,
    layer_parts: tuple[tuple[int, ...], ...],
    layer_windows: tuple[int, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        BlockGeometry(block_tokens, layer_parts, layer_windows)
    raw = msgspec.json.encode(
        {
            "block_tokens": block_tokens,
            "layer_parts": layer_parts,
            "layer_windows": layer_windows,
        }
    )
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(raw, type=BlockGeometry)


def test_a_geometry_is_the_same_after_it_was_sent_and_used() -> None:
    assert UNEQUAL.parts
    sent = msgspec.json.decode(msgspec.json.encode(UNEQUAL), type=BlockGeometry)
    assert (sent, hash(sent)) == (UNEQUAL, hash(UNEQUAL))


def test_other_parts_are_another_namespace() -> None:
    digests = {
        StoreNamespace("m", "u8", "l", geometry).digest()
        for geometry in (
            UNEQUAL,
            BlockGeometry(4, ((750,), (100,), (60,))),
            msgspec.structs.replace(UNEQUAL, layer_windows=(0, 8, 0)),
        )
    }
    assert len(digests) == 3
