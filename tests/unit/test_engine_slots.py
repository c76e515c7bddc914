"""Slots are granted FIFO, reused only when no lease or pin is left, and never leak.

A cached block stays in its slot for later requests until the slot is needed.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from dualpath.core.blocks import chain_root
from dualpath.core.errors import BufferTooSmallError
from dualpath.engine.buffer.block_buffer import NO_REQUEST, EvictionPriority, Grant, SlotPool

ROOT = chain_root()


def test_reservations_are_granted_in_order_even_if_a_later_one_would_fit() -> None:
    pool = SlotPool(4)
    assert [g.request_id for g in pool.request("first", 3)] == ["first"]
    assert pool.request("large", 4) == []
    assert pool.request("small", 1) == []
    pool.release("first")
    assert [g.request_id for g in pool.grant()] == ["large"]
    pool.release("large")
    assert [g.request_id for g in pool.grant()] == ["small"]


def test_a_reservation_larger_than_the_buffer_is_refused_with_a_remedy() -> None:
    with pytest.raises(BufferTooSmallError, match=r"needs 5 .* has 4; raise buffer_bytes"):
        SlotPool(4).request("r", 5)


def test_a_pinned_slot_outlives_its_lease() -> None:
    pool = SlotPool(1)
    (grant,) = pool.request("r", 1)
    pool.pin(grant.slots)
    pool.release("r")
    assert pool.free == 0
    pool.unpin(grant.slots)
    assert pool.free == 1


def test_quarantined_slots_are_free_only_when_the_writer_is_confirmed_dead() -> None:
    pool = SlotPool(2)
    pool.request("r", 2)
    pool.quarantine("r")
    assert not pool.release("r")
    assert pool.free == 0
    pool.end_quarantine("r")
    assert pool.free == 2


def test_a_waiting_reservation_can_be_withdrawn() -> None:
    pool = SlotPool(1)
    pool.request("holder", 1)
    pool.request("waiting", 1)
    assert pool.release("waiting")
    pool.release("holder")
    assert pool.grant() == []
    assert pool.free == 1


def test_replaced_slots_are_free_once_the_late_write_is_over() -> None:
    pool = SlotPool(3)
    (grant,) = pool.request("r", 2)
    pool.pin([grant.slots[1]])
    assert pool.replace("r", [grant.slots[1]])
    assert pool.slots_of("r")[0] == grant.slots[0]
    assert pool.slots_of("r")[1] != grant.slots[1]
    assert pool.free == 0
    pool.unpin([grant.slots[1]])
    assert pool.free == 1
    assert not pool.replace("r", pool.slots_of("r"))


KEYS = [bytes([n]) * 32 for n in range(1, 9)]


def served(pool: SlotPool, request_id: str, *keys: bytes, more: int = 0) -> tuple[int, ...]:
    """Serve a request with cached blocks; return its slots."""
    (grant,) = pool.request(request_id, len(keys) + more, keys)
    pool.cache_blocks(request_id, grant.slots[: len(keys)], keys, ROOT)
    pool.release(request_id)
    return grant.slots


def _chain(agent: int, blocks: int) -> tuple[bytes, ...]:
    return tuple(bytes([200, agent, block]) * 11 for block in range(blocks))


def _turn(pool: SlotPool, agent: int, blocks: int) -> int:
    """Serve an agent's turn over the same chain again; return its cached blocks."""
    chain = _chain(agent, blocks)
    (grant,) = pool.request("turn", blocks, chain)
    pool.cache_blocks("turn", grant.slots, chain, ROOT)
    pool.release("turn")
    return grant.cached


def test_the_next_turn_gets_the_slots_of_its_cached_blocks() -> None:
    pool = SlotPool(6)
    slots = served(pool, "turn 1", *KEYS[:3], more=1)
    assert pool.free == 6
    (grant,) = pool.request("turn 2", 5, KEYS[:4])
    assert grant.cached == 3
    assert grant.slots[:3] == slots[:3]
    assert pool.free == 1


def test_requests_share_a_cached_block_and_none_of_them_may_write_to_it() -> None:
    pool = SlotPool(4)
    (first,) = pool.request("a", 2)
    assert pool.may_write("a", first.slots[0])
    pool.cache_blocks("a", first.slots[:1], KEYS[:1], ROOT)
    (second,) = pool.request("b", 2, KEYS[:2])
    assert (second.cached, second.slots[0]) == (1, first.slots[0])
    assert not pool.may_write("a", first.slots[0])
    assert not pool.may_write("b", first.slots[0])
    pool.release("a")
    assert pool.free == 2
    pool.release("b")
    assert pool.free == 4


