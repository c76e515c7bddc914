"""``policy.RequestScheduler`` over tables: the same decisions, one by one.

The rules are the policy's own functions, compiled as they stand (``jit``).  This module is the
bookkeeping around them for the paper's system: engines neither join nor leave, no DRAM caches KV,
no hit is recomputed, and a request that was submitted is assigned before it is over.  Lengths and
reports are not checked; the caller passes valid ones.
"""

import numpy as np
from numpy.typing import NDArray

from dualpath.policy import accounts
from dualpath.policy.accounts import (
    FREE_HBM,
    NODE,
    SEQ,
    TOK,
    IntArray,
    decode_tokens,
)
from dualpath.policy.baselines import NO_TURN, first_turn, other_side
from dualpath.policy.decode import assign_decode, choose_group, unfragmented_hbm
from dualpath.policy.events import DE_IN_TURN, PE_IN_TURN
from dualpath.policy.placement import prefill_worth
from dualpath.policy.prefill import assign_prefill
from dualpath.policy.read_side import PE_SIDE, SIDES_IN_TURN, read_tokens
from dualpath_sim.simulator.compiled.jit import compiled, inlined, lean, prefetch
from dualpath_sim.simulator.compiled.tables import (
    A_DE,
    A_DE_READ,
    A_DE_REASON,
    A_PE,
    A_PE_READ,
    A_PE_REASON,
    A_READ_REASON,
    A_REQUEST,
    AHEAD,
    BEHIND,
    CHARGE,
    COMMON_QUEUES,
    DECODE,
    END,
    ENGINE,
    ENTERED,
    FAR_BEHIND,
    FIRST,
    FIRST_SIDE,
    HBM,
    IN_TURN_PES,
    LARGEST_HBM,
    LAST_DEALT,
    LATEST,
    LENGTH,
    LENGTHS,
    NO_CACHED_ROWS,
    NONE,
    NOT_IN_REPORT,
    NUMBER,
    PLACED,
    PREFILL,
    PRIVATE_TOKENS,
    QUEUE,
    QUEUE_FIRST,
    QUEUE_LAST,
    READ_Q,
    READ_TOKENS,
    READ_TOTAL,
    REASON,
    REPORTS,
    REQUEST_HIT,
    RING,
    ROWS,
    STRIDE,
    SUBMITTED,
    TOTAL_TOKENS,
    UNASSIGNED,
    WHY,
    SchedulerState,
)

# Wait queues: doubly linked lists inside the table of requests.  Every operation costs the same
# however many requests wait.


@inlined
def private_queue(engine: int) -> int:
    """Return the number of an engine's queue, or of the group it is the first of."""
    return COMMON_QUEUES + engine


@inlined
def enter_queue(state: SchedulerState, request: int, role: int, queue: int) -> None:
    """Let a request wait at the end of a queue."""
    requests, queues = state.requests, state.queues
    last = queues[queue, QUEUE_LAST]
    requests[request, QUEUE + role] = queue
    requests[request, AHEAD + role] = last
    requests[request, BEHIND + role] = NONE
    if last == NONE:
        queues[queue, QUEUE_FIRST] = request
    else:
        requests[last, BEHIND + role] = request
    queues[queue, QUEUE_LAST] = request
    latest = LATEST + queues[queue, ENTERED] % STRIDE
    queues[queue, ENTERED] += 1
    if queues[queue, latest] != NONE:
        requests[queues[queue, latest], FAR_BEHIND + role] = request
    queues[queue, latest] = request


@inlined
def leave_queue(state: SchedulerState, request: int, role: int) -> None:
    """Take a waiting request out of its queue."""
    requests, queues = state.requests, state.queues
    queue = requests[request, QUEUE + role]
    ahead, behind = requests[request, AHEAD + role], requests[request, BEHIND + role]
    if ahead == NONE:
        queues[queue, QUEUE_FIRST] = behind
    else:
        requests[ahead, BEHIND + role] = behind
    if behind == NONE:
        queues[queue, QUEUE_LAST] = ahead
    else:
        requests[behind, AHEAD + role] = ahead
    requests[request, QUEUE + role] = NONE


# ``policy.accounts.Ledger``: which charges no report of an engine has counted in.


