"""Servers, storage NICs and buffers of the compiled core (the reference's links and buffers)."""

from dualpath.sim.compiled.events import add_node, drop_root, push
from dualpath.sim.compiled.jit import Held, inlined, lean
from dualpath.sim.compiled.machine_tables import (
    CNIC_READ_SERVER,
    CNIC_USE,
    CNIC_WRITE_SERVER,
    DRAM_SERVER,
    N_COUNT,
    N_READS,
    N_ROOT,
    N_SINCE,
    N_VERSION,
    NO_SERVER,
    NONE,
    NOW,
    READ_OVER,
    SERVED_BYTES,
    SNIC_END,
    SNIC_READ_USE,
    SNIC_WRITE_USE,
    UNIT_BITS,
    WINDOWS,
)
from dualpath.sim.compiled.world import World, constants_of, machine_of
from dualpath.sim.costs import transfer_ns as _transfer_ns

transfer_ns = inlined(_transfer_ns)


@lean
def count_use(
    p: Held[World],
    table: int,
    node: int,
    start_ns: int,
    end_ns: int,
    transfer_bytes: float,
) -> None:
    """Spread a transfer evenly over the windows of its time; beyond the last, count nothing."""
    m = machine_of(p)
    use, counters, window_ns = m.use, m.counters, constants_of(p).window_ns
    first = start_ns // window_ns
    last = first if end_ns <= start_ns else (end_ns - 1) // window_ns
    counters[WINDOWS] = max(counters[WINDOWS], last + 1)
    if last >= use.shape[1]:
        return
    if first == last:
        use[table, first, node] += transfer_bytes
        return
    for window in range(first, last + 1):
        begin = max(start_ns, window * window_ns)
        end = min(end_ns, (window + 1) * window_ns)
        use[table, window, node] += transfer_bytes * (end - begin) / (end_ns - start_ns)


@lean
def _serve(
    p: Held[World], server: int, now_ns: int, transfer_bytes: float, bytes_per_s: float
) -> int:
    """Queue a transfer at a server and return when it starts; ``busy_ns`` is when it is over."""
    m = machine_of(p)
    start_ns = max(now_ns, m.busy_ns[server])
    m.busy_ns[server] = start_ns + transfer_ns(transfer_bytes, bytes_per_s)
    return start_ns


@lean
def charge_cnic(p: Held[World], engine: int, server: int, transfer_bytes: float) -> int:
    """Queue a transfer at one direction of an engine's CNIC and return when it is over."""
    m = machine_of(p)
    c = constants_of(p)
    now_ns = m.counters[NOW]
    start_ns = _serve(p, server, now_ns, transfer_bytes, c.cnic_bytes_per_s)
    end_ns = m.busy_ns[server]
    node = engine // c.gpus_per_node
    count_use(p, CNIC_USE, node, start_ns, end_ns, transfer_bytes)
    return end_ns


@lean
def _charge_server(p: Held[World], kind: int, engine: int, transfer_bytes: float) -> int:
    m = machine_of(p)
    c = constants_of(p)
    engines = m.engines.shape[1]
    node = engine // c.gpus_per_node
    now_ns = m.counters[NOW]
    if kind == CNIC_READ_SERVER:
        return charge_cnic(p, engine, engine, transfer_bytes)
    if kind == CNIC_WRITE_SERVER:
        return charge_cnic(p, engine, engines + engine, transfer_bytes)
    server = 2 * engines + node
    if kind == DRAM_SERVER:
        _serve(p, server, now_ns, transfer_bytes, c.dram_bytes_per_s)
        return m.busy_ns[server]
    server += c.cluster_nodes
    start_ns = _serve(p, server, now_ns, transfer_bytes, c.snic_write_bytes_per_s)
    end_ns = m.busy_ns[server]
    count_use(p, SNIC_WRITE_USE, node, start_ns, end_ns, transfer_bytes)
    return end_ns


