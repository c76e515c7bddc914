"""Asking for rows before they are needed.

With many agents an event's rows are in no cache, and without this most of the time would be waiting
for memory.  Nothing here changes anything but how soon a run is over.
"""

from dualpath.model.sim.compiled.columns import (
    ARRIVE,
    FILLED,
    HEAP_REST,
    KIND_BITS,
    KIND_MASK,
    NONE,
    QUEUE_HEAD,
    READ_OVER,
    SUBJECT_MASK,
    SUBMIT,
    T_FINISHED,
    U_CHUNK_HEAD,
    U_COUNT,
    U_FIRST,
)
from dualpath.model.sim.compiled.events import FANOUT
from dualpath.model.sim.compiled.jit import lean, prefetch
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.compiled.tables import A_REQUEST, NUMBER


@lean
def look_ahead(p: World) -> None:
    """Ask for what the next event will need, and for what shows what those after it will."""
    m = p.machine
    heap = m.heap
    for place in range(1, FANOUT + 1):
        agent = _agent_of(heap[place, HEAP_REST])
        if agent != NONE:
            prefetch(m.round_of, agent, 0)
            prefetch(m.flights, agent, 0)
            prefetch(p.scheduler.requests, agent, 0)
    event = heap[0, HEAP_REST]
    agent = _agent_of(event)
    if agent == NONE:
        return
    if event & KIND_MASK in (SUBMIT, ARRIVE):
        prefetch(p.scheduler.requests, agent, NUMBER)
        fetch_next_round(p, agent)
    else:
        fetch_rows(p, agent)


@lean
def _agent_of(event: int) -> int:
    """Return whom an event is about, NONE if that is no agent."""
    kind, subject = event & KIND_MASK, event >> KIND_BITS & SUBJECT_MASK
    if kind == READ_OVER:
        return subject >> 1
    return subject if kind in (FILLED, SUBMIT, ARRIVE) else NONE


@lean
def fetch_rows(p: World, agent: int) -> None:
    """Ask for what is kept of an agent and its live round."""
    m = p.machine
    prefetch(m.flights, agent, 0)
    prefetch(p.scheduler.requests, agent, 0)
    prefetch(m.stored_ns, agent, 0)
    r = m.round_of[agent]
    prefetch(m.times, r, 0)
    prefetch(m.times, r, T_FINISHED)


@lean
def fetch_next_round(p: World, agent: int) -> None:
    """Ask for what the columns say of an agent's next round, and where its times are kept."""
    columns, r = p.rounds, p.machine.round_of[agent] + 1
    prefetch(columns.delay_s, r, 0)
    prefetch(columns.prompt, r, 0)
    prefetch(columns.hit, r, 0)
    prefetch(columns.generated, r, 0)
    prefetch(p.machine.times, r, 0)
    prefetch(p.machine.times, r, T_FINISHED)


@lean
def fetch_assigned(p: World, count: int) -> None:
    """Ask for the rows of all agents in the latest assignments."""
    for row in range(count):
        fetch_rows(p, p.scheduler.assigned[row, A_REQUEST])


@lean
def fetch_queues(p: World, unit: int) -> None:
    """Ask for the rows of the first agents in a unit's queues."""
    m = p.machine
    first = m.units[unit, U_FIRST]
    for engine in range(first, first + m.units[unit, U_COUNT]):
        agent = m.engines[engine, QUEUE_HEAD]
        if agent != NONE:
            prefetch(m.flights, agent, 0)
            prefetch(m.next_queued, agent, 0)


@lean
def fetch_chunks(p: World, unit: int) -> None:
    """Ask for the rows of all agents in a unit's pass."""
    m = p.machine
    agent = m.units[unit, U_CHUNK_HEAD]
    while agent != NONE:
        fetch_rows(p, agent)
        agent = m.next_chunk[agent]
