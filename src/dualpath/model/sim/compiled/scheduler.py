"""``policy.RequestScheduler`` over tables, decision by decision the same.

The rules are the policy's own kernels (``sim.compiled.kernels``); what stands here is the
bookkeeping around them, in tables.  Engines neither come nor go: the live scheduler and the
reference core do that.  Lengths and reports are not checked, the caller's are known to be right.
"""

from dualpath.model.sim.compiled.jit import inlined, lean
from dualpath.model.sim.compiled.ledger import assign, charge_read, release, release_read, uncounted
from dualpath.model.sim.compiled.placement import place_in_turn, place_on_decode, place_on_prefill
from dualpath.model.sim.compiled.queues import enter_queue, leave_pending, leave_queue
from dualpath.model.sim.compiled.tables import (
    A_DE,
    A_DE_READ,
    A_DE_REASON,
    A_DE_SEQ,
    A_PE,
    A_PE_READ,
    A_PE_REASON,
    A_PE_SEQ,
    A_READ_REASON,
    A_REQUEST,
    ASSIGNED,
    COMMON_QUEUES,
    DECODE,
    ENGINE,
    FIRST_SIDE,
    GROUP,
    HIT,
    IN_TURN_PES,
    LENGTH,
    NO_READS,
    NONE,
    NUMBER,
    PE_READS,
    PLACED,
    PREFILL,
    PRIVATE_TOKENS,
    PROMPT,
    QUEUE,
    READ_Q,
    READ_TOTAL,
    REASON,
    SIDES_IN_TURN,
    SPLIT_READS,
    SUBMITTED,
    UNASSIGNED,
    SchedulerState,
)
from dualpath.model.sim.result import READ_REASONS
from dualpath.policy.accounts import NODE
from dualpath.policy.read_side import REASONS, choose_by_queue, split_head_tokens

NO_HIT = READ_REASONS.index("no-hit")
ORACLE = READ_REASONS.index("oracle")
PE_ONLY = READ_REASONS.index("pe-only")
READ_IN_TURN = READ_REASONS.index("round-robin")
SPLIT = READ_REASONS.index("split")

#: What ``choose_by_queue`` says, as codes of ``READ_REASONS``.
DECIDED_BY = tuple(READ_REASONS.index(reason) for reason in REASONS)


@inlined
def submit(state: SchedulerState, request: int, prompt: int, hit: int, max_new: int) -> None:
    """Let a request wait for a PE and a DE."""
    requests, counters = state.requests, state.counters
    requests[request, NUMBER] = counters[SUBMITTED]
    requests[request, PROMPT] = prompt
    requests[request, HIT] = hit
    requests[request, ASSIGNED] = 0
    reserve = min(max_new, state.rules.generated_reserve_tokens)
    requests[request, LENGTH + PREFILL] = prompt
    requests[request, LENGTH + DECODE] = prompt + reserve
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
    if state.requests[request, ASSIGNED] == 1:
        release_read(state, request, PREFILL)
        release_read(state, request, DECODE)


@inlined
def prefill_done(state: SchedulerState, request: int) -> None:
    """The PE is through with an assigned request."""
    if state.requests[request, ASSIGNED] == 1:
        release(state, request, PREFILL)


@inlined
def finished(state: SchedulerState, request: int) -> None:
    """A request is over, in whatever state it is; its number may be used again."""
    requests = state.requests
    if requests[request, ASSIGNED] == 0:
        _withdraw(state, request)
        return
    read_done(state, request)
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
    assigned[row, A_PE_SEQ] = assign(state, request, PREFILL)
    assigned[row, A_DE_SEQ] = assign(state, request, DECODE)
    head, reason = _choose_reads(state, request)
    tail = 0 if reason in (NO_HIT, ORACLE) else requests[request, HIT] - head
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
def _choose_reads(state: SchedulerState, request: int) -> tuple[int, int]:
    """Return how many leading hit tokens the PE reads, and why; the DE reads the rest."""
    hit, reads = state.requests[request, HIT], state.rules.reads
    if hit == 0:
        return 0, NO_HIT
    if reads == NO_READS:
        return 0, ORACLE
    if reads == PE_READS:
        return hit, PE_ONLY
    pe = state.requests[request, ENGINE + PREFILL]
    de = state.requests[request, ENGINE + DECODE]
    if reads == SIDES_IN_TURN:
        return hit if _side_in_turn(state, pe, de) == PREFILL else 0, READ_IN_TURN
    return _choose_by_load(state, pe, de, hit)


@inlined
def _choose_by_load(state: SchedulerState, pe: int, de: int, hit: int) -> tuple[int, int]:
    engines, nodes, rates = state.engines, state.nodes, state.snic_tokens_per_s
    pe_node, de_node = engines[NODE, pe], engines[NODE, de]
    pe_queue, pe_total, pe_rate = (
        nodes[READ_Q, pe_node],
        nodes[READ_TOTAL, pe_node],
        rates[pe],
    )
    de_queue, de_total, de_rate = (
        nodes[READ_Q, de_node],
        nodes[READ_TOTAL, de_node],
        rates[de],
    )
    if state.rules.reads == SPLIT_READS:
        head = split_head_tokens(
            pe_queue, pe_total, pe_rate, de_queue, de_total, de_rate, hit, state.rules.block_tokens
        )
        if 0 < head < hit:
            return head, SPLIT
        by = choose_by_queue(pe_queue, pe_total, pe_rate, de_queue, de_total, de_rate)[1]
        return head, DECIDED_BY[by]
    at_prefill, by = choose_by_queue(pe_queue, pe_total, pe_rate, de_queue, de_total, de_rate)
    return hit if at_prefill else 0, DECIDED_BY[by]


@inlined
def _side_in_turn(state: SchedulerState, pe: int, de: int) -> int:
    """``SidesInTurn.take``."""
    sides, engines = state.sides, state.engines
    column = de - state.first_decode_engine
    side = sides[pe, column]
    if side == NONE:
        side = engines[FIRST_SIDE, pe]
        if side == NONE:
            side = state.counters[IN_TURN_PES] % 2
            state.counters[IN_TURN_PES] += 1
        engines[FIRST_SIDE, pe] = 1 - side
    sides[pe, column] = 1 - side
    return side