@lean
def charge_path(p: Held[World], path: int, pe: int, de: int, blocks: int) -> int:
    """Charge a kind of step at all its servers and return when the last is through."""
    m = machine_of(p)
    c = constants_of(p)
    end_ns = m.counters[NOW]
    if blocks <= 0:
        return end_ns
    step_bytes = blocks * c.block_bytes
    for place in range(8):
        kind = m.paths[path, place]
        if kind != NO_SERVER:
            engine = pe if place < 4 else de
            charged_ns = _charge_server(p, kind, engine, step_bytes)
            end_ns = max(end_ns, charged_ns)
    return end_ns


@lean
def read_fifo(p: Held[World], node: int, read: int, read_bytes: float) -> None:
    """Queue a read (a number that ``READ_OVER`` is told) at a first-come-first-served SNIC."""
    m = machine_of(p)
    c = constants_of(p)
    server = 2 * m.engines.shape[1] + 2 * c.cluster_nodes + node
    now_ns = m.counters[NOW]
    start_ns = _serve(p, server, now_ns, read_bytes, c.snic_bytes_per_s)
    end_ns = m.busy_ns[server]
    count_use(p, SNIC_READ_USE, node, start_ns, end_ns, read_bytes)
    over_ns = end_ns + c.latency_ns
    push(m.heap, m.counters, over_ns, READ_OVER, read)


@lean
def read_equal(p: Held[World], node: int, read: int, read_bytes: float) -> None:
    """Begin a read at an SNIC that serves all reads at once."""
    m = machine_of(p)
    advance_equal(p, node)
    nodes = m.nodes
    pool = m.flights.shape[0] + read
    key = m.node_bytes[SERVED_BYTES, node] + read_bytes
    nodes[N_ROOT, node] = add_node(
        m.keys, m.links, nodes[N_ROOT, node], pool, key, nodes[N_COUNT, node]
    )
    nodes[N_COUNT, node] += 1
    nodes[N_READS, node] += 1
    _expect_next_equal(p, node)


@lean
def advance_equal(p: Held[World], node: int) -> None:
    """Serve the reads under way at a node up to now."""
    m = machine_of(p)
    c = constants_of(p)
    nodes, now_ns = m.nodes, m.counters[NOW]
    reads = nodes[N_READS, node]
    if reads:
        since_ns = nodes[N_SINCE, node]
        carried = (now_ns - since_ns) * (c.snic_bytes_per_s / 1e9)
        m.node_bytes[SERVED_BYTES, node] += carried / reads
        count_use(p, SNIC_READ_USE, node, since_ns, now_ns, carried)
    nodes[N_SINCE, node] = now_ns


@lean
def _expect_next_equal(p: Held[World], node: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    nodes = m.nodes
    nodes[N_VERSION, node] += 1
    left = max(m.keys[nodes[N_ROOT, node]] - m.node_bytes[SERVED_BYTES, node], 0.0)
    wait_ns = int(left * nodes[N_READS, node] / (c.snic_bytes_per_s / 1e9) + 0.5)
    number = node | (nodes[N_VERSION, node] << UNIT_BITS)
    push(m.heap, m.counters, m.counters[NOW] + wait_ns, SNIC_END, number)


@lean
def end_equal(p: Held[World], number: int) -> None:
    """End the read that is due, unless others came or went since it was expected."""
    m = machine_of(p)
    c = constants_of(p)
    node = number & ((1 << UNIT_BITS) - 1)
    nodes = m.nodes
    if number >> UNIT_BITS != nodes[N_VERSION, node]:
        return
    advance_equal(p, node)
    root = nodes[N_ROOT, node]
    served = m.node_bytes[SERVED_BYTES, node]
    m.node_bytes[SERVED_BYTES, node] = max(served, m.keys[root])
    nodes[N_ROOT, node] = drop_root(m.keys, m.links, root)
    nodes[N_READS, node] -= 1
    read = root - m.flights.shape[0]
    over_ns = m.counters[NOW] + c.latency_ns
    push(m.heap, m.counters, over_ns, READ_OVER, read)
    if nodes[N_ROOT, node] != NONE:
        _expect_next_equal(p, node)