def test_agents_in_turn_hit_as_many_blocks_as_fit() -> None:
    """Four chains of two blocks come in turn, five slots: the least recently used is the next."""
    pool = SlotPool(5)
    found = [_turn(pool, turn % 4, 2) for turn in range(64)]
    assert sum(found[:8]) == 0, "nothing is known of them yet"
    for start in range(32, 64, 4):
        assert sum(found[start : start + 4]) >= 2, "of three slots beside the one request's"


def test_unused_chains_are_evicted_for_used_ones() -> None:
    pool = SlotPool(5)
    for turn in range(64):
        _turn(pool, turn % 4, 2)
    kept_by = {agent for agent in range(4) if pool.cached.has(_chain(agent, 2)[0])}
    for turn in range(64):
        _turn(pool, 4 + turn % 4, 2)
    assert kept_by
    assert not any(pool.cached.has(key) for agent in kept_by for key in _chain(agent, 2))


def test_a_cached_block_in_the_middle_of_a_chain_is_not_a_hit() -> None:
    pool = SlotPool(6)
    served(pool, "a", *KEYS[:3])
    (grant,) = pool.request("b", 3, (KEYS[7], *KEYS[1:3]))
    assert grant.cached == 0


def test_a_reservation_takes_free_slots_first_and_then_the_tails_of_old_chains() -> None:
    pool = SlotPool(6)
    old = served(pool, "old", *KEYS[:2])
    new = served(pool, "new", *KEYS[2:4])
    (grant,) = pool.request("r", 3)
    assert set(grant.slots[:2]).isdisjoint(old + new)
    assert grant.slots[2] == old[1]
    (more,) = pool.request("s", 2)
    assert more.slots == (old[0], new[1])


def test_a_chain_that_grew_is_evicted_from_its_tail() -> None:
    pool = SlotPool(4)
    head = served(pool, "prompt", *KEYS[:2])
    for key, parent in ((KEYS[2], KEYS[1]), (KEYS[3], KEYS[2])):
        slot = pool.allocate()
        assert slot is not None
        pool.cache_blocks(NO_REQUEST, [slot], [key], parent)
        pool.free_slot(slot)
    (grant,) = pool.request("other", 3)
    assert grant.slots[2] == head[1]
    assert pool.cached.cached_slots(KEYS) == [head[0]]


def test_a_shared_prefix_stays_while_any_chain_uses_it() -> None:
    pool = SlotPool(3)
    (head, _) = served(pool, "a", KEYS[0], KEYS[1])
    (grant,) = pool.request("b", 2, [KEYS[0], KEYS[2]])
    pool.cache_blocks("b", grant.slots, [KEYS[0], KEYS[2]], ROOT)
    pool.release("b")
    served(pool, "c", more=2)
    assert pool.cached.cached_slots(KEYS[:1]) == [head]


def test_retained_blocks_are_evicted_last_but_before_a_request_waits() -> None:
    pool = SlotPool(6)
    retained = served(pool, "a", *KEYS[:2])
    pool.cached.retain(KEYS[:2], 0)
    others = served(pool, "b", *KEYS[2:4]) + served(pool, "c", *KEYS[4:6])
    (grant,) = pool.request("r", 4)
    assert set(grant.slots) == set(others)
    (rest,) = pool.request("s", 2)
    assert rest.slots == (retained[1], retained[0])


def test_blocks_cached_later_are_retained_as_well_until_unretained() -> None:
    pool = SlotPool(4)
    pool.cached.retain(KEYS[:2], 0)
    retained = served(pool, "a", *KEYS[:2])
    other = served(pool, "b", *KEYS[2:4])
    pool.cached.unretain(KEYS[:2])
    (grant,) = pool.request("r", 2)
    assert set(grant.slots) == set(retained), "used before the other"
    assert set(pool.cached.cached_slots(KEYS[2:4])) == set(other)


def test_finished_blocks_are_evicted_first_but_not_a_shared_prefix() -> None:
    pool = SlotPool(5)
    (head, old) = served(pool, "a", KEYS[0], KEYS[1])
    (grant,) = pool.request("b", 3, [KEYS[0], KEYS[2], KEYS[3]])
    pool.cache_blocks("b", grant.slots, [KEYS[0], KEYS[2], KEYS[3]], ROOT)
    pool.release("b")
    pool.cached.unretain([KEYS[0], KEYS[2], KEYS[3]], EvictionPriority.EVICT_FIRST)
    served(pool, "more", more=1)  # takes the free slot
    (taken,) = pool.request("r", 3)
    assert pool.cached.cached_slots(KEYS[:2]) == [head, old]
    assert set(taken.slots).isdisjoint((head, old))


