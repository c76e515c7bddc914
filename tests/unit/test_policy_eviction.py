"""Which blocks are evicted from a storage, and in which order."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.core.blocks import (
    BlockGeometry,
    BlockKey,
    StoreNamespace,
    block_keys,
    chain_root,
)
from dualpath.storage import chain_index
from dualpath.storage.chain_index import (
    NO_PINS,
    ChainIndex,
    Pins,
    above_watermark,
    earlier_weights,
    pinned_ends,
    victims,
)
from dualpath.storage.janitor import Progress, decode, encode
from dualpath.storage.quotas import StorageLimits

PLACE = "model_0123456789abcdef"
SIZE = 100


def chain(number: int, blocks: int) -> list[BlockKey]:
    return block_keys([number] * blocks, 1)


def add(
    index: ChainIndex, keys: list[BlockKey], time_s: float, tenant: str = "", place: str = PLACE
) -> None:
    for parent, key in itertools.pairwise([chain_root(), *keys]):
        index.add(place, key, parent, tenant, SIZE, time_s)


def gone(
    index: ChainIndex, limits: StorageLimits, now_s: float, pins: Pins = NO_PINS
) -> list[BlockKey]:
    return [index.block(row)[1] for row in victims(index, limits, pins, now_s).tolist()]


def quota(blocks: int, **others: float) -> StorageLimits:
    wanted: dict[str, float] = {"protect_s": 0.0, "high": 1.0, "low": 1.0, **others}
    return StorageLimits(quota_bytes=blocks * SIZE, **wanted)  # type: ignore[arg-type]


def test_the_tail_of_the_least_recently_used_chain_is_evicted_first() -> None:
    index, old, young = ChainIndex(), chain(1, 4), chain(2, 4)
    add(index, old, 1.0)
    add(index, young, 2.0)
    assert gone(index, quota(8), 10.0) == []
    assert gone(index, quota(5), 10.0) == [old[3], old[2], old[1]]
    assert gone(index, quota(2), 10.0) == [*reversed(old), young[3], young[2]]


def test_a_use_of_the_last_block_counts_for_all_its_ancestors() -> None:
    index, first, second = ChainIndex(), chain(1, 100), chain(2, 100)
    add(index, first, 1.0)
    add(index, second, 2.0)
    index.use(PLACE, first[49], 3.0)
    assert gone(index, quota(100), 10.0) == [*reversed(first[50:]), *reversed(second[50:])]


def test_a_shared_head_lives_as_long_as_any_of_its_branches() -> None:
    index = ChainIndex()
    head = chain(1, 3)
    branches = [block_keys([1, 1, 1, n, n], 1) for n in (2, 3)]
    add(index, branches[0], 1.0)
    add(index, branches[1], 5.0)
    assert gone(index, quota(5), 10.0) == [branches[0][4], branches[0][3]]
    assert gone(index, quota(3), 10.0)[2:] == [branches[1][4], branches[1][3]]
    assert set(head).isdisjoint(gone(index, quota(3), 10.0))


def test_eviction_starts_and_stops_at_the_watermarks() -> None:
    index, keys = ChainIndex(), chain(1, 100)
    add(index, keys[:90], 1.0)
    limits = quota(100, high=0.9, low=0.5)
    assert not above_watermark(index, limits)
    assert gone(index, limits, 10.0) == []
    add(index, keys, 1.0)
    assert above_watermark(index, limits)
    assert gone(index, limits, 10.0) == [*reversed(keys[50:])]


def test_used_and_pinned_blocks_are_never_evicted() -> None:
    index, used, pinned, other = ChainIndex(), chain(1, 3), chain(2, 3), chain(3, 3)
    for keys in (used, pinned, other):
        add(index, keys, 1.0)
    index.use(PLACE, used[1], 9.0)
    pins = Pins(chains=frozenset({(PLACE, pinned[1])}))
    found = gone(index, quota(1, protect_s=5.0), 10.0, pins)
    assert sorted(found) == sorted([used[2], pinned[2], *other])
    for pins in (Pins(namespaces=frozenset({PLACE})), Pins(tenants=frozenset({""}))):
        assert gone(index, quota(1), 10.0, pins) == []


def test_a_pinned_chain_stays_while_its_last_block_is_not_stored() -> None:
    index, pinned, other = ChainIndex(), chain(1, 3), chain(2, 3)
    for keys in (pinned, other):
        add(index, keys, 1.0)
    index.remove(PLACE, pinned[2])
    pins = Pins(chains=frozenset({(PLACE, pinned[2]), (PLACE, chain(3, 1)[0])}))
    assert sorted(gone(index, quota(1), 10.0, pins)) == sorted(other)
    index.compact(5.0, pinned_ends(index, pins))
    assert sorted(gone(index, quota(1), 10.0, pins)) == sorted(other)
    index.compact(5.0)
    assert len(gone(index, quota(1), 10.0, pins)) > len(other)


def test_an_unused_prefix_expires() -> None:
    index, keys = ChainIndex(), chain(1, 4)
    add(index, keys, 1.0)
    index.use(PLACE, keys[1], 50.0)
    limits = StorageLimits(ttl_s=100.0, protect_s=0.0)
    assert gone(index, limits, 101.0) == []
    assert gone(index, limits, 102.0) == [keys[3], keys[2]]
    assert gone(index, limits, 151.0) == [*reversed(keys)]


def test_each_tenant_and_each_namespace_has_its_own_quota() -> None:
    index, mine, yours, generated = ChainIndex(), chain(1, 4), chain(2, 2), chain(1, 5)[4:]
    add(index, mine, 5.0, "a" * 16)
    add(index, yours, 1.0, "b" * 16)
    index.add(PLACE, generated[0], mine[3], "", SIZE, 5.0)
    assert index.used_by_tenant() == {"a" * 16: 5 * SIZE, "b" * 16: 2 * SIZE}
    limits = StorageLimits(tenant_quota_bytes=3 * SIZE, protect_s=0.0, high=1.0, low=1.0)
    assert gone(index, limits, 10.0) == [generated[0], mine[3]]
    add(index, mine, 5.0, "a" * 16, "other_0123456789abcdef")
    limits = StorageLimits(namespace_quota_bytes=4 * SIZE, protect_s=0.0, high=1.0, low=1.0)
    assert gone(index, limits, 10.0) == [yours[1], yours[0], generated[0]]


def test_the_order_of_events_does_not_matter() -> None:
    keys = chain(1, 5)
    pairs = list(itertools.pairwise([chain_root(), *keys]))
    for order in itertools.permutations(range(5)):
        index = ChainIndex()
        index.use(PLACE, keys[2], 7.0)
        for position in order:
            parent, key = pairs[position]
            index.add(PLACE, key, parent, "", SIZE, 1.0)
        assert index.used_bytes == 5 * SIZE
        assert gone(index, quota(1, protect_s=5.0), 10.0) == [keys[4], keys[3]]


@pytest.mark.parametrize("saved_before", [1, 2, 3, 4, None])
@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (2, 4, 0, 1, 3), (1, 0, 4, 3, 2)])
def test_a_block_without_a_tenant_inherits_its_parents_in_any_order(
    order: tuple[int, ...], saved_before: int | None
) -> None:
    index, keys = ChainIndex(), chain(1, 5)
    pairs = list(itertools.pairwise([chain_root(), *keys]))
    for position in order:
        parent, key = pairs[position]
        if position == saved_before:
            found = decode(encode(index, Progress()))
            assert found is not None
            index = found[0]
            index.compact(before_s=5.0)
        index.add(PLACE, key, parent, "a" * 16 if position == 0 else "", SIZE, 1.0)
    assert index.used_by_tenant() == {"a" * 16: 5 * SIZE}
    index.remove(PLACE, keys[1])
    index.add(PLACE, chain(2, 1)[0], chain_root(), "", SIZE, 1.0)
    assert index.used_by_tenant() == {"a" * 16: 4 * SIZE, "": SIZE}


def test_an_index_saved_without_inherited_tenants_gets_them_when_loaded() -> None:
    index, keys = ChainIndex(), chain(1, 9)
    add(index, keys[:2], 1.0, "a" * 16)
    for parent, key in reversed(list(itertools.pairwise(keys[1:]))):
        index.add(PLACE, key, parent, "", SIZE, 1.0)
    add(index, chain(2, 3), 1.0)
    for key in keys[2:]:
        row = index.row(PLACE, key)
        assert row is not None
        index.tables().tenants[row] = 0
    found = decode(encode(index, Progress()))
    assert found is not None
    assert found[0].used_by_tenant() == {"a" * 16: 9 * SIZE, "": 3 * SIZE}


def test_a_removed_block_does_not_count_unless_it_was_used_since() -> None:
    index, keys = ChainIndex(), chain(1, 3)
    add(index, keys, 2.0)
    index.remove(PLACE, keys[2], 1.0)
    index.remove("another", keys[2])
    assert (index.blocks, index.used_bytes) == (3, 3 * SIZE)
    index.remove(PLACE, keys[2])
    index.remove(PLACE, keys[2])
    assert (index.blocks, index.used_bytes) == (2, 2 * SIZE)
    assert index.row(PLACE, keys[2]) is None
    add(index, keys, 3.0)
    add(index, keys, 3.0)
    assert (index.blocks, index.used_by_namespace()) == (3, {PLACE: 3 * SIZE})


def test_compaction_preserves_stored_blocks_and_their_parents() -> None:
    index, keys, dead = ChainIndex(), chain(1, 60), chain(2, 60)
    add(index, keys, 1.0)
    add(index, dead, 1.0)
    for key in dead:
        index.remove(PLACE, key)
    for key in keys[10:50]:
        index.remove(PLACE, key)
    index.compact(before_s=5.0)
    assert len(index.tables().stored) == 60
    index.use(PLACE, keys[59], 9.0)
    assert gone(index, quota(1, protect_s=5.0), 10.0) == []
    assert gone(index, quota(15), 20.0) == [*reversed(keys[55:])]


def test_compaction_leaves_no_more_removed_blocks_than_stored_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain_index, "MAX_UNSTORED", 3)
    index = ChainIndex()
    removed = [chain(number, 1)[0] for number in range(10)]
    for number, key in enumerate(removed):
        add(index, [key], float(number))
        index.remove(PLACE, key)
    index.compact(before_s=0.0)
    assert [index.find(PLACE, key) is not None for key in removed] == [False] * 7 + [True] * 3
    add(index, chain(99, 5), 20.0)
    for number, key in enumerate(removed):
        add(index, [key], 10.0 + number)
        index.remove(PLACE, key)
    index.compact(before_s=0.0)
    assert [index.find(PLACE, key) is not None for key in removed] == [False] * 5 + [True] * 5
    assert index.blocks == 5


def test_compaction_drops_tenants_without_blocks() -> None:
    index, mine = ChainIndex(), chain(0, 3)
    add(index, chain(99, 1), 1.0)
    for number in range(1, 40):
        add(index, chain(number, 2), 1.0, f"{number:016x}")
        for key in chain(number, 2):
            index.remove(PLACE, key)
    add(index, mine, 1.0, "a" * 16)
    index.compact(before_s=5.0)
    assert index.tenants == ["", "a" * 16]
    add(index, chain(40, 2), 6.0, "b" * 16)
    assert index.used_by_tenant() == {"": SIZE, "a" * 16: 3 * SIZE, "b" * 16: 2 * SIZE}
    found = decode(encode(index, Progress()))
    assert found is not None
    assert found[0].used_by_tenant() == index.used_by_tenant()


def test_inconsistent_tables_are_refused() -> None:
    index = ChainIndex()
    add(index, chain(1, 4), 1.0)
    content = encode(index, Progress({"w": 3}, 7.0))
    found = decode(content)
    assert found is not None
    assert found[1] == Progress({"w": 3}, 7.0)
    for position in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 1
        assert decode(bytes(damaged)) is None
        assert decode(content[:position]) is None
    index.tables().parents[1] = 400
    assert decode(encode(index, Progress())) is None


def test_a_block_with_a_new_parent_no_longer_inherits_from_the_old_one() -> None:
    index, first, others = ChainIndex(), chain(1, 1)[0], [chain(n, 1)[0] for n in (2, 3, 4)]
    for key in others:
        index.add(PLACE, key, first, "", SIZE, 1.0)
    index.add(PLACE, others[1], chain(5, 1)[0], "", SIZE, 1.0)
    index.add(PLACE, first, chain_root(), "a" * 16, SIZE, 1.0)
    assert index.used_by_tenant() == {"a" * 16: 3 * SIZE, "": SIZE}
    index.add(PLACE, chain(5, 1)[0], chain_root(), "b" * 16, SIZE, 1.0)
    assert index.used_by_tenant() == {"a" * 16: 3 * SIZE, "b" * 16: 2 * SIZE}


def test_a_cycle_of_parents_terminates() -> None:
    index, keys = ChainIndex(), chain(1, 2)
    index.add(PLACE, keys[0], keys[1], "", SIZE, 1.0)
    index.add(PLACE, keys[1], keys[0], "", SIZE, 1.0)
    index.add(PLACE, chain(2, 1)[0], chain(2, 1)[0], "", SIZE, 1.0)
    assert decode(encode(index, Progress())) is not None
    index.add(PLACE, keys[0], keys[1], "a" * 16, SIZE, 1.0)
    assert index.used_by_tenant() == {"a" * 16: 2 * SIZE, "": SIZE}
    assert sorted(gone(index, quota(1), 10.0)) != []
    index.compact(5.0)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "use", "remove"]),
        st.integers(0, 3),
        st.integers(1, 12),
        st.integers(0, 40),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(_STEPS, st.integers(1, 30), st.integers(0, 20), st.booleans())
def test_no_chain_loses_its_middle_and_enough_is_evicted(
    steps: list[tuple[str, int, int, int]], blocks: int, protect_s: int, saved: bool
) -> None:
    index, now_s = ChainIndex(), 40.0
    for what, number, length, time_s in steps:
        keys = block_keys([0, 0, *[number] * 10], 1)[:length]
        if what == "add":
            add(index, keys, float(time_s))
        elif what == "use":
            index.use(PLACE, keys[-1], float(time_s))
        else:
            index.remove(PLACE, keys[-1])
    if saved:
        found = decode(encode(index, Progress()))
        assert found is not None
        index = found[0]
        index.compact(before_s=-1.0)
    limits = quota(blocks, protect_s=float(protect_s))
    before = index.blocks
    stored = {key for key in _keys(index)}
    removed = gone(index, limits, now_s)
    assert set(removed) <= stored
    assert len(set(removed)) == len(removed)
    left = set(stored)
    for key in removed:
        left.discard(key)
        for number in range(4):
            keys = block_keys([0, 0, *[number] * 10], 1)
            if key in keys:
                behind = keys[keys.index(key) + 1 :]
                assert left.isdisjoint(behind), "a block went before one behind it"
    kept_for_use = _in_use(steps, now_s - protect_s)
    assert kept_for_use.isdisjoint(removed)
    if before > blocks:
        assert len(left) <= blocks or not left - kept_for_use


def _keys(index: ChainIndex) -> list[BlockKey]:
    tables = index.tables()
    return [index.block(int(row))[1] for row in np.flatnonzero(tables.stored)]


def _in_use(steps: list[tuple[str, int, int, int]], since_s: float) -> set[BlockKey]:
    """Return the protected rows: chains written or used since then, as far as known."""
    used: set[BlockKey] = set()
    linked: dict[BlockKey, BlockKey] = {}
    for what, number, length, time_s in steps:
        keys = block_keys([0, 0, *[number] * 10], 1)[:length]
        if what == "add":
            linked.update({key: parent for parent, key in itertools.pairwise(keys)})
        if what != "remove" and time_s >= since_s:
            used.update(keys if what == "add" else keys[-1:])
    for key in list(used):
        while (key := linked.get(key, b"")) and key not in used:
            used.add(key)
    return used


@pytest.mark.parametrize("limits", [StorageLimits(), StorageLimits(protect_s=3.0)])
def test_without_limits_nothing_is_evicted(limits: StorageLimits) -> None:
    index = ChainIndex()
    add(index, chain(1, 9), 1.0)
    assert not limits.any
    assert gone(index, limits, 1e9) == []


LOADED = StoreNamespace("m", "bf16", "x", BlockGeometry.uniform(1, 1, 8))
STEPS = {
    "loaded_0": LOADED,
    "first_1": LOADED.with_weights("step-1-0123456789abcdef"),
    "second_2": LOADED.with_weights("step-2-0123456789abcdef"),
    "other_3": StoreNamespace("n", "bf16", "x", BlockGeometry.uniform(1, 1, 8)).with_weights(
        "step-1-0123456789abcdef"
    ),
}


def test_blocks_of_earlier_weights_are_evicted_before_all_others() -> None:
    index = ChainIndex()
    for number, place in enumerate(("other_3", "loaded_0", "first_1", "second_2")):
        add(index, chain(number, 2), 1.0 + number, place=place)
    earlier = earlier_weights(index, STEPS)
    assert earlier == {"first_1"}
    rows = victims(index, quota(3), NO_PINS, 10.0, earlier).tolist()
    # Then by their last use: also weights whose model has had no later ones.
    assert [index.block(row)[0] for row in rows] == ["first_1"] * 2 + ["other_3"] * 2 + ["loaded_0"]


def test_weights_that_were_used_last_are_those_of_no_earlier_step() -> None:
    index = ChainIndex()
    add(index, chain(1, 2), 1.0, place="second_2")
    add(index, chain(2, 2), 2.0, place="first_1")
    assert earlier_weights(index, STEPS) == {"second_2"}
    # Engines that are started again have the weights of their model.
    add(index, chain(3, 2), 3.0, place="loaded_0")
    assert earlier_weights(index, STEPS) == {"first_1", "second_2"}


def test_without_descriptions_no_weights_are_earlier() -> None:
    index = ChainIndex()
    add(index, chain(1, 2), 1.0, place="first_1")
    assert earlier_weights(index, {}) == frozenset()
