"""``policy.load.Ledger`` over tables: which charges an engine has not reported yet.

What a charge does to an account is said by the policy (``policy.accounts``).
"""

from dualpath.model.sim.compiled.jit import inlined, lean
from dualpath.model.sim.compiled.queues import enter_pending, leave_pending
from dualpath.model.sim.compiled.tables import (
    ASSIGN_SEQ,
    ASSIGNED,
    CHARGE,
    DECODE,
    ENGINE,
    FIRST_PENDING,
    LAST_PENDING,
    LENGTH,
    NONE,
    PENDING_AFTER,
    PREFILL,
    READ,
    READ_Q,
    READ_TOTAL,
    TO_COMPUTE,
    SchedulerState,
)
from dualpath.policy import accounts
from dualpath.policy.accounts import LAST_SEQ, REPORTED_SEQ


@inlined
def report(
    state: SchedulerState,
    engine: int,
    assign_seq: int,
    unfinished_requests: int,
    unfinished_tokens: int,
    read_queue_tokens: int,
    free_hbm_tokens: int,
) -> None:
    """Take over an engine's load; a late report is dropped (``Ledger.report``).

    The numbers must be such that the ledger would accept them.
    """
    engines = state.engines
    if assign_seq < engines[REPORTED_SEQ, engine]:
        return
    if assign_seq == engines[LAST_SEQ, engine]:
        accounts.count_in_all(engines, engine)
        engines[FIRST_PENDING, engine] = NONE
        engines[LAST_PENDING, engine] = NONE
    else:
        _drop_counted(state, engine, assign_seq)
    accounts.take_report(
        engines,
        state.nodes[READ_Q],
        engine,
        assign_seq,
        unfinished_requests,
        unfinished_tokens,
        read_queue_tokens,
        free_hbm_tokens,
    )


@lean
def _drop_counted(state: SchedulerState, engine: int, assign_seq: int) -> None:
    """Take the charges up to ``assign_seq`` off the list."""
    role = DECODE if engine >= state.first_decode_engine else PREFILL
    engines, requests = state.engines, state.requests
    request = engines[FIRST_PENDING, engine]
    while request != NONE and requests[request, ASSIGN_SEQ + role] <= assign_seq:
        tokens = requests[request, CHARGE + role]
        accounts.count_in(engines, engine, tokens, int(tokens > 0), requests[request, READ + role])
        following = requests[request, PENDING_AFTER + role]
        leave_pending(state, request, role)
        request = following


@inlined
def hold(state: SchedulerState, request: int, role: int, engine: int) -> None:
    """Charge a request to an engine that does not know of it yet."""
    state.requests[request, ENGINE + role] = engine
    accounts.hold(state.engines, engine, state.requests[request, LENGTH + role])


@inlined
def assign(state: SchedulerState, request: int, role: int, more_tokens: int) -> int:
    """Turn a held charge into an assigned one and return its number."""
    requests = state.requests
    engine, tokens = requests[request, ENGINE + role], requests[request, LENGTH + role]
    seq = accounts.assign(state.engines, engine, tokens, more_tokens)
    requests[request, ASSIGN_SEQ + role] = seq
    requests[request, CHARGE + role] = tokens + more_tokens
    requests[request, READ + role] = 0
    enter_pending(state, request, role)
    return seq


@inlined
def change(state: SchedulerState, request: int, role: int, tokens: int, read_tokens: int) -> None:
    """Let an assigned request count for so much more, also in what its engine reads."""
    nodes, requests = state.nodes, state.requests
    requests[request, CHARGE + role] += tokens
    requests[request, READ + role] += read_tokens
    accounts.change(
        state.engines,
        nodes[READ_Q],
        nodes[READ_TOTAL],
        requests[request, ENGINE + role],
        tokens,
        read_tokens,
        uncounted(state, request, role),
    )


@inlined
def set_computing(state: SchedulerState, request: int, tokens: int) -> None:
    """Let the account of an assigned request's PE say that so much of it is to be computed."""
    requests = state.requests
    change = tokens - requests[request, TO_COMPUTE]
    accounts.charge_computing(state.engines, requests[request, ENGINE + PREFILL], change)
    requests[request, TO_COMPUTE] = tokens


@inlined
def charge_read(state: SchedulerState, request: int, role: int, tokens: int) -> None:
    """Charge a read of the engine's latest assignment, this request's."""
    nodes, engine = state.nodes, state.requests[request, ENGINE + role]
    state.requests[request, READ + role] = tokens
    accounts.charge_read(state.engines, nodes[READ_Q], nodes[READ_TOTAL], engine, tokens)


@inlined
def release_read(state: SchedulerState, request: int, role: int) -> None:
    """Strike a read that no report has counted in yet."""
    tokens = state.requests[request, READ + role]
    if tokens > 0 and uncounted(state, request, role):
        engine = state.requests[request, ENGINE + role]
        accounts.strike_read(state.engines, state.nodes[READ_Q], engine, tokens)
    state.requests[request, READ + role] = 0


@inlined
def release(state: SchedulerState, request: int, role: int) -> None:
    """Strike a request that no report has counted in yet, held or assigned."""
    requests = state.requests
    engine = requests[request, ENGINE + role]
    if requests[request, ASSIGNED] == 0:
        accounts.strike_held(state.engines, engine, requests[request, LENGTH + role])
        return
    tokens = requests[request, CHARGE + role]
    if tokens > 0 and uncounted(state, request, role):
        accounts.strike(state.engines, engine, tokens)
    requests[request, CHARGE + role] = 0


@inlined
def uncounted(state: SchedulerState, request: int, role: int) -> bool:
    """Return whether no report of the engine counts in an assigned request."""
    engine = state.requests[request, ENGINE + role]
    return state.requests[request, ASSIGN_SEQ + role] > state.engines[REPORTED_SEQ, engine]
