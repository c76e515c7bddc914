"""The placers of ``policy`` over tables: who gets an engine in a fetch, and which one.

Each function holds what it places at the ledger and lists it in ``state.work[PLACED]``, in the
order in which the live placer returns it.
"""

import numpy as np
from numpy.typing import NDArray

from dualpath.model.sim.compiled.jit import compiled, inlined, lean, prefetch
from dualpath.model.sim.compiled.ledger import hold
from dualpath.model.sim.compiled.queues import enter_queue, leave_queue, private_queue
from dualpath.model.sim.compiled.tables import (
    BEHIND,
    DECODE,
    END,
    FAR_BEHIND,
    FIRST,
    HBM,
    KEPT_ANY,
    KEPT_ROWS,
    LARGEST_HBM,
    LAST_DEALT,
    LENGTH,
    LENGTHS,
    MOST_KEPT,
    NONE,
    NUMBER,
    PLACED,
    PREFILL,
    PRIVATE_TOKENS,
    QUEUE_FIRST,
    READ_Q,
    REASON,
    RING,
    ROWS,
    TOTAL_TOKENS,
    WHY,
    SchedulerState,
)
from dualpath.policy.accounts import FREE_HBM, NODE, SEQ, TOK, IntArray
from dualpath.policy.decode import (
    assign_decode,
    choose_group,
    choose_keeping_group,
    unfragmented_hbm,
)
from dualpath.policy.events import DE_IN_TURN, PE_IN_TURN
from dualpath.policy.kept import NOTHING_KEPT, prefill_worth
from dualpath.policy.prefill import assign_prefill

#: Waiting requests a kernel call of Algorithm 1 looks at: first so many, then ever more.
FIRST_WINDOW, LAST_WINDOW = 4, 256


@inlined
def place_on_prefill(state: SchedulerState, group: int) -> int:
    """Serve the waiting queue by Algorithm 1 (``FifoPrefillPlacer.fetch``)."""
    count, window = 0, FIRST_WINDOW
    while state.queues[PREFILL, QUEUE_FIRST] != NONE:
        looked_at = _look(state, PREFILL, PREFILL, window)
        placed = _place_window(state, group, looked_at, count)
        count += placed
        if placed < looked_at:
            break
        window = min(2 * window, LAST_WINDOW)
    return count


@inlined
def _look(state: SchedulerState, role: int, queue: int, most: int) -> int:
    """Write the lengths at the head of a queue into the work table; return how many."""
    request, count = state.queues[queue, QUEUE_FIRST], 0
    while request != NONE and count < most:
        state.work[LENGTHS, count] = state.requests[request, LENGTH + role]
        state.work[KEPT_ROWS, count] = _kept_row(state, request)
        _fetch_row_far_behind(state, request, role)
        request = state.requests[request, BEHIND + role]
        count += 1
    return count


@inlined
def _kept_row(state: SchedulerState, request: int) -> int:
    return request if state.requests[request, KEPT_ANY] > 0 else NOTHING_KEPT


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
        state.work[KEPT_ROWS, :window],
        state.kept[:, first:end],
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
    kept_rows: IntArray,
    kept: NDArray[np.int32],
    alpha_tokens: int,
    beta_tokens: int,
    rows: IntArray,
    why: IntArray,
) -> int:
    worth = prefill_worth(alpha_tokens, beta_tokens)
    placed, reasons = assign_prefill(
        tok, node, read_q, lengths, kept_rows, kept, worth, alpha_tokens, beta_tokens
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
    bound = _look_at_upper_bound_set(
        state, queue, unfragmented_hbm(state.engines[FREE_HBM, first:end])
    )
    if bound == 0:
        return 0
    placed = _decode_rows(
        state.engines[TOK, first:end],
        state.engines[SEQ, first:end],
        state.engines[FREE_HBM, first:end],
        state.work[LENGTHS, :bound],
        state.work[KEPT_ROWS, :bound],
        state.kept[:, first:end],
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
    kept_rows: IntArray,
    kept: NDArray[np.int32],
    threshold_factor: float,
    rows: IntArray,
    why: IntArray,
) -> int:
    placed, reasons = assign_decode(tok, seq, free_hbm, lengths, kept_rows, kept, threshold_factor)
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
            if state.requests[request, KEPT_ANY] > 0:
                _note_most_kept(state, request)
                kept = groups[MOST_KEPT, first_group:]
                row = choose_keeping_group(totals, largest, tokens, kept, row)
            group = first_group + row
            groups[TOTAL_TOKENS, group] += tokens
            groups[PRIVATE_TOKENS, group] += tokens
            leave_queue(state, request, DECODE)
            enter_queue(state, request, DECODE, private_queue(groups[FIRST, group]))
        request = behind


@inlined
def _note_most_kept(state: SchedulerState, request: int) -> None:
    """Write down the most tokens that any engine of each DE group keeps of a request."""
    groups, first_group = state.groups, state.first_decode_group
    for group in range(first_group, groups.shape[1]):
        groups[MOST_KEPT, group] = 0
        for engine in range(groups[FIRST, group], groups[END, group]):
            tokens = state.kept[request, engine]
            groups[MOST_KEPT, group] = max(groups[MOST_KEPT, group], tokens)


@inlined
def _look_at_upper_bound_set(state: SchedulerState, queue: int, left: int) -> int:
    """Write the lengths of R (``upper_bound_set``) into the work table; return how many."""
    request, count = state.queues[queue, QUEUE_FIRST], 0
    while request != NONE:
        tokens = state.requests[request, LENGTH + DECODE]
        left -= tokens
        if left < 0:
            break
        state.work[LENGTHS, count] = tokens
        state.work[KEPT_ROWS, count] = _kept_row(state, request)
        _fetch_row_far_behind(state, request, DECODE)
        request = state.requests[request, BEHIND + DECODE]
        count += 1
    return count


@lean
def place_in_turn(state: SchedulerState, role: int, group: int) -> int:
    """Deal, then place what lies before the group's engines (``InTurnPlacer.fetch``)."""
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
    """Return the engine whose turn it is and could ever hold the request."""
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
