"""HBM of a DE is booked by one rule, live and simulated: from the assignment to the request's end.

The story: a request is assigned, its DE counts it, allocates HBM for it, and ends it.  A real
traffic manager reports to one scheduler through the router's bookkeeping, the simulator's driver
to another.  Both schedulers see the same free HBM after every report.
"""

from collections.abc import Iterator

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, prompt_keys

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.core.runs import BlockRun
from dualpath.policy.events import (
    Assignment,
    EngineJoined,
    EngineSpec,
    Fetch,
    SchedulerSettings,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler
from dualpath.router.scheduler.dispatch import EngineAssignments
from dualpath_sim.simulator.reference.driver import SimulatedLoad

HBM_TOKENS = 64 * GEOMETRY.block_tokens
PROMPT_TOKENS, NEW_TOKENS = 22, 10
BLOCKS = GEOMETRY.blocks_for(PROMPT_TOKENS)


def scheduler_with(decode_engine: str) -> RequestScheduler:
    scheduler = RequestScheduler(SchedulerSettings(Mode.DUALPATH, 10**6, 10**6, block_tokens=4))
    for order, (name, role) in enumerate((("p", Role.PREFILL), (decode_engine, Role.DECODE))):
        scheduler.apply(EngineJoined(EngineSpec(name, role, name, name, order, HBM_TOKENS)))
    return scheduler


def assigned(scheduler: RequestScheduler, decode_engine: str) -> Assignment:
    scheduler.apply(Submitted(Request("r", PROMPT_TOKENS, 0, NEW_TOKENS)))
    scheduler.apply(Fetch("p"))
    (assignment,) = scheduler.apply(Fetch(decode_engine)).assignments
    return assignment


def free_hbm(scheduler: RequestScheduler) -> int:
    (load,) = [load for load in scheduler.loads() if load.role is Role.DECODE]
    return load.free_hbm_tokens


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    made = ToyCluster()
    yield made
    made.close()


def test_a_live_decode_engine_and_a_simulated_one_are_booked_alike(cluster: ToyCluster) -> None:
    live, simulated = scheduler_with("de-0"), scheduler_with("1")
    manager, account = cluster.de.manager, SimulatedLoad(1, HBM_TOKENS)
    assert manager.hbm_tokens == HBM_TOKENS
    books = EngineAssignments("de-0")
    seen: list[tuple[int, int]] = []

    def report() -> None:
        live.apply(books.event(cluster.de.report().load, received=1))
        simulated.apply(account.report())
        seen.append((free_hbm(live), free_hbm(simulated)))

    # Assigned: the ledger books it, as no report counts it.
    decision = assigned(live, "de-0")
    books.decided("r", decision.at(Role.DECODE))
    tokens = assigned(simulated, "1").decode_tokens
    assert tokens == decision.decode_tokens
    seen.append((free_hbm(live), free_hbm(simulated)))
    # Counted: the report books it, as the engine has allocated nothing.
    books.open["r"].assign_number = 1
    keys = prompt_keys(PROMPT_TOKENS)
    transfer = cluster.load("r", keys, tokens, 0, 0)
    account.assigned(tokens, tokens, 0)
    report()
    # Allocated: the engine's own free HBM shows it, here for the whole length.
    cluster.forward([(transfer, keys, BlockRun(0, BLOCKS), range(BLOCKS))])
    manager.free_hbm_tokens -= tokens
    assert cluster.hand_to_decode(transfer, keys, range(BLOCKS)) is None
    account.allocated(tokens)
    report()
    # Over: both free it.
    del books.open["r"]
    cluster.release("r")
    manager.free_hbm_tokens += tokens
    account.over(tokens, tokens)
    report()
    booked = HBM_TOKENS - tokens
    assert seen == [(booked, booked)] * 3 + [(HBM_TOKENS, HBM_TOKENS)]


def test_hbm_is_booked_alike_whether_it_is_allocated_at_once_or_when_the_kv_is_complete() -> None:
    """With a hand-over in HBM a DE allocates HBM for a request when it gets it."""
    free = []
    for at_once in (False, True):
        scheduler, account = scheduler_with("1"), SimulatedLoad(1, HBM_TOKENS)
        tokens = assigned(scheduler, "1").decode_tokens
        account.assigned(tokens, tokens, 0)
        if at_once:
            account.allocated(tokens)
        scheduler.apply(account.report())
        free.append(free_hbm(scheduler))
    assert free == [HBM_TOKENS - tokens] * 2


def test_prefill_engines_book_no_hbm(cluster: ToyCluster) -> None:
    cluster.pe.assign("r", PROMPT_TOKENS, 0)
    assert cluster.pe.report().load.unallocated_hbm_tokens == 0
    cluster.de.assign("r", PROMPT_TOKENS, 0)
    assert cluster.de.report().load.unallocated_hbm_tokens == PROMPT_TOKENS
