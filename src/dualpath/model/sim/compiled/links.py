"""Servers and storage NICs of the compiled core (the reference's links)."""

from dualpath.model.sim.compiled.columns import (
    AT_DE,
    CNIC_READ_SERVER,
    CNIC_USE,
    CNIC_WRITE_SERVER,
    DRAM_SERVER,
    N_COUNT,
    N_EXPECTED,
    N_READS,
    N_ROOT,
    N_SINCE,
    NO_SERVER,
    NONE,
    NOW,
    READ_OVER,
    SERVED_BYTES,
    SNIC_END,
    SNIC_READ_USE,
    SNIC_WRITE_USE,
    WINDOWS,
)
from dualpath.model.sim.compiled.events import add_node, drop_root, push
from dualpath.model.sim.compiled.jit import inlined, lean
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.rules import (
    count_use,
    equal_served_bytes,
    equal_wait_ns,
    last_window,
    node_of,
    serve,
)


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
    """Charge a kind of step at all its servers and return when the last is through."""
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
def read_fifo(p: World, node: int, read: int, read_bytes: float) -> None:
    """Queue a read (the number that ``READ_OVER`` names) at a first-come-first-served SNIC."""
    m, c = p.machine, p.constants
    server = 2 * m.engines.shape[0] + 2 * c.cluster_nodes + node
    start_ns = _serve(p, server, read_bytes, c.snic_bytes_per_s)
    end_ns = m.busy_ns[server]
    _count_use(p, SNIC_READ_USE, node, start_ns, end_ns, read_bytes)
    push(m.heap, m.counters, end_ns + c.latency_ns, READ_OVER, read)


@lean
def read_equal(p: World, node: int, read: int, read_bytes: float) -> None:
    """Begin a read at an SNIC that serves all reads at once."""
    _advance_equal(p, node)
    m = p.machine
    nodes = m.nodes
    key = m.node_bytes[node, SERVED_BYTES] + read_bytes
    nodes[node, N_ROOT] = add_node(
        m.keys, m.links, nodes[node, N_ROOT], read, key, nodes[node, N_COUNT]
    )
    nodes[node, N_COUNT] += 1
    nodes[node, N_READS] += 1
    _expect_next(p, node)


@lean
def _advance_equal(p: World, node: int) -> None:
    """Serve the reads under way at a node up to now."""
    nodes, now_ns = p.machine.nodes, p.machine.counters[NOW]
    reads = nodes[node, N_READS]
    if reads:
        since_ns = nodes[node, N_SINCE]
        carried = equal_served_bytes(now_ns - since_ns, p.constants.snic_bytes_per_s)
        p.machine.node_bytes[node, SERVED_BYTES] += carried / reads
        _count_use(p, SNIC_READ_USE, node, since_ns, now_ns, carried)
    nodes[node, N_SINCE] = now_ns


@lean
def _expect_next(p: World, node: int) -> None:
    m = p.machine
    nodes = m.nodes
    left = m.keys[nodes[node, N_ROOT]] - m.node_bytes[node, SERVED_BYTES]
    wait_ns = equal_wait_ns(left, nodes[node, N_READS], p.constants.snic_bytes_per_s)
    due_ns = m.counters[NOW] + wait_ns
    nodes[node, N_EXPECTED] = push(m.heap, m.counters, due_ns, SNIC_END, node)


@lean
def end_equal(p: World, node: int, number: int) -> None:
    """End the read that is due, unless others came or went since push ``number``."""
    m = p.machine
    nodes, node_bytes = m.nodes, m.node_bytes
    if number != nodes[node, N_EXPECTED]:
        return
    _advance_equal(p, node)
    root = nodes[node, N_ROOT]
    node_bytes[node, SERVED_BYTES] = max(node_bytes[node, SERVED_BYTES], m.keys[root])
    nodes[node, N_ROOT] = drop_root(m.keys, m.links, root)
    nodes[node, N_READS] -= 1
    over_ns = m.counters[NOW] + p.constants.latency_ns
    push(m.heap, m.counters, over_ns, READ_OVER, root)
    if nodes[node, N_ROOT] != NONE:
        _expect_next(p, node)
