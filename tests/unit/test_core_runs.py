"""A run of hits is used from assignment to transfer; an inconsistent one is refused."""

import msgspec
import pytest

from dualpath.core.cluster import Role
from dualpath.core.control import Read, decode_router_message, encode, unnumbered
from dualpath.core.errors import IncompatibleError
from dualpath.core.runs import BlockRun, HitRun

RUN = HitRun(Role.DECODE, BlockRun(3, 4))


def test_each_stage_adds_to_a_run_and_drops_nothing() -> None:
    reserved = RUN.with_slots([7, 5, 9, 1])
    assert (reserved.side, reserved.blocks, reserved.slots) == (
        Role.DECODE,
        BlockRun(3, 4),
        (7, 5, 9, 1),
    )
    good = reserved.head(2)
    assert (good.blocks, good.slots) == (BlockRun(3, 2), (7, 5))
    assert reserved.head(9) == reserved
    assert not reserved.head(0).blocks
    cached = HitRun(Role.DECODE, BlockRun(0, 2), cached=True)
    assert cached.with_slots([4, 3]).head(1) == HitRun(
        Role.DECODE, BlockRun(0, 1), (4,), cached=True
    )


def test_a_run_has_the_number_of_its_windowless_blocks() -> None:
    read = RUN.with_slots([7, 5, 9, 1]).whole_behind(5)
    assert (read.windowless, read.whole_from) == (2, 5)
    assert [read.head(blocks).windowless for blocks in (1, 2, 3)] == [1, 2, 2]
    assert read.part(BlockRun(4, 3)) == HitRun(Role.DECODE, BlockRun(4, 3), (5, 9, 1), windowless=1)
    assert read.part(BlockRun(6, 1)).windowless == 0
    # With a block before the run all its blocks are whole, with one after it none is.
    assert [RUN.whole_behind(block).windowless for block in (0, 3, 7, 90)] == [0, 0, 4, 4]
    cached = HitRun(Role.DECODE, BlockRun(0, 2), cached=True)
    assert cached.whole_behind(2) == cached


@pytest.mark.parametrize(("windowless", "cached"), [(5, False), (-1, False), (1, True)])
def test_a_run_does_not_lack_windows_of_blocks_it_does_not_read(
    windowless: int, cached: bool
) -> None:
    with pytest.raises(ValueError, match=f"{windowless} blocks without windows in a run of 4"):
        msgspec.structs.replace(RUN, windowless=windowless, cached=cached)


def test_only_the_last_block_of_the_hits_can_be_partial() -> None:
    assert RUN.tokens(block_tokens=64, hit_tokens=1000) == 256
    assert RUN.tokens(block_tokens=64, hit_tokens=400) == 208


@pytest.mark.parametrize(
    ("blocks", "slots", "error"),
    [
        ((0, 2), (1,), "2 hit blocks have 1 slots"),
        ((0, 0), (1,), "0 hit blocks have 1 slots"),
        ((-1, 2), (), "a run of hits holds the blocks"),
        ((0, -2), (), "a run of hits holds the blocks"),
    ],
)
def test_an_inconsistent_run_is_refused_also_in_a_message(
    blocks: tuple[int, int], slots: tuple[int, ...], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        HitRun(Role.PREFILL, BlockRun(*blocks), slots)
    sent = Read("r", RUN, 0, 1.0)
    received = decode_router_message(encode(unnumbered(sent))).message
    assert received == sent
    *envelope, read = msgspec.to_builtins(unnumbered(sent), builtin_types=(bytes,))
    read["run"]["blocks"] = {"first": blocks[0], "count": blocks[1]}
    read["run"]["slots"] = slots
    with pytest.raises(IncompatibleError, match=error):
        decode_router_message(msgspec.msgpack.encode([*envelope, read]))