def test_a_slot_in_quarantine_never_has_a_cached_block() -> None:
    pool = SlotPool(2)
    (grant,) = pool.request("r", 2)
    pool.quarantine("r")
    pool.cache_blocks("r", grant.slots, KEYS[:2], ROOT)
    pool.end_quarantine("r")
    assert len(pool.cached) == 0
    assert pool.free == 2


def test_cached_blocks_of_an_in_doubt_request_are_not_quarantined() -> None:
    pool = SlotPool(2)
    (grant,) = pool.request("r", 2)
    pool.cache_blocks("r", grant.slots[:1], KEYS[:1], ROOT)
    pool.quarantine("r")
    assert pool.free == 1
    assert pool.quarantined == ("r",)


def test_a_late_write_never_reaches_a_cached_block() -> None:
    pool = SlotPool(3)
    (grant,) = pool.request("r", 1)
    pool.pin(grant.slots)
    assert pool.replace("r", grant.slots)
    pool.cache_blocks("r", grant.slots, KEYS[:1], ROOT)
    pool.unpin(grant.slots)
    assert len(pool.cached) == 0


def test_a_pool_without_caching_evicts_blocks_with_their_leases() -> None:
    pool = SlotPool(4)
    served(pool, "a", *KEYS[:2])
    (held,) = pool.request("b", 2, KEYS[:2])
    pool.set_caching(enabled=False)
    pool.release("b")
    assert held.cached == 2
    assert len(pool.cached) == 0
    served(pool, "c", *KEYS[:2])
    assert len(pool.cached) == 0
    assert pool.free == 4


def test_changes_are_reported_once_and_a_new_report_has_all_keys() -> None:
    pool = SlotPool(2)
    served(pool, "unlistened", KEYS[0])
    pool.cached.report_changes(begin=True)
    served(pool, "a", KEYS[0], KEYS[1])
    assert pool.cached.changes(1) == (KEYS[:1], [])
    assert pool.cached.changes(8) == (KEYS[1:2], [])
    assert pool.cached.changes(8) == ([], [])
    served(pool, "b", KEYS[2])
    assert pool.cached.changes(8) == (KEYS[2:3], KEYS[1:2])
    pool.cached.report_changes(begin=False)
    served(pool, "c", KEYS[3])
    assert pool.cached.changes(8) == ([], [])
    pool.cached.report_changes(begin=True)
    assert set(pool.cached.changes(8)[0]) == {key for _, key in pool.cached.items()}


#: Chains of keys with common heads, as prompts have them.
CHAINS = ([0, 1, 2, 3, 4], [0, 1, 5, 6], [7, 2], [0])
SLOTS = 6


