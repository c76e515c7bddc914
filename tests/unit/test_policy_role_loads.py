"""How both roles fare: what waits counts where it is held up."""

from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.cluster import Role
from dualpath.policy.rebalance import (
    ClusterObservation,
    RebalanceSettings,
    RoleNodes,
    RoleQueue,
    RoleWatch,
    soonest_empty,
)

SETTINGS = RebalanceSettings(
    interval_s=10.0, prefill_node_tokens_per_s=100.0, decode_node_tokens_per_s=100.0
)
NODES = RoleNodes(prefill=2, decode=2, decode_hbm_tokens=1000)


def look(watch: RoleWatch, prefill: RoleQueue, decode: RoleQueue) -> ClusterObservation:
    return watch.observe(SETTINGS, NODES, {Role.PREFILL: prefill, Role.DECODE: decode}, [], [])


def test_prompts_that_wait_for_a_pe_are_its_backlog_and_those_done_its_load() -> None:
    watch = RoleWatch()
    watch.loaded("a", 500)
    watch.loaded("b", 300)
    watch.prefilled("a", 600)
    seen = look(watch, RoleQueue(800, 4, 1000), RoleQueue(1000, 0, 0))
    assert seen.prefill.utilisation == 500 / (100 * 2 * 10)
    # 600 of 800 tokens: three quarters of those without an engine wait for prefill.
    assert (seen.prefill.waiting_requests, seen.prefill.waiting_tokens) == (3, 300 + 750)
    assert seen.decode.utilisation == 1.0
    assert look(watch, RoleQueue(0, 0, 0), RoleQueue(0, 0, 0)).prefill.utilisation == 0.0


def test_what_storage_holds_up_is_no_load_of_either_role() -> None:
    seen = look(RoleWatch(), RoleQueue(800, 4, 1000), RoleQueue(1000, 3, 900))
    assert (seen.prefill.waiting_tokens, seen.decode.waiting_tokens) == (0, 0)
    assert seen.decode.utilisation == 0.0


def test_the_node_that_is_empty_soonest_gives_and_of_equals_the_last() -> None:
    assert soonest_empty({"a": 3, "b": 1, "c": 1, "d": 2}) == "c"


EVENTS = st.lists(
    st.tuples(st.sampled_from(("loaded", "prefilled", "over")), st.sampled_from("abc")), max_size=30
)


@given(EVENTS)
def test_whatever_comes_twice_or_late_nothing_is_left_when_all_have_ended(events) -> None:
    watch = RoleWatch()
    for kind, name in events:
        watch.over(name) if kind == "over" else getattr(watch, kind)(name, 10)
    for name in "abc":
        watch.over(name)
        watch.over(name)
    seen = look(watch, RoleQueue(10, 1, 10), RoleQueue(10, 1, 10))
    assert seen.prefill.waiting_tokens == seen.decode.waiting_tokens == 0
