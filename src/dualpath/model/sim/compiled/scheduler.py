"""``policy.RequestScheduler`` over tables, decision by decision the same.

The rules are the policy's own kernels (``sim.compiled.kernels``); what stands here is the
bookkeeping around them, in tables.  Engines neither come nor go: the live scheduler and the
reference core do that.  Lengths and reports are not checked, the caller's are known to be right.
"""

from dualpath.model.sim.compiled.jit import inlined, lean
from dualpath.model.sim.compiled.ledger import (
    assign,
    change,
    charge_read,
    release,
    release_read,
    set_computing,
    uncounted,
)
from dualpath.model.sim.compiled.placement import place_in_turn, place_on_decode, place_on_prefill
from dualpath.model.sim.compiled.queues import enter_queue, leave_pending, leave_queue
from dualpath.model.sim.compiled.tables import (
    A_DE,
    A_DE_KEPT,
    A_DE_READ,
    A_DE_REASON,
    A_DE_SEQ,
    A_PE,
    A_PE_KEPT,
    A_PE_READ,
    A_PE_REASON,
    A_PE_SEQ,
    A_READ_REASON,
    A_RECOMPUTE,
    A_REQUEST,
    ASSIGNED,
    COMMON_QUEUES,
    DECODE,
    ENGINE,
    FIRST_SIDE,
    GROUP,
    HIT,
    IN_TURN_PES,
    KEPT_ANY,
    LENGTH,
    NONE,
    NUMBER,
    PLACED,
    PREFILL,
    PRIVATE_TOKENS,
    PROMPT,
    QUEUE,
    READ,
    READ_Q,
    READ_TOTAL,
    REASON,
    SUBMITTED,
    TO_COMPUTE,
    UNASSIGNED,
    SchedulerState,
)
from dualpath.policy.accounts import COMPUTING, NODE, decode_tokens
from dualpath.policy.baselines import NO_TURN, first_turn, other_side
from dualpath.policy.read_side import (
    KEPT,
    NO_READS,
    PE_READS,
    PE_SIDE,
    RECOMPUTE,
    SIDES_IN_TURN,
    kept_tokens,
    read_tokens,
)
from dualpath.policy.recompute import more_weight, recompute_tokens, weight_tokens


@inlined
def submit(state: SchedulerState, request: int, prompt: int, hit: int, max_new: int) -> None:
    """Let a request wait for a PE and a DE."""
    requests, counters = state.requests, state.counters
    requests[request, NUMBER] = counters[SUBMITTED]
    requests[request, PROMPT] = prompt
    requests[request, HIT] = hit
    requests[request, ASSIGNED] = 0
    requests[request, TO_COMPUTE] = 0
    requests[request, KEPT_ANY] = 0
    reserve = state.rules.generated_reserve_tokens
    requests[request, LENGTH + PREFILL] = prompt
    requests[request, LENGTH + DECODE] = decode_tokens(prompt, max_new, reserve)
    counters[SUBMITTED] += 1
    counters[UNASSIGNED] += 1
    for role in range(2):
        requests[request, ENGINE + role] = NONE
        enter_queue(state, request, role, role)


@inlined
def keep(state: SchedulerState, request: int, engine: int, tokens: int) -> None:
    """An engine keeps so many tokens at the head of a request that was just submitted.

    To be said of every engine, also of those that keep nothing, where there is a DRAM tier.
    """
    rule = state.rules.read_rule
    if rule == NO_READS or (rule == PE_READS and engine >= state.first_decode_engine):
        tokens = 0
    state.kept[request, engine] = tokens
    if tokens > 0:
        state.requests[request, KEPT_ANY] = 1


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
def choose_anew(
    state: SchedulerState, request: int, pe_kept: int, de_kept: int, recomputed: int
) -> tuple[int, int, int, int, int, int]:
    """Choose an assigned request's reads anew: its engines keep so many tokens of its hit now.

    ``recomputed`` of its hit are computed again already.  Returns what its PE and its DE read, what
    is taken from the DRAM of either, what is computed again in all, and why
    (``Assigner.choose_anew``).
    """
    requests = state.requests
    set_computing(state, request, 0)
    for role in range(2):
        change(state, request, role, 0, -requests[request, READ + role])
    state.kept[request, requests[request, ENGINE + PREFILL]] = min(pe_kept, requests[request, HIT])
    state.kept[request, requests[request, ENGINE + DECODE]] = min(de_kept, requests[request, HIT])
    at_prefill, at_decode, more = _cut_hit(state, request)
    head, tail, reason = _choose_reads(state, request, at_prefill + at_decode)
    weight = more_weight(recomputed, recomputed + more, state.rules.computed_weight)
    change(state, request, PREFILL, weight, head)
    change(state, request, DECODE, 0, tail)
    if recomputed + more:
        reason = RECOMPUTE
    return head, tail, at_prefill, at_decode, recomputed + more, reason


@inlined
def read_done(state: SchedulerState, request: int) -> None:
    """All storage reads of an assigned request are over."""
    if state.requests[request, ASSIGNED] == 1:
        release_read(state, request, PREFILL)
        release_read(state, request, DECODE)


@inlined
def prefill_done(state: SchedulerState, request: int) -> None:
    """The PE is through with an assigned request."""
    if state.requests[request, ASSIGNED] == 1:
        set_computing(state, request, 0)
        release(state, request, PREFILL)