class SlotPoolMachine(RuleBasedStateMachine):
    """In any order of operations: no slot has two writers, none is lost, contents are correct.

    ``memory`` is what was last written to a slot: a request writes the blocks of its chain that it
    did not find, and only where the pool lets it.
    """

    requests: Bundle[str] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(SLOTS)
        self.pool.cached.report_changes(begin=True)
        self.pins: list[tuple[int, ...]] = []
        self.late: list[tuple[int, bytes]] = []
        self.chains: dict[str, list[bytes]] = {}
        self.memory: dict[int, bytes] = {}
        self.reported: set[bytes] = set()
        self.number = 0

    def granted(self, grants: list[Grant]) -> None:
        for grant in grants:
            chain = self.chains[grant.request_id]
            for slot, key in zip(grant.slots[: grant.cached], chain, strict=False):
                assert self.memory[slot] == key
                assert not self.pool.may_write(grant.request_id, slot)
            for slot in grant.slots[grant.cached :]:
                assert self.pool.may_write(grant.request_id, slot)
                self.memory[slot] = grant.request_id.encode()

    @rule(target=requests, count=st.integers(1, SLOTS), chain=st.sampled_from(CHAINS))
    def reserve(self, count: int, chain: list[int]) -> str:
        self.number += 1
        request = f"r{self.number}"
        self.chains[request] = [KEYS[n] for n in chain]
        self.granted(self.pool.request(request, count, self.chains[request]))
        return request

    @rule(request=requests, blocks=st.integers(1, SLOTS))
    def complete(self, request: str, blocks: int) -> None:
        slots = self.pool.slots_of(request)[:blocks]
        keys = self.chains[request][: len(slots)]
        for slot, key in zip(slots, keys, strict=False):
            if self.pool.may_write(request, slot):
                self.memory[slot] = key
        self.pool.cache_blocks(request, slots[: len(keys)], keys, ROOT)

    @rule(key=st.integers(1, 7))
    def generate(self, key: int) -> None:
        self.cache_block(self.pool.allocate(), key)

    @rule(key=st.integers(1, 7))
    def fetch(self, key: int) -> None:
        if not self.pool.cached.has(KEYS[key]):
            self.cache_block(self.pool.allocate_for(KEYS[key]), key)

    def cache_block(self, slot: int | None, key: int) -> None:
        if slot is not None:
            self.memory[slot] = KEYS[key]
            self.pool.cache_blocks(NO_REQUEST, [slot], [KEYS[key]], KEYS[key - 1])
            self.pool.free_slot(slot)

    @rule(request=requests)
    def release(self, request: str) -> None:
        self.pool.release(request)
        self.granted(self.pool.grant())

    @rule(
        chain=st.sampled_from(CHAINS),
        priority=st.sampled_from(EvictionPriority),
        expected_ns=st.integers(0, 3),
    )
    def prioritize(self, chain: list[int], priority: EvictionPriority, expected_ns: int) -> None:
        keys = [KEYS[n] for n in chain]
        if priority is EvictionPriority.EVICT_LAST:
            self.pool.cached.retain(keys, expected_ns)
        else:
            self.pool.cached.unretain(keys, priority)

    @rule(request=requests)
    def pin(self, request: str) -> None:
        slots = self.pool.slots_of(request)
        self.pool.pin(slots)
        self.pins.append(slots)

    @rule()
    def unpin(self) -> None:
        if self.pins:
            self.pool.unpin(self.pins.pop(0))
            self.granted(self.pool.grant())

    @rule(request=requests, number=st.integers(0, SLOTS - 1))
    def replace_one(self, request: str, number: int) -> None:
        """A read is abandoned and ends late."""
        slots = self.pool.slots_of(request)[number : number + 1]
        if slots and self.pool.may_write(request, slots[0]):
            self.pool.pin(slots)
            if self.pool.replace(request, slots):
                self.late.append((slots[0], b"late"))
                fresh = self.pool.slots_of(request)[number]
                self.memory[fresh] = request.encode()
            else:
                self.pool.unpin(slots)

    @rule()
    def late_write(self) -> None:
        if self.late:
            slot, content = self.late.pop(0)
            self.memory[slot] = content
            self.pool.unpin([slot])
            self.granted(self.pool.grant())

    @rule(request=requests, back=st.booleans())
    def quarantine(self, request: str, back: bool) -> None:
        """Its writer may still write to the slots that the request could write to."""
        mine = [s for s in self.pool.slots_of(request) if self.pool.may_write(request, s)]
        self.pool.quarantine(request)
        self.memory.update(dict.fromkeys(mine, b"in doubt"))
        if back:
            self.pool.end_quarantine(request)
        self.granted(self.pool.grant())

    @rule(enabled=st.booleans())
    def set_caching(self, enabled: bool) -> None:
        self.pool.set_caching(enabled=enabled)
        self.granted(self.pool.grant())

    @rule(limit=st.integers(1, 4))
    def take_changes(self, limit: int) -> None:
        added, removed = self.pool.cached.changes(limit)
        self.reported = self.reported.difference(removed).union(added)
        if not self.pool.cached._updates._changed:
            assert self.reported == {key for _, key in self.pool.cached.items()}

    @invariant()
    def a_cached_block_has_the_content_of_its_key(self) -> None:
        for slot, key in self.pool.cached.items():
            assert self.memory[slot] == key
            assert self.pool._writer[slot] is None

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        pool = self.pool
        held = {s for slots in pool._leases.values() for s in slots}
        quarantined = [s for slots in pool._quarantine.values() for s in slots]
        free = list(pool._free)
        evictable = {s for s, _ in pool.cached.items() if pool.cached.is_evictable(s)}
        pinned = {s for slots in self.pins for s in slots} | {s for s, _ in self.late}
        assert len(set(quarantined)) == len(quarantined)
        assert len(set(free)) == len(free)
        assert len(evictable) == pool.cached.evictable
        assert len(held) + len(quarantined) == len(held | set(quarantined))
        assert not (held | set(quarantined) | pinned) & (set(free) | evictable)
        assert not set(free) & evictable
        assert held | set(quarantined) | set(free) | evictable | pinned == set(range(SLOTS))

    @invariant()
    def a_lease_counts_once_for_each_request(self) -> None:
        for slot in range(SLOTS):
            leases = [slots.count(slot) for slots in self.pool._leases.values()]
            quarantined = sum(slots.count(slot) for slots in self.pool._quarantine.values())
            assert max(leases, default=0) <= 1
            assert self.pool._ref_count[slot] == sum(leases) + quarantined


TestSlotPool = SlotPoolMachine.TestCase
