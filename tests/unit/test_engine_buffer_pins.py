"""Slots are pinned atomically with the check that the request holds them."""

from tests.engine_harness import GEOMETRY

from dualpath.engine.buffer.block_buffer import BlockBuffer


def test_slots_that_were_released_are_not_pinned_and_not_freed_twice() -> None:
    buffer = BlockBuffer(GEOMETRY, 4, lambda grant: None)
    buffer.request("a", 2)
    slots = buffer.slots_of("a")
    assert buffer.pin_some("a", slots[:1])
    buffer.release("a")
    assert not buffer.pin_some("a", slots[:1])
    assert buffer.free == 3
    buffer.unpin(slots[:1])
    assert buffer.free == buffer.capacity == 4
