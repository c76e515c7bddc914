"""The compiled core's machine: event queue, links and prefetching."""

from dualpath_sim.simulator.compiled.jit import inlined, lean, prefetch
from dualpath_sim.simulator.compiled.tables import (
    A_REQUEST,
    ARRIVE,
    AT_DE,
    CNIC_READ_SERVER,
    CNIC_USE,
    CNIC_WRITE_SERVER,
    DRAM_SERVER,
    FILLED,
    HEAP_REST,
    HEAP_TIME,
    KIND_BITS,
    KIND_MASK,
    NO_SERVER,
    NONE,
    NOW,
    NUMBER,
    NUMBER_SHIFT,
    PENDING,
    PUSHED,
    QUEUE_HEAD,
    READ_OVER,
    SNIC_READ_USE,
    SNIC_WRITE_USE,
    SUBJECT_MASK,
    SUBMIT,
    T_FINISHED,
    U_CHUNK_HEAD,
    U_COUNT,
    U_FIRST,
    WINDOWS,
    World,
)
from dualpath_sim.simulator.result import IntArray
from dualpath_sim.simulator.rules import count_use, last_window, node_of, serve

# The event queue is a heap in a table.

#: Children of a node of the event queue: four rows share a cache line, and levels are few.
FANOUT = 4


@lean
def push(heap: IntArray, counters: IntArray, time_ns: int, kind: int, subject: int) -> int:
    """Let an event happen at ``time_ns``, after all that were pushed earlier for that time.

    Returns the number of the push.
    """
    place = counters[PENDING]
    number = counters[PUSHED]
    counters[PENDING] = place + 1
    counters[PUSHED] = number + 1
    while place > 0:
        parent = (place - 1) // FANOUT
        if heap[parent, HEAP_TIME] <= time_ns:
            # An equal time was pushed earlier.
            break
        heap[place, HEAP_TIME] = heap[parent, HEAP_TIME]
        heap[place, HEAP_REST] = heap[parent, HEAP_REST]
        place = parent
    heap[place, HEAP_TIME] = time_ns
    heap[place, HEAP_REST] = number << NUMBER_SHIFT | subject << KIND_BITS | kind
    return number


@lean
def pop(heap: IntArray, counters: IntArray) -> int:
    """Remove the next event after the caller has read its time; return the rest of it."""
    first = heap[0, HEAP_REST]
    size = counters[PENDING] - 1
    counters[PENDING] = size
    time_ns, rest = heap[size, HEAP_TIME], heap[size, HEAP_REST]
    place = 0
    while True:
        child = FANOUT * place + 1
        if child >= size:
            break
        if child + FANOUT <= size:
            left = child + _second_first(heap, child)
            right = child + 2 + _second_first(heap, child + 2)
            child = right if _precedes(heap, right, left) else left
        else:
            for other in range(child + 1, size):
                if _precedes(heap, other, child):
                    child = other
        least_ns, least_rest = heap[child, HEAP_TIME], heap[child, HEAP_REST]
        if time_ns < least_ns or (time_ns == least_ns and rest < least_rest):
            break
        heap[place, HEAP_TIME] = least_ns
        heap[place, HEAP_REST] = least_rest
        place = child
    heap[place, HEAP_TIME] = time_ns
    heap[place, HEAP_REST] = rest
    return first


@inlined
def _precedes(heap: IntArray, one: int, other: int) -> bool:
    # Without branches, which would be guessed wrong half of the time.
    earlier = heap[one, HEAP_TIME] < heap[other, HEAP_TIME]
    tied = heap[one, HEAP_TIME] == heap[other, HEAP_TIME]
    return earlier | (tied & (heap[one, HEAP_REST] < heap[other, HEAP_REST]))


@inlined
def _second_first(heap: IntArray, place: int) -> int:
    return int(_precedes(heap, place + 1, place))


# Servers: links and memories (the reference core's ``links``).


@lean
def _count_use(
    p: World, table: int, node: int, start_ns: int, end_ns: int, transfer_bytes: float
) -> None:
    """Count a transfer in the windows of its time; beyond the last window, count nothing."""
    use, counters, window_ns = p.machine.use, p.machine.counters, p.constants.window_ns
    last = last_window(start_ns, end_ns, window_ns)
    counters[WINDOWS] = max(counters[WINDOWS], last + 1)
    if last < use.shape[1]:
        count_use(use[table], node, start_ns, end_ns, last, transfer_bytes, window_ns)


@inlined
def _serve(p: World, server: int, transfer_bytes: float, bytes_per_s: float) -> int:
    """Queue a transfer at a server and return when it starts; ``busy_ns`` is when it is over."""
    busy_ns = p.machine.busy_ns
    start_ns, busy_ns[server] = serve(
        p.machine.counters[NOW], busy_ns[server], transfer_bytes, bytes_per_s
    )
    return start_ns


@inlined
def node_at(p: World, engine: int) -> int:
    """Return the node of an engine."""
    c = p.constants
    return node_of(
        engine,
        c.prefill_engines,
        c.prefill_nodes,
        c.prefill_node_engines,
        c.decode_node_engines,
    )