@inlined
def report(
    state: SchedulerState,
    engine: int,
    left_out: IntArray,
    unfinished_requests: int,
    unfinished_tokens: int,
    read_queue_tokens: int,
    free_hbm_tokens: int,
    unallocated_hbm_tokens: int,
) -> None:
    """Take over an engine's load; a late report is dropped (``Ledger.report``).

    ``left_out`` are the assigned requests that it does not count.  No figure may be negative.
    """
    role = DECODE if engine >= state.first_decode_engine else PREFILL
    if left_out.size:
        for request in left_out:
            assigned = _is_assigned(state, request, role, engine)
            if assigned and not uncounted(state, request, role):
                return
    _count_in(state, engine, role, left_out)
    accounts.take_report(
        state.engines,
        state.nodes[READ_Q],
        engine,
        unfinished_requests,
        unfinished_tokens,
        read_queue_tokens,
        free_hbm_tokens,
        unallocated_hbm_tokens,
    )


@inlined
def _is_assigned(state: SchedulerState, request: int, role: int, engine: int) -> bool:
    requests = state.requests
    return requests[request, ENGINE + role] == engine and requests[request, CHARGE + role] > 0


@inlined
def _count_in(state: SchedulerState, engine: int, role: int, left_out: IntArray) -> None:
    """Count in all that was assigned to an engine and is not ``left_out``."""
    engines, requests = state.engines, state.requests
    accounts.count_in_all(engines, engine)
    for request in left_out:
        if requests[request, ENGINE + role] == engine and uncounted(state, request, role):
            tokens, reads = requests[request, CHARGE + role], requests[request, READ_TOKENS + role]
            accounts.leave_uncounted(engines, engine, tokens, int(tokens > 0), reads)
            requests[request, NOT_IN_REPORT + role] += 1
    engines[REPORTS, engine] += 1


@inlined
def hold(state: SchedulerState, request: int, role: int, engine: int) -> None:
    """Charge a request to an engine that has not been assigned it yet."""
    state.requests[request, ENGINE + role] = engine
    accounts.hold(state.engines, engine, state.requests[request, LENGTH + role])


@inlined
def _charge_assigned(state: SchedulerState, request: int, role: int) -> None:
    """Turn a held charge into an assigned one."""
    requests = state.requests
    engine, tokens = requests[request, ENGINE + role], requests[request, LENGTH + role]
    accounts.assign(state.engines, engine, tokens, 0)
    requests[request, NOT_IN_REPORT + role] = state.engines[REPORTS, engine]
    requests[request, CHARGE + role] = tokens
    requests[request, READ_TOKENS + role] = 0


@inlined
def charge_read(state: SchedulerState, request: int, role: int, tokens: int) -> None:
    """Charge a read of a request that was assigned just now."""
    nodes, engine = state.nodes, state.requests[request, ENGINE + role]
    state.requests[request, READ_TOKENS + role] = tokens
    accounts.charge_read(state.engines, nodes[READ_Q], nodes[READ_TOTAL], engine, tokens)


@inlined
def release_read(state: SchedulerState, request: int, role: int) -> None:
    """Strike a read if it is uncounted."""
    tokens = state.requests[request, READ_TOKENS + role]
    if tokens > 0 and uncounted(state, request, role):
        engine = state.requests[request, ENGINE + role]
        accounts.strike_read(state.engines, state.nodes[READ_Q], engine, tokens)
    state.requests[request, READ_TOKENS + role] = 0


@inlined
def release(state: SchedulerState, request: int, role: int) -> None:
    """Strike an assigned request if it is uncounted."""
    requests = state.requests
    engine, tokens = requests[request, ENGINE + role], requests[request, CHARGE + role]
    if tokens > 0 and uncounted(state, request, role):
        accounts.strike(state.engines, engine, tokens)
    requests[request, CHARGE + role] = 0


@inlined
def uncounted(state: SchedulerState, request: int, role: int) -> bool:
    """Return whether no report of the engine counts in an assigned request."""
    engine = state.requests[request, ENGINE + role]
    return state.requests[request, NOT_IN_REPORT + role] == state.engines[REPORTS, engine]


# The placers of ``policy``: which requests get an engine in a fetch, and which one.  Each function
# charges what it places to the ledger and lists it in ``state.work[PLACED]``, in the order in which
# the live placer returns it.

#: Waiting requests given to a kernel call of Algorithm 1: first so many, then twice as many.
FIRST_WINDOW, LAST_WINDOW = 4, 256


@inlined
def place_on_prefill(state: SchedulerState, group: int) -> int:
    """Serve the waiting queue by Algorithm 1 (``FifoPrefillPlacer.fetch``)."""
    count, window = 0, FIRST_WINDOW
    while state.queues[PREFILL, QUEUE_FIRST] != NONE:
        listed = _list_waiting(state, PREFILL, PREFILL, window)
        placed = _place_window(state, group, listed, count)
        count += placed
        if placed < listed:
            break
        window = min(2 * window, LAST_WINDOW)
    return count


