"""Slots are granted FIFO, reused only when nobody can touch them, and never leak."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from dualpath.core.errors import BufferTooSmallError
from dualpath.engine.slots import SlotPool


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


def test_quarantined_slots_come_back_only_when_the_writer_is_proven_gone() -> None:
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


def test_replaced_slots_return_once_the_late_write_is_over() -> None:
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


class SlotPoolMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: no slot has two holders, none is lost."""

    requests: Bundle[str] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(6)
        self.pins: list[tuple[int, ...]] = []
        self.number = 0

    @rule(target=requests, count=st.integers(1, 6))
    def ask(self, count: int) -> str:
        self.number += 1
        self.pool.request(f"r{self.number}", count)
        return f"r{self.number}"

    @rule(request=requests)
    def release(self, request: str) -> None:
        self.pool.release(request)
        self.pool.grant()

    @rule(request=requests)
    def pin(self, request: str) -> None:
        slots = self.pool.slots_of(request)
        self.pool.pin(slots)
        self.pins.append(slots)

    @rule()
    def unpin(self) -> None:
        if self.pins:
            self.pool.unpin(self.pins.pop(0))
            self.pool.grant()

    @rule(request=requests)
    def replace_first(self, request: str) -> None:
        if self.pool.slots_of(request):
            self.pool.replace(request, self.pool.slots_of(request)[:1])

    @rule(request=requests, back=st.booleans())
    def doubt(self, request: str, back: bool) -> None:
        self.pool.quarantine(request)
        if back:
            self.pool.end_quarantine(request)
            self.pool.grant()

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        held = [s for slots in self.pool._leases.values() for s in slots]
        held += [s for slots in self.pool._quarantine.values() for s in slots]
        free = list(self.pool._free)
        assert len(set(held)) == len(held)
        assert len(set(free)) == len(free)
        assert not set(held) & set(free)
        pinned = {s for slots in self.pins for s in slots}
        assert not pinned & set(free)
        assert set(held) | set(free) | pinned == set(range(6))


TestSlotPool = SlotPoolMachine.TestCase