@lean
def charge_cnic(p: World, engine: int, writes: int, transfer_bytes: float) -> int:
    """Queue a transfer at an engine's CNIC (writes: 1) and return when it is over."""
    server, c = writes * p.machine.engines.shape[0] + engine, p.constants
    at_pe = engine < c.prefill_engines
    bytes_per_s = c.prefill_cnic_bytes_per_s if at_pe else c.decode_cnic_bytes_per_s
    start_ns = _serve(p, server, transfer_bytes, bytes_per_s)
    end_ns = p.machine.busy_ns[server]
    _count_use(p, CNIC_USE, node_at(p, engine), start_ns, end_ns, transfer_bytes)
    return end_ns


@lean
def _charge_dram(p: World, node: int, transfer_bytes: float) -> int:
    server = 2 * p.machine.engines.shape[0] + node
    _serve(p, server, transfer_bytes, p.constants.dram_bytes_per_s)
    return p.machine.busy_ns[server]


@lean
def _charge_snic_write(p: World, node: int, transfer_bytes: float) -> int:
    server = 2 * p.machine.engines.shape[0] + p.constants.cluster_nodes + node
    start_ns = _serve(p, server, transfer_bytes, p.constants.snic_write_bytes_per_s)
    end_ns = p.machine.busy_ns[server]
    _count_use(p, SNIC_WRITE_USE, node, start_ns, end_ns, transfer_bytes)
    return end_ns


@lean
def charge_path(p: World, path: int, pe: int, de: int, step_bytes: float) -> int:
    """Charge a kind of step at all its servers and return when the last has carried it."""
    paths, end_ns = p.machine.paths, p.machine.counters[NOW]
    if step_bytes <= 0:
        return end_ns
    step_bytes *= p.machine.copies[path]
    place = 0
    while paths[path, place] != NO_SERVER:
        kind, engine = paths[path, place], pe
        if kind > AT_DE:
            kind, engine = kind - AT_DE, de
        if kind == CNIC_READ_SERVER:
            over_ns = charge_cnic(p, engine, 0, step_bytes)
        elif kind == CNIC_WRITE_SERVER:
            over_ns = charge_cnic(p, engine, 1, step_bytes)
        elif kind == DRAM_SERVER:
            over_ns = _charge_dram(p, node_at(p, engine), step_bytes)
        else:
            over_ns = _charge_snic_write(p, node_at(p, engine), step_bytes)
        end_ns = max(end_ns, over_ns)
        place += 1
    return end_ns


@lean
def read_storage(p: World, node: int, read: int, read_bytes: float) -> None:
    """Queue a read (the number that ``READ_OVER`` names) at a first-come-first-served SNIC."""
    m, c = p.machine, p.constants
    server = 2 * m.engines.shape[0] + 2 * c.cluster_nodes + node
    start_ns = _serve(p, server, read_bytes, c.snic_bytes_per_s)
    end_ns = m.busy_ns[server]
    _count_use(p, SNIC_READ_USE, node, start_ns, end_ns, read_bytes)
    push(m.heap, m.counters, end_ns + c.latency_ns, READ_OVER, read)


# Prefetching.  With many agents the rows of an event are in no cache, and without this most of the
# time would be waiting for memory.  It changes how soon a run is over, nothing else.


@lean
def look_ahead(p: World) -> None:
    """Prefetch the rows of the next event, and those that name the rows of the events after it."""
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
    """Return the agent of an event, NONE if it has none."""
    kind, subject = event & KIND_MASK, event >> KIND_BITS & SUBJECT_MASK
    if kind == READ_OVER:
        return subject >> 1
    return subject if kind in (FILLED, SUBMIT, ARRIVE) else NONE


@lean
def fetch_rows(p: World, agent: int) -> None:
    """Prefetch the rows of an agent and of its live round."""
    m = p.machine
    prefetch(m.flights, agent, 0)
    prefetch(p.scheduler.requests, agent, 0)
    prefetch(m.stored_ns, agent, 0)
    r = m.round_of[agent]
    prefetch(m.times, r, 0)
    prefetch(m.times, r, T_FINISHED)


@lean
def fetch_next_round(p: World, agent: int) -> None:
    """Prefetch the columns of an agent's next round, and the row of its times."""
    columns, r = p.rounds, p.machine.round_of[agent] + 1
    prefetch(columns.delay_s, r, 0)
    prefetch(columns.prompt, r, 0)
    prefetch(columns.hit, r, 0)
    prefetch(columns.generated, r, 0)
    prefetch(p.machine.times, r, 0)
    prefetch(p.machine.times, r, T_FINISHED)


@lean
def fetch_assigned(p: World, count: int) -> None:
    """Prefetch the rows of all agents in the latest assignments."""
    for row in range(count):
        fetch_rows(p, p.scheduler.assigned[row, A_REQUEST])


@lean
def fetch_queues(p: World, unit: int) -> None:
    """Prefetch the rows of the first agents in a unit's queues."""
    m = p.machine
    first = m.units[unit, U_FIRST]
    for engine in range(first, first + m.units[unit, U_COUNT]):
        agent = m.engines[engine, QUEUE_HEAD]
        if agent != NONE:
            prefetch(m.flights, agent, 0)
            prefetch(m.next_queued, agent, 0)


@lean
def fetch_chunks(p: World, unit: int) -> None:
    """Prefetch the rows of all agents in a unit's pass."""
    m = p.machine
    agent = m.units[unit, U_CHUNK_HEAD]
    while agent != NONE:
        fetch_rows(p, agent)
        agent = m.next_chunk[agent]
