"""The emulated HBM does not allocate a block that a late transfer may still write."""

from dualpath.core.blocks import BlockGeometry
from dualpath_lab.emulated.checkable_kv import KvFunction
from dualpath_lab.emulated.data_plane import EmulatedHbm

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=256)
BLOCKS = 4


def hbm() -> EmulatedHbm:
    return EmulatedHbm(KvFunction(GEOMETRY), 2, BLOCKS * 2 * GEOMETRY.bytes_of(0))


def test_held_blocks_are_free_after_they_are_freed_and_released() -> None:
    made, freed = hbm(), list[int]()
    made.on_freed = lambda: freed.append(made.free_tokens)
    blocks = made.allocate(3)
    assert blocks is not None
    made.hold(blocks[:2])
    made.free(blocks)
    assert made.free_tokens == 2 * GEOMETRY.block_tokens
    assert made.allocate(3) is None
    made.unhold(blocks[:2])
    assert freed == [BLOCKS * GEOMETRY.block_tokens]
    assert set(made.allocate(BLOCKS) or ()) == set(range(BLOCKS))


def test_blocks_released_before_they_are_freed_belong_to_their_request() -> None:
    made, freed = hbm(), list[int]()
    made.on_freed = lambda: freed.append(made.free_tokens)
    blocks = made.allocate(BLOCKS)
    assert blocks is not None
    made.hold(blocks)
    made.unhold(blocks)
    assert (made.free_tokens, freed) == (0, [])
    made.free(blocks)
    assert made.free_tokens == BLOCKS * GEOMETRY.block_tokens


def test_a_block_held_twice_must_be_released_twice() -> None:
    made = hbm()
    blocks = made.allocate(BLOCKS)
    assert blocks is not None
    made.hold(blocks)
    made.hold(blocks)
    made.free(blocks)
    made.unhold(blocks)
    assert made.free_tokens == 0
    made.unhold(blocks)
    assert made.free_tokens == BLOCKS * GEOMETRY.block_tokens


def test_requests_and_reservations_get_blocks_in_the_order_in_which_they_asked() -> None:
    made, order = hbm(), list[str]()
    tokens = (BLOCKS - 1) * GEOMETRY.block_tokens
    made.reserve("first", tokens, 0, lambda blocks: order.append("first"))
    held: list[tuple[int, ...]] = []

    def granted(blocks: tuple[int, ...]) -> None:
        order.append("request")
        held.append(blocks)

    made.request("request", BLOCKS, granted)
    made.reserve("last", 1, 0, lambda blocks: order.append("last"))
    assert order == ["first"], "a block is free, but the request before the last one needs more"
    made.end_reservation("first")
    assert order == ["first", "request"]
    made.free(held[0])
    assert order == ["first", "request", "last"]


def test_a_reservation_that_ends_while_it_waits_lets_others_pass() -> None:
    made, order = hbm(), list[str]()
    tokens = BLOCKS * GEOMETRY.block_tokens
    for name in ("first", "second", "third"):
        made.reserve(name, tokens, 0, lambda blocks, name=name: order.append(name))  # type: ignore[misc]
    made.end_reservation("second")
    made.end_reservation("first")
    assert order == ["first", "third"]
    made.hand_over("third")
    made.end_reservation("third")
    assert made.free_tokens == 0, "the engine's request has the blocks"
