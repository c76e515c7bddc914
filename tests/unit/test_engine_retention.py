"""Orders to keep blocks for agents: they end, add up to no more than the buffer, and overlap."""

from collections.abc import Sequence

from tests.engine_harness import GEOMETRY, full_block, prompt_keys

from dualpath.core.blocks import BlockKey, chain_root
from dualpath.core.control import Retain
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.kept_blocks import with_parents
from dualpath.engine.retention import Retention

KEYS = tuple(prompt_keys(8 * GEOMETRY.block_tokens))
OLD, NEW = KEYS[:2], KEYS[2:4]
S = 1_000_000_000


class Engine:
    """A buffer of four slots with two contexts of two blocks, the old one used before the new."""

    def __init__(self) -> None:
        self.buffer = BlockBuffer(GEOMETRY, 4, lambda grant: None)
        self.fetched: list[Sequence[BlockKey]] = []
        self.left_out: list[Sequence[BlockKey]] = []
        self.retention = Retention(self.buffer, self.fetched.append, self.left_out.append)
        for context in (OLD, NEW):
            for key, parent in with_parents(context, chain_root()):
                self.buffer.keep_copy(key, parent, memoryview(full_block(key)))

    def order(
        self,
        keys: tuple[BlockKey, ...],
        retain_s: float,
        now_s: int = 0,
        expected_s: float = 0.0,
    ) -> None:
        self.retention.order(Retain(keys, retain_s, expected_s=expected_s), now_s * S)

    def left(self) -> tuple[BlockKey, ...]:
        """Return what is left when a request takes two slots."""
        self.buffer.request("r", 2)
        missing = self.buffer.missing(KEYS)
        return tuple(key for key in KEYS if key not in missing)


def test_without_orders_what_was_used_last_stays() -> None:
    assert Engine().left() == NEW


def test_what_is_retained_stays() -> None:
    engine = Engine()
    engine.order(OLD, 30.0)
    engine.retention.expire(29 * S)
    assert engine.left() == OLD


def test_of_all_that_is_retained_that_goes_first_whose_turn_comes_last() -> None:
    engine = Engine()
    engine.order(OLD, 30.0, expected_s=4.0)
    engine.order(NEW, 30.0, now_s=2, expected_s=4.0)
    assert engine.left() == OLD


def test_nothing_is_brought_back_in_place_of_what_is_wanted_sooner() -> None:
    engine = Engine()
    engine.order(OLD, 30.0, expected_s=4.0)
    engine.order(NEW, 30.0, expected_s=6.0)
    later, sooner = KEYS[4], KEYS[5]
    engine.order((later,), 30.0, expected_s=7.0)
    assert engine.buffer.take_for(later) is None
    assert engine.buffer.take_for(KEYS[6]) is None, "nobody expects it"
    engine.retention.end_session()
    engine.order(OLD, 30.0, expected_s=4.0)
    engine.order((sooner,), 30.0, expected_s=1.0)
    assert engine.buffer.take_for(sooner) is not None
    assert NEW[1] in engine.buffer.missing(KEYS)


def test_an_order_ends_by_itself() -> None:
    engine = Engine()
    engine.order(OLD, 30.0)
    engine.retention.expire(30 * S)
    assert engine.left() == NEW


def test_the_later_of_two_ends_counts() -> None:
    engine = Engine()
    engine.order(OLD, 30.0)
    engine.order(OLD, 10.0, now_s=5)
    engine.retention.expire(20 * S)
    assert engine.left() == OLD


def test_what_is_done_goes_first_also_if_it_was_retained() -> None:
    engine = Engine()
    engine.order(NEW, 30.0)
    engine.order(NEW, 0.0)
    assert engine.left_out == [NEW]
    assert engine.left() == OLD


def test_what_nobody_keeps_any_more_is_not_brought_back() -> None:
    engine = Engine()
    engine.order(OLD, 10.0)
    engine.order(NEW, 30.0)
    engine.retention.expire(10 * S)
    assert [tuple(keys) for keys in engine.left_out] == [OLD]
    engine.retention.end_session()
    assert [tuple(keys) for keys in engine.left_out] == [OLD, NEW]


def test_nothing_is_retained_once_the_router_has_forgotten() -> None:
    engine = Engine()
    engine.order(OLD, 30.0)
    engine.retention.end_session()
    assert engine.left() == NEW


def test_orders_are_worth_no_more_than_the_buffer() -> None:
    engine = Engine()
    for number in range(100):
        engine.order(tuple(bytes([number, place] * 16) for place in range(3)), 1e6)
    assert len(engine.retention._until_ns) == 4
    engine.order(OLD, 30.0)
    assert engine.left() == NEW, "no room was left for this order"


def test_what_is_to_be_brought_back_is_fetched() -> None:
    engine = Engine()
    engine.retention.order(Retain(KEYS[:6], 30.0, fetch=True), 0)
    assert engine.fetched == [[*KEYS[:4]]]  # no more than the buffer holds
    engine.retention.order(Retain(KEYS[2:6], 30.0, fetch=True), 0)
    assert engine.fetched[1:] == [[*KEYS[2:4]]]  # nor what no order has room for