@inlined
def _list_waiting(state: SchedulerState, role: int, queue: int, most: int) -> int:
    """Write the lengths at the head of a queue into the work table; return how many."""
    request, count = state.queues[queue, QUEUE_FIRST], 0
    while request != NONE and count < most:
        state.work[LENGTHS, count] = state.requests[request, LENGTH + role]
        _fetch_row_far_behind(state, request, role)
        request = state.requests[request, BEHIND + role]
        count += 1
    return count


@inlined
def _fetch_row_far_behind(state: SchedulerState, request: int, role: int) -> None:
    requests = state.requests
    prefetch(requests, request, 0)
    prefetch(requests, requests[request, FAR_BEHIND + role], NUMBER)


@inlined
def _place_window(state: SchedulerState, group: int, window: int, count: int) -> int:
    first, end = state.groups[FIRST, group], state.groups[END, group]
    placed = _prefill_rows(
        state.engines[TOK, first:end],
        state.engines[NODE, first:end],
        state.nodes[READ_Q],
        state.work[LENGTHS, :window],
        state.work[NO_CACHED_ROWS, :window],
        state.no_cached[:, first:end],
        state.rules.alpha_tokens,
        state.rules.beta_tokens,
        state.work[ROWS],
        state.work[WHY],
    )
    for position in range(placed):
        request = state.queues[PREFILL, QUEUE_FIRST]
        engine = first + state.work[ROWS, position]
        _place(state, request, PREFILL, engine, state.work[WHY, position], count + position)
    return placed


@compiled
def _prefill_rows(
    tok: IntArray,
    node: IntArray,
    read_q: IntArray,
    lengths: IntArray,
    cached_rows: IntArray,
    cached: NDArray[np.int32],
    alpha_tokens: int,
    beta_tokens: int,
    rows: IntArray,
    why: IntArray,
) -> int:
    worth = prefill_worth(alpha_tokens, beta_tokens)
    placed, reasons = assign_prefill(
        tok, node, read_q, lengths, cached_rows, cached, worth, alpha_tokens, beta_tokens
    )
    rows[: placed.size] = placed
    why[: placed.size] = reasons
    return placed.size


@inlined
def place_on_decode(state: SchedulerState, group: int) -> int:
    """Run phases 1 and 2 (``TwoPhaseDecodePlacer.fetch``)."""
    if state.queues[DECODE, QUEUE_FIRST] != NONE:
        _drain_global_queue(state)
    first, end = state.groups[FIRST, group], state.groups[END, group]
    queue = private_queue(first)
    if state.queues[queue, QUEUE_FIRST] == NONE:
        return 0
    bound = _list_upper_bound_set(
        state, queue, unfragmented_hbm(state.engines[FREE_HBM, first:end])
    )
    if bound == 0:
        return 0
    placed = _decode_rows(
        state.engines[TOK, first:end],
        state.engines[SEQ, first:end],
        state.engines[FREE_HBM, first:end],
        state.work[LENGTHS, :bound],
        state.work[NO_CACHED_ROWS, :bound],
        state.no_cached[:, first:end],
        state.rules.threshold_factor,
        state.work[ROWS],
        state.work[WHY],
    )
    for position in range(placed):
        reason = state.work[WHY, position]
        request = state.queues[queue, QUEUE_FIRST]
        state.groups[PRIVATE_TOKENS, group] -= state.requests[request, LENGTH + DECODE]
        _place(state, request, DECODE, first + state.work[ROWS, position], reason, position)
    return placed


@compiled
def _decode_rows(
    tok: IntArray,
    seq: IntArray,
    free_hbm: IntArray,
    lengths: IntArray,
    cached_rows: IntArray,
    cached: NDArray[np.int32],
    threshold_factor: float,
    rows: IntArray,
    why: IntArray,
) -> int:
    placed, reasons = assign_decode(
        tok, seq, free_hbm, lengths, cached_rows, cached, threshold_factor
    )
    rows[: placed.size] = placed
    why[: placed.size] = reasons
    return placed.size


