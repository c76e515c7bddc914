"""Doubly linked lists inside the table of requests: waiting lines and told requests.

Every operation costs the same however many requests wait.
"""

from dualpath.model.sim.compiled.jit import inlined
from dualpath.model.sim.compiled.tables import (
    AHEAD,
    BEHIND,
    COMMON_LINES,
    ENGINE,
    ENTERED,
    FAR_BEHIND,
    FIRST_TOLD,
    LAST_TOLD,
    LATEST,
    LINE,
    LINE_HEAD,
    LINE_TAIL,
    NONE,
    STRIDE,
    TOLD_AFTER,
    TOLD_BEFORE,
    SchedulerState,
)


@inlined
def private_line(engine: int) -> int:
    """Return the number of an engine's line, or of the line of the group it is the first of."""
    return COMMON_LINES + engine


@inlined
def enter_line(state: SchedulerState, request: int, role: int, line: int) -> None:
    """Let a request wait at the end of a line."""
    requests, lines = state.requests, state.lines
    last = lines[line, LINE_TAIL]
    requests[request, LINE + role] = line
    requests[request, AHEAD + role] = last
    requests[request, BEHIND + role] = NONE
    if last == NONE:
        lines[line, LINE_HEAD] = request
    else:
        requests[last, BEHIND + role] = request
    lines[line, LINE_TAIL] = request
    latest = LATEST + lines[line, ENTERED] % STRIDE
    lines[line, ENTERED] += 1
    if lines[line, latest] != NONE:
        requests[lines[line, latest], FAR_BEHIND + role] = request
    lines[line, latest] = request


@inlined
def leave_line(state: SchedulerState, request: int, role: int) -> None:
    """Take a waiting request out of its line."""
    requests, lines = state.requests, state.lines
    line = requests[request, LINE + role]
    ahead, behind = requests[request, AHEAD + role], requests[request, BEHIND + role]
    if ahead == NONE:
        lines[line, LINE_HEAD] = behind
    else:
        requests[ahead, BEHIND + role] = behind
    if behind == NONE:
        lines[line, LINE_TAIL] = ahead
    else:
        requests[behind, AHEAD + role] = ahead
    requests[request, LINE + role] = NONE


@inlined
def enter_told(state: SchedulerState, request: int, role: int) -> None:
    """Put a request at the end of what its engine was told and has not reported yet."""
    requests, engines = state.requests, state.engines
    engine = requests[request, ENGINE + role]
    last = engines[LAST_TOLD, engine]
    requests[request, TOLD_BEFORE + role] = last
    requests[request, TOLD_AFTER + role] = NONE
    if last == NONE:
        engines[FIRST_TOLD, engine] = request
    else:
        requests[last, TOLD_AFTER + role] = request
    engines[LAST_TOLD, engine] = request


@inlined
def leave_told(state: SchedulerState, request: int, role: int) -> None:
    """Take a request out of that list."""
    requests, engines = state.requests, state.engines
    engine = requests[request, ENGINE + role]
    before, after = requests[request, TOLD_BEFORE + role], requests[request, TOLD_AFTER + role]
    if before == NONE:
        engines[FIRST_TOLD, engine] = after
    else:
        requests[before, TOLD_AFTER + role] = after
    if after == NONE:
        engines[LAST_TOLD, engine] = before
    else:
        requests[after, TOLD_BEFORE + role] = before
