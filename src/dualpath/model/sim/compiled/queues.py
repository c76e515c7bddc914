"""Doubly linked lists inside the table of requests: wait queues and pending requests.

Every operation costs the same however many requests wait.
"""

from dualpath.model.sim.compiled.jit import inlined
from dualpath.model.sim.compiled.tables import (
    AHEAD,
    BEHIND,
    COMMON_QUEUES,
    ENGINE,
    ENTERED,
    FAR_BEHIND,
    FIRST_PENDING,
    LAST_PENDING,
    LATEST,
    NONE,
    PENDING_AFTER,
    PENDING_BEFORE,
    QUEUE,
    QUEUE_FIRST,
    QUEUE_LAST,
    STRIDE,
    SchedulerState,
)


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


@inlined
def enter_pending(state: SchedulerState, request: int, role: int) -> None:
    """Put a request at the end of what its engine was assigned and has not reported yet."""
    requests, engines = state.requests, state.engines
    engine = requests[request, ENGINE + role]
    last = engines[LAST_PENDING, engine]
    requests[request, PENDING_BEFORE + role] = last
    requests[request, PENDING_AFTER + role] = NONE
    if last == NONE:
        engines[FIRST_PENDING, engine] = request
    else:
        requests[last, PENDING_AFTER + role] = request
    engines[LAST_PENDING, engine] = request


@inlined
def leave_pending(state: SchedulerState, request: int, role: int) -> None:
    """Take a request out of that list."""
    requests, engines = state.requests, state.engines
    engine = requests[request, ENGINE + role]
    before = requests[request, PENDING_BEFORE + role]
    after = requests[request, PENDING_AFTER + role]
    if before == NONE:
        engines[FIRST_PENDING, engine] = after
    else:
        requests[before, PENDING_AFTER + role] = after
    if after == NONE:
        engines[LAST_PENDING, engine] = before
    else:
        requests[after, PENDING_BEFORE + role] = before