@inlined
def _drain_global_queue(state: SchedulerState) -> None:
    groups, first_group = state.groups, state.first_decode_group
    for group in range(first_group, groups.shape[1]):
        total = groups[PRIVATE_TOKENS, group]
        for engine in range(groups[FIRST, group], groups[END, group]):
            total += state.engines[TOK, engine]
        groups[TOTAL_TOKENS, group] = total
    totals, largest = groups[TOTAL_TOKENS, first_group:], groups[LARGEST_HBM, first_group:]
    request = state.queues[DECODE, QUEUE_FIRST]
    while request != NONE:
        behind = state.requests[request, BEHIND + DECODE]
        tokens = state.requests[request, LENGTH + DECODE]
        row = choose_group(totals, largest, tokens)
        if row >= 0:
            group = first_group + row
            groups[TOTAL_TOKENS, group] += tokens
            groups[PRIVATE_TOKENS, group] += tokens
            leave_queue(state, request, DECODE)
            enter_queue(state, request, DECODE, private_queue(groups[FIRST, group]))
        request = behind


@inlined
def _list_upper_bound_set(state: SchedulerState, queue: int, left: int) -> int:
    """Write the lengths of R (``upper_bound_set``) into the work table; return how many."""
    request, count = state.queues[queue, QUEUE_FIRST], 0
    while request != NONE:
        tokens = state.requests[request, LENGTH + DECODE]
        left -= tokens
        if left < 0:
            break
        state.work[LENGTHS, count] = tokens
        _fetch_row_far_behind(state, request, DECODE)
        request = state.requests[request, BEHIND + DECODE]
        count += 1
    return count


@lean
def place_in_turn(state: SchedulerState, role: int, group: int) -> int:
    """Deal, then place the requests that wait for the group's engines (``InTurnPlacer.fetch``)."""
    _deal(state, role)
    count = 0
    reason = PE_IN_TURN if role == PREFILL else DE_IN_TURN
    for engine in range(state.groups[FIRST, group], state.groups[END, group]):
        queue = private_queue(engine)
        request = state.queues[queue, QUEUE_FIRST]
        while request != NONE:
            length = state.requests[request, LENGTH + role]
            if role == DECODE and state.engines[FREE_HBM, engine] < length:
                break
            _place(state, request, role, engine, reason, count)
            count += 1
            request = state.queues[queue, QUEUE_FIRST]
    if count > 1:
        _sort_by_number(state, count)
    return count


@inlined
def _sort_by_number(state: SchedulerState, count: int) -> None:
    for position in range(count):
        state.work[LENGTHS, position] = state.requests[state.work[PLACED, position], NUMBER]
    _sort(state.work[LENGTHS, :count], state.work[PLACED, :count], state.work[ROWS])


@compiled
def _sort(numbers: IntArray, placed: IntArray, unsorted: IntArray) -> None:
    for position in range(placed.size):
        unsorted[position] = placed[position]
    for position, where in enumerate(np.argsort(numbers)):
        placed[position] = unsorted[where]


@inlined
def _deal(state: SchedulerState, role: int) -> None:
    request = state.queues[role, QUEUE_FIRST]
    while request != NONE:
        behind = state.requests[request, BEHIND + role]
        engine = _next_in_turn(state, role, state.requests[request, LENGTH + role])
        if engine != NONE:
            leave_queue(state, request, role)
            enter_queue(state, request, role, private_queue(engine))
        request = behind


@inlined
def _next_in_turn(state: SchedulerState, role: int, length: int) -> int:
    """Return the next engine in turn that is large enough for the request."""
    start, end = 0, state.first_decode_engine
    if role == DECODE:
        start, end = end, state.engines.shape[1]
    place = state.counters[LAST_DEALT + role]
    for _ in range(end - start):
        place = (place + 1) % (end - start)
        engine = state.engines[RING, start + place]
        if role == PREFILL or state.engines[HBM, engine] >= length:
            state.counters[LAST_DEALT + role] = place
            return engine
    return NONE


@inlined
def _place(
    state: SchedulerState, request: int, role: int, engine: int, reason: int, position: int
) -> None:
    leave_queue(state, request, role)
    hold(state, request, role, engine)
    state.requests[request, REASON + role] = reason
    state.work[PLACED, position] = request


# ``RequestScheduler``.


@inlined
def submit(state: SchedulerState, request: int, prompt: int, hit: int, max_new: int) -> None:
    """Let a request wait for a PE and a DE."""
    requests, counters = state.requests, state.counters
    requests[request, NUMBER] = counters[SUBMITTED]
    requests[request, REQUEST_HIT] = hit
    reserve = state.rules.generated_reserve_tokens
    requests[request, LENGTH + PREFILL] = prompt
    requests[request, LENGTH + DECODE] = decode_tokens(prompt, max_new, reserve)
    counters[SUBMITTED] += 1
    counters[UNASSIGNED] += 1
    for role in range(2):
        requests[request, ENGINE + role] = NONE
        enter_queue(state, request, role, role)