@inlined
def finished(state: SchedulerState, request: int) -> None:
    """A request is over, in whatever state it is; its number may be used again."""
    requests = state.requests
    if requests[request, ASSIGNED] == 0:
        _withdraw(state, request)
        return
    read_done(state, request)
    set_computing(state, request, 0)
    for role in range(2):
        release(state, request, role)
        if uncounted(state, request, role):
            leave_pending(state, request, role)


@lean
def _withdraw(state: SchedulerState, request: int) -> None:
    """Forget a request that is not assigned yet."""
    requests = state.requests
    state.counters[UNASSIGNED] -= 1
    for role in range(2):
        queue = requests[request, QUEUE + role]
        if queue != NONE:
            if role == DECODE and queue != DECODE and not state.rules.in_turn:
                group = state.engines[GROUP, queue - COMMON_QUEUES]
                state.groups[PRIVATE_TOKENS, group] -= requests[request, LENGTH + DECODE]
            leave_queue(state, request, role)
        if requests[request, ENGINE + role] != NONE:
            release(state, request, role)


@inlined
def _assign_placed(state: SchedulerState, other_role: int, placed: int) -> int:
    """Assign every placed request whose other engine is known."""
    count = 0
    for position in range(placed):
        request = state.work[PLACED, position]
        if state.requests[request, ENGINE + other_role] != NONE:
            _assign(state, request, count)
            count += 1
    return count


@inlined
def _assign(state: SchedulerState, request: int, row: int) -> None:
    """Number it at both engines, choose the reads, write it down (``_assign`` of the policy)."""
    requests, assigned = state.requests, state.assigned
    requests[request, ASSIGNED] = 1
    state.counters[UNASSIGNED] -= 1
    at_prefill, at_decode, recomputed = _cut_hit(state, request)
    weight = weight_tokens(recomputed, state.rules.computed_weight)
    assigned[row, A_PE_SEQ] = assign(state, request, PREFILL, weight)
    assigned[row, A_DE_SEQ] = assign(state, request, DECODE, 0)
    head, tail, reason = _choose_reads(state, request, at_prefill + at_decode)
    if head > 0:
        charge_read(state, request, PREFILL, head)
    if tail > 0:
        charge_read(state, request, DECODE, tail)
    assigned[row, A_REQUEST] = request
    assigned[row, A_PE] = requests[request, ENGINE + PREFILL]
    assigned[row, A_DE] = requests[request, ENGINE + DECODE]
    assigned[row, A_PE_READ] = head
    assigned[row, A_DE_READ] = tail
    assigned[row, A_PE_KEPT] = at_prefill
    assigned[row, A_DE_KEPT] = at_decode
    assigned[row, A_PE_REASON] = requests[request, REASON + PREFILL]
    assigned[row, A_DE_REASON] = requests[request, REASON + DECODE]
    assigned[row, A_READ_REASON] = RECOMPUTE if recomputed else reason
    assigned[row, A_RECOMPUTE] = recomputed


@inlined
def _cut_hit(state: SchedulerState, request: int) -> tuple[int, int, int]:
    """Take off a request's hit what is computed again; its PE has it to compute from now on.

    Returns what is taken from the DRAM of its PE, and of its DE, and what is computed again.
    """
    requests = state.requests
    at_prefill, at_decode = _kept_tokens(state, request)
    recomputed = _recompute_tokens(state, request, at_prefill + at_decode)
    requests[request, HIT] -= recomputed
    set_computing(state, request, requests[request, PROMPT] - requests[request, HIT])
    return at_prefill, at_decode, recomputed


@inlined
def _kept_tokens(state: SchedulerState, request: int) -> tuple[int, int]:
    """Return how many of its hit tokens are taken from the DRAM of its PE, and of its DE."""
    if state.requests[request, KEPT_ANY] == 0:
        return 0, 0
    pe = state.requests[request, ENGINE + PREFILL]
    de = state.requests[request, ENGINE + DECODE]
    at_decode, at_prefill = kept_tokens(
        state.rules.read_rule, state.kept[request, pe], state.kept[request, de]
    )
    return at_prefill, at_decode


@inlined
def _recompute_tokens(state: SchedulerState, request: int, kept: int) -> int:
    """Return how many of its hit tokens but ``kept`` are computed again."""
    rules, requests, read_q = state.rules, state.requests, state.nodes[READ_Q]
    pe, de = requests[request, ENGINE + PREFILL], requests[request, ENGINE + DECODE]
    return recompute_tokens(
        rules.read_rule,
        requests[request, HIT] - kept,
        state.engines[COMPUTING, pe],
        read_q[state.engines[NODE, pe]],
        read_q[state.engines[NODE, de]],
        rules.alpha_tokens,
        rules.beta_tokens,
        rules.computed_weight,
        rules.recompute_limit_s,
        rules.block_tokens,
    )


@inlined
def _choose_reads(state: SchedulerState, request: int, kept: int) -> tuple[int, int, int]:
    """Return what its PE and its DE read of the hit tokens but ``kept``, and why."""
    nodes, rates, rules = state.nodes, state.snic_tokens_per_s, state.rules
    hit, turn = state.requests[request, HIT] - kept, PE_SIDE
    pe = state.requests[request, ENGINE + PREFILL]
    de = state.requests[request, ENGINE + DECODE]
    if rules.read_rule == SIDES_IN_TURN and hit > 0:
        turn = _side_in_turn(state, pe, de)
    pe_node, de_node = state.engines[NODE, pe], state.engines[NODE, de]
    head, tail, reason = read_tokens(
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
    return head, tail, KEPT if kept > 0 and hit == 0 else reason


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
