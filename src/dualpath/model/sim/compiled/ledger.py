"""``policy.load.Ledger`` over tables: what engines reported and what was charged to them since."""

from dualpath.model.sim.compiled.jit import inlined, lean
from dualpath.model.sim.compiled.lines import enter_told, leave_told
from dualpath.model.sim.compiled.tables import (
    CHARGE,
    DECODE,
    ENGINE,
    EXTRA_READS,
    EXTRA_REQUESTS,
    EXTRA_TOKENS,
    FIRST_TOLD,
    FREE_HBM,
    GROUP,
    GROUP_TOKENS,
    HELD_REQUESTS,
    HELD_TOKENS,
    LAST_SEQ,
    LAST_TOLD,
    LENGTH,
    NODE,
    NONE,
    PREFILL,
    READ,
    READ_Q,
    READ_TOTAL,
    READS,
    REPORTED_SEQ,
    SEQ,
    TELL_SEQ,
    TOK,
    TOLD,
    TOLD_AFTER,
    SchedulerState,
)


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
    engines[REPORTED_SEQ, engine] = assign_seq
    if assign_seq == engines[LAST_SEQ, engine]:
        engines[EXTRA_TOKENS, engine] = 0
        engines[EXTRA_REQUESTS, engine] = 0
        engines[EXTRA_READS, engine] = 0
        engines[FIRST_TOLD, engine] = NONE
        engines[LAST_TOLD, engine] = NONE
    else:
        _drop_counted(state, engine, assign_seq)
    extra_tokens = engines[EXTRA_TOKENS, engine] + engines[HELD_TOKENS, engine]
    extra_requests = engines[EXTRA_REQUESTS, engine] + engines[HELD_REQUESTS, engine]
    tokens = unfinished_tokens + extra_tokens
    reads = read_queue_tokens + engines[EXTRA_READS, engine]
    state.groups[GROUP_TOKENS, engines[GROUP, engine]] += tokens - engines[TOK, engine]
    state.nodes[READ_Q, engines[NODE, engine]] += reads - engines[READS, engine]
    engines[TOK, engine] = tokens
    engines[SEQ, engine] = unfinished_requests + extra_requests
    engines[FREE_HBM, engine] = free_hbm_tokens - extra_tokens
    engines[READS, engine] = reads


@lean
def _drop_counted(state: SchedulerState, engine: int, assign_seq: int) -> None:
    """Strike the charges up to ``assign_seq``."""
    role = DECODE if engine >= state.first_decode_engine else PREFILL
    engines, requests = state.engines, state.requests
    request = engines[FIRST_TOLD, engine]
    while request != NONE and requests[request, TELL_SEQ + role] <= assign_seq:
        tokens = requests[request, CHARGE + role]
        engines[EXTRA_TOKENS, engine] -= tokens
        engines[EXTRA_REQUESTS, engine] -= tokens > 0
        engines[EXTRA_READS, engine] -= requests[request, READ + role]
        following = requests[request, TOLD_AFTER + role]
        leave_told(state, request, role)
        request = following


@inlined
def hold(state: SchedulerState, request: int, role: int, engine: int) -> None:
    """Charge a request to an engine that is not told of it yet."""
    state.requests[request, ENGINE + role] = engine
    tokens = state.requests[request, LENGTH + role]
    state.engines[HELD_TOKENS, engine] += tokens
    state.engines[HELD_REQUESTS, engine] += 1
    _charge(state, engine, tokens, 1)


@inlined
def tell(state: SchedulerState, request: int, role: int) -> int:
    """Turn a held charge into a told one and return its number."""
    engines, requests = state.engines, state.requests
    engine, tokens = requests[request, ENGINE + role], requests[request, LENGTH + role]
    engines[HELD_TOKENS, engine] -= tokens
    engines[HELD_REQUESTS, engine] -= 1
    engines[EXTRA_TOKENS, engine] += tokens
    engines[EXTRA_REQUESTS, engine] += 1
    engines[LAST_SEQ, engine] += 1
    seq = engines[LAST_SEQ, engine]
    requests[request, TELL_SEQ + role] = seq
    requests[request, CHARGE + role] = tokens
    requests[request, READ + role] = 0
    enter_told(state, request, role)
    return seq


@inlined
def charge_read(state: SchedulerState, request: int, role: int, tokens: int) -> None:
    """Charge a read that the engine was told of with this request."""
    engine = state.requests[request, ENGINE + role]
    state.requests[request, READ + role] = tokens
    state.engines[EXTRA_READS, engine] += tokens
    state.nodes[READ_TOTAL, state.engines[NODE, engine]] += tokens
    _queue_read(state, engine, tokens)


@inlined
def release_read(state: SchedulerState, request: int, role: int) -> None:
    """Strike a read that no report has counted in yet."""
    tokens = state.requests[request, READ + role]
    if tokens > 0 and uncounted(state, request, role):
        engine = state.requests[request, ENGINE + role]
        state.engines[EXTRA_READS, engine] -= tokens
        _queue_read(state, engine, -tokens)
    state.requests[request, READ + role] = 0


@inlined
def release(state: SchedulerState, request: int, role: int) -> None:
    """Strike a request that no report has counted in yet, told or not."""
    engines, requests = state.engines, state.requests
    engine = requests[request, ENGINE + role]
    if requests[request, TOLD] == 0:
        tokens = requests[request, LENGTH + role]
        engines[HELD_TOKENS, engine] -= tokens
        engines[HELD_REQUESTS, engine] -= 1
        _charge(state, engine, -tokens, -1)
        return
    tokens = requests[request, CHARGE + role]
    if tokens > 0 and uncounted(state, request, role):
        engines[EXTRA_TOKENS, engine] -= tokens
        engines[EXTRA_REQUESTS, engine] -= 1
        _charge(state, engine, -tokens, -1)
    requests[request, CHARGE + role] = 0


@inlined
def uncounted(state: SchedulerState, request: int, role: int) -> bool:
    """Return whether no report of the engine counts in a told request."""
    engine = state.requests[request, ENGINE + role]
    return state.requests[request, TELL_SEQ + role] > state.engines[REPORTED_SEQ, engine]


@inlined
def _charge(state: SchedulerState, engine: int, tokens: int, requests: int) -> None:
    engines = state.engines
    engines[TOK, engine] += tokens
    engines[SEQ, engine] += requests
    engines[FREE_HBM, engine] -= tokens
    state.groups[GROUP_TOKENS, engines[GROUP, engine]] += tokens


@inlined
def _queue_read(state: SchedulerState, engine: int, tokens: int) -> None:
    state.engines[READS, engine] += tokens
    state.nodes[READ_Q, state.engines[NODE, engine]] += tokens
