"""Retention of blocks for agents: it expires, is limited by the buffer, and may overlap."""

from collections.abc import Sequence

import pytest
from tests.engine_harness import GEOMETRY, full_block, prompt_keys

from dualpath.core.blocks import BlockKey, chain_root
from dualpath.core.control import Retain
from dualpath.engine.buffer import dram_tier
from dualpath.engine.buffer.block_buffer import BlockBuffer, with_parents
from dualpath.engine.buffer.dram_tier import Retention

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
                self.buffer.cache_copy(key, parent, memoryview(full_block(key)))

    def retain(
        self,
        keys: tuple[BlockKey, ...],
        retain_s: float,
        now_s: int = 0,
        expected_s: float = 0.0,
    ) -> None:
        self.retention.apply(Retain(b"", keys, retain_s, expected_s=expected_s), now_s * S)

    def left(self) -> tuple[BlockKey, ...]:
        """Return the blocks that are left after a request takes two slots."""
        self.buffer.request("r", 2)
        missing = self.buffer.missing(KEYS)
        return tuple(key for key in KEYS if key not in missing)


def test_without_retention_the_last_used_blocks_stay() -> None:
    assert Engine().left() == NEW


def test_orders_that_are_renewed_or_withdrawn_leave_nothing_behind() -> None:
    engine = Engine()
    for number in range(1000):
        engine.retain(OLD, 86_400.0, now_s=number)
        engine.retain(NEW, 86_400.0 - number, now_s=number)
        engine.retain(NEW, 0.0, now_s=number)
    assert len(engine.retention._ends) <= 2 * engine.buffer.capacity
    assert engine.left() == OLD
    engine.retention.expire((86_400 + 999) * S)
    assert engine.buffer.retained == 0


def test_retained_blocks_stay() -> None:
    engine = Engine()
    engine.retain(OLD, 30.0)
    engine.retention.expire(29 * S)
    assert engine.left() == OLD


def test_of_retained_blocks_the_one_with_the_latest_turn_is_evicted_first() -> None:
    engine = Engine()
    engine.retain(OLD, 30.0, expected_s=4.0)
    engine.retain(NEW, 30.0, now_s=2, expected_s=4.0)
    assert engine.left() == OLD


def test_no_block_is_fetched_in_place_of_one_expected_sooner() -> None:
    engine = Engine()
    engine.retain(OLD, 30.0, expected_s=4.0)
    engine.retain(NEW, 30.0, expected_s=6.0)
    later, sooner = KEYS[4], KEYS[5]
    engine.retain((later,), 30.0, expected_s=7.0)
    assert engine.buffer.allocate_for(later) is None
    assert engine.buffer.allocate_for(KEYS[6]) is None, "no turn is expected to use it"
    engine.retention.end_session()
    engine.retain(OLD, 30.0, expected_s=4.0)
    engine.retain((sooner,), 30.0, expected_s=1.0)
    assert engine.buffer.allocate_for(sooner) is not None
    assert NEW[1] in engine.buffer.missing(KEYS)


def test_a_retention_expires() -> None:
    engine = Engine()
    engine.retain(OLD, 30.0)
    engine.retention.expire(30 * S)
    assert engine.left() == NEW


def test_the_later_of_two_ends_counts() -> None:
    engine = Engine()
    engine.retain(OLD, 30.0)
    engine.retain(OLD, 10.0, now_s=5)
    engine.retention.expire(20 * S)
    assert engine.left() == OLD


def test_finished_blocks_are_evicted_first_even_if_they_were_retained() -> None:
    engine = Engine()
    engine.retain(NEW, 30.0)
    engine.retain(NEW, 0.0)
    assert engine.left_out == [NEW]
    assert engine.left() == OLD


def test_blocks_that_are_no_longer_retained_are_not_fetched() -> None:
    engine = Engine()
    engine.retain(OLD, 10.0)
    engine.retain(NEW, 30.0)
    engine.retention.expire(10 * S)
    assert [tuple(keys) for keys in engine.left_out] == [OLD]
    engine.retention.end_session()
    assert [tuple(keys) for keys in engine.left_out] == [OLD, NEW]


def test_nothing_is_retained_after_the_end_of_the_session() -> None:
    engine = Engine()
    engine.retain(OLD, 30.0)
    engine.retention.end_session()
    assert engine.left() == NEW


def test_retention_is_limited_by_the_buffer() -> None:
    engine = Engine()
    for number in range(100):
        engine.retain(tuple(bytes([number, place] * 16) for place in range(3)), 1e6)
    assert len(engine.retention._until_ns) == 4
    engine.retain(OLD, 30.0)
    assert engine.left() == NEW, "no room was left for this order"


def test_retained_blocks_are_fetched_on_request() -> None:
    engine = Engine()
    engine.retention.apply(Retain(b"", KEYS[:6], 30.0, fetch=True), 0)
    assert engine.fetched == [[*KEYS[:4]]]  # no more than the buffer holds
    engine.retention.apply(Retain(b"", KEYS[2:6], 30.0, fetch=True), 0)
    assert engine.fetched[1:] == [[*KEYS[2:4]]]  # nor blocks beyond the limit of retention


def test_an_order_names_a_prompt_that_was_assigned_by_its_last_key() -> None:
    engine = Engine()
    engine.retention.assigned(OLD[:1])
    engine.retention.apply(Retain(OLD[0], OLD[1:], 30.0), 0)
    assert engine.left() == OLD


def test_an_order_for_a_prompt_that_is_not_known_changes_nothing() -> None:
    engine = Engine()
    engine.retention.apply(Retain(OLD[0], OLD[1:], 30.0), 0)
    engine.retention.assigned(OLD[:1])
    engine.retention.end_session()
    engine.retention.apply(Retain(OLD[0], OLD[1:], 30.0), 0)
    assert engine.buffer.retained == 0
    assert engine.left() == NEW


def test_the_last_prompts_are_known_without_those_that_they_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dram_tier, "MOST_PROMPT_KEYS", 6)
    engine = Engine()
    retention = engine.retention
    for prompt in (KEYS[:2], KEYS[:4], KEYS[6:7], KEYS[:4], (), KEYS):
        retention.assigned(prompt)
    assert retention._prompts == {KEYS[6]: KEYS[6:7], KEYS[3]: KEYS[:4]}
    retention.assigned(KEYS[4:6])
    assert retention._prompts == {KEYS[3]: KEYS[:4], KEYS[5]: KEYS[4:6]}
    assert retention._prompt_keys == 6