@lean
def fetch_prefill(state: SchedulerState, group: int) -> int:
    """Serve a PE group; return how many rows of ``state.assigned`` are new assignments."""
    if state.counters[UNASSIGNED] == 0:
        return 0
    if state.rules.in_turn:
        count = place_in_turn(state, PREFILL, group)
    else:
        count = place_on_prefill(state, group)
    return _assign_placed(state, DECODE, count)


@lean
def fetch_decode(state: SchedulerState, group: int) -> int:
    """Serve a DE group; return how many rows of ``state.assigned`` are new assignments."""
    if state.counters[UNASSIGNED] == 0:
        return 0
    if state.rules.in_turn:
        count = place_in_turn(state, DECODE, group)
    else:
        count = place_on_decode(state, group)
    return _assign_placed(state, PREFILL, count)


@inlined
def read_done(state: SchedulerState, request: int) -> None:
    """All storage reads of an assigned request are over."""
    release_read(state, request, PREFILL)
    release_read(state, request, DECODE)


@inlined
def prefill_done(state: SchedulerState, request: int) -> None:
    """The PE has prefilled an assigned request."""
    release(state, request, PREFILL)


@inlined
def finished(state: SchedulerState, request: int) -> None:
    """An assigned request is over; its number may be used again."""
    read_done(state, request)
    for role in range(2):
        release(state, request, role)


@inlined
def _assign_placed(state: SchedulerState, other_role: int, placed: int) -> int:
    """Assign every placed request as soon as its other engine is known."""
    count = 0
    for position in range(placed):
        request = state.work[PLACED, position]
        if state.requests[request, ENGINE + other_role] != NONE:
            _assign(state, request, count)
            count += 1
    return count


@inlined
def _assign(state: SchedulerState, request: int, row: int) -> None:
    """Charge it to both engines and choose its reads (``RequestScheduler``)."""
    requests, assigned = state.requests, state.assigned
    state.counters[UNASSIGNED] -= 1
    _charge_assigned(state, request, PREFILL)
    _charge_assigned(state, request, DECODE)
    head, tail, reason = _choose_reads(state, request)
    if head > 0:
        charge_read(state, request, PREFILL, head)
    if tail > 0:
        charge_read(state, request, DECODE, tail)
    assigned[row, A_REQUEST] = request
    assigned[row, A_PE] = requests[request, ENGINE + PREFILL]
    assigned[row, A_DE] = requests[request, ENGINE + DECODE]
    assigned[row, A_PE_READ] = head
    assigned[row, A_DE_READ] = tail
    assigned[row, A_PE_REASON] = requests[request, REASON + PREFILL]
    assigned[row, A_DE_REASON] = requests[request, REASON + DECODE]
    assigned[row, A_READ_REASON] = reason


@inlined
def _choose_reads(state: SchedulerState, request: int) -> tuple[int, int, int]:
    """Return how many hit tokens its PE and its DE read, and why (``HitSources.choose``)."""
    nodes, rates, rules = state.nodes, state.snic_tokens_per_s, state.rules
    hit, turn = state.requests[request, REQUEST_HIT], PE_SIDE
    pe = state.requests[request, ENGINE + PREFILL]
    de = state.requests[request, ENGINE + DECODE]
    if rules.read_rule == SIDES_IN_TURN and hit > 0:
        turn = _side_in_turn(state, pe, de)
    pe_node, de_node = state.engines[NODE, pe], state.engines[NODE, de]
    return read_tokens(
        rules.read_rule,
        turn,
        nodes[READ_Q, pe_node],
        nodes[READ_TOTAL, pe_node],
        rates[pe],
        nodes[READ_Q, de_node],
        nodes[READ_TOTAL, de_node],
        rates[de],
        hit,
        rules.block_tokens,
    )


@inlined
def _side_in_turn(state: SchedulerState, pe: int, de: int) -> int:
    """``SidesInTurn.take``."""
    sides, engines = state.sides, state.engines
    column = de - state.first_decode_engine
    side = sides[pe, column]
    if side == NO_TURN:
        of_engine = engines[FIRST_SIDE, pe]
        side = first_turn(of_engine, state.counters[IN_TURN_PES])
        state.counters[IN_TURN_PES] += of_engine == NO_TURN
        engines[FIRST_SIDE, pe] = other_side(side)
    sides[pe, column] = other_side(side)
    return side
