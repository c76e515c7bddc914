"""Servers, storage NICs and buffers of the compiled core (the reference's links and buffers)."""

from dualpath.sim.compiled.events import add_node, drop_root, push
from dualpath.sim.compiled.jit import compiled
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
    Constants,
    Machine,
)
from dualpath.sim.costs import transfer_ns as _transfer_ns

transfer_ns = compiled(_transfer_ns)


@compiled
def count_use(
    machine: Machine,
    window_ns: int,
    table: int,
    node: int,
    start_ns: int,
    end_ns: int,
    transfer_bytes: float,
) -> None:
    """Spread a transfer evenly over the windows of its time; beyond the last, count nothing."""
    use, counters = machine.use, machine.counters
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


@compiled
def _serve(
    machine: Machine, server: int, now_ns: int, transfer_bytes: float, bytes_per_s: float
) -> int:
    """Queue a transfer at a server and return when it starts; ``busy_ns`` is when it is over."""
    start_ns = max(now_ns, machine.busy_ns[server])
    machine.busy_ns[server] = start_ns + transfer_ns(transfer_bytes, bytes_per_s)
    return start_ns


@compiled
def charge_cnic(
    machine: Machine, constants: Constants, engine: int, server: int, transfer_bytes: float
) -> int:
    """Queue a transfer at one direction of an engine's CNIC and return when it is over."""
    now_ns = machine.counters[NOW]
    start_ns = _serve(machine, server, now_ns, transfer_bytes, constants.cnic_bytes_per_s)
    end_ns = machine.busy_ns[server]
    node = engine // constants.gpus_per_node
    count_use(machine, constants.window_ns, CNIC_USE, node, start_ns, end_ns, transfer_bytes)
    return end_ns


@compiled
def _charge_server(
    machine: Machine, constants: Constants, kind: int, engine: int, transfer_bytes: float
) -> int:
    engines = machine.engines.shape[1]
    node = engine // constants.gpus_per_node
    now_ns = machine.counters[NOW]
    if kind == CNIC_READ_SERVER:
        return charge_cnic(machine, constants, engine, engine, transfer_bytes)
    if kind == CNIC_WRITE_SERVER:
        return charge_cnic(machine, constants, engine, engines + engine, transfer_bytes)
    server = 2 * engines + node
    if kind == DRAM_SERVER:
        _serve(machine, server, now_ns, transfer_bytes, constants.dram_bytes_per_s)
        return machine.busy_ns[server]
    server += constants.cluster_nodes
    start_ns = _serve(machine, server, now_ns, transfer_bytes, constants.snic_write_bytes_per_s)
    end_ns = machine.busy_ns[server]
    count_use(machine, constants.window_ns, SNIC_WRITE_USE, node, start_ns, end_ns, transfer_bytes)
    return end_ns


@compiled
def charge_path(
    machine: Machine, constants: Constants, path: int, pe: int, de: int, blocks: int
) -> int:
    """Charge a kind of step at all its servers and return when the last is through."""
    end_ns = machine.counters[NOW]
    if blocks <= 0:
        return end_ns
    step_bytes = blocks * constants.block_bytes
    for place in range(8):
        kind = machine.paths[path, place]
        if kind != NO_SERVER:
            engine = pe if place < 4 else de
            charged_ns = _charge_server(machine, constants, kind, engine, step_bytes)
            end_ns = max(end_ns, charged_ns)
    return end_ns


@compiled
def read_fifo(
    machine: Machine, constants: Constants, node: int, read: int, read_bytes: float
) -> None:
    """Queue a read (a number that ``READ_OVER`` is told) at a first-come-first-served SNIC."""
    server = 2 * machine.engines.shape[1] + 2 * constants.cluster_nodes + node
    now_ns = machine.counters[NOW]
    start_ns = _serve(machine, server, now_ns, read_bytes, constants.snic_bytes_per_s)
    end_ns = machine.busy_ns[server]
    count_use(machine, constants.window_ns, SNIC_READ_USE, node, start_ns, end_ns, read_bytes)
    over_ns = end_ns + constants.latency_ns
    push(machine.heap, machine.counters, over_ns, READ_OVER, read)


@compiled
def read_equal(
    machine: Machine, constants: Constants, node: int, read: int, read_bytes: float
) -> None:
    """Begin a read at an SNIC that serves all reads at once."""
    advance_equal(machine, constants, node)
    nodes = machine.nodes
    pool = machine.flights.shape[0] + read
    key = machine.node_bytes[SERVED_BYTES, node] + read_bytes
    nodes[N_ROOT, node] = add_node(
        machine.keys, machine.links, nodes[N_ROOT, node], pool, key, nodes[N_COUNT, node]
    )
    nodes[N_COUNT, node] += 1
    nodes[N_READS, node] += 1
    _expect_next_equal(machine, constants, node)


@compiled
def advance_equal(machine: Machine, constants: Constants, node: int) -> None:
    """Serve the reads under way at a node up to now."""
    nodes, now_ns = machine.nodes, machine.counters[NOW]
    reads = nodes[N_READS, node]
    if reads:
        since_ns = nodes[N_SINCE, node]
        carried = (now_ns - since_ns) * (constants.snic_bytes_per_s / 1e9)
        machine.node_bytes[SERVED_BYTES, node] += carried / reads
        count_use(machine, constants.window_ns, SNIC_READ_USE, node, since_ns, now_ns, carried)
    nodes[N_SINCE, node] = now_ns


@compiled
def _expect_next_equal(machine: Machine, constants: Constants, node: int) -> None:
    nodes = machine.nodes
    nodes[N_VERSION, node] += 1
    left = max(machine.keys[nodes[N_ROOT, node]] - machine.node_bytes[SERVED_BYTES, node], 0.0)
    wait_ns = int(left * nodes[N_READS, node] / (constants.snic_bytes_per_s / 1e9) + 0.5)
    number = node | (nodes[N_VERSION, node] << UNIT_BITS)
    push(machine.heap, machine.counters, machine.counters[NOW] + wait_ns, SNIC_END, number)


@compiled
def end_equal(machine: Machine, constants: Constants, number: int) -> None:
    """End the read that is due, unless others came or went since it was expected."""
    node = number & ((1 << UNIT_BITS) - 1)
    nodes = machine.nodes
    if number >> UNIT_BITS != nodes[N_VERSION, node]:
        return
    advance_equal(machine, constants, node)
    root = nodes[N_ROOT, node]
    served = machine.node_bytes[SERVED_BYTES, node]
    machine.node_bytes[SERVED_BYTES, node] = max(served, machine.keys[root])
    nodes[N_ROOT, node] = drop_root(machine.keys, machine.links, root)
    nodes[N_READS, node] -= 1
    read = root - machine.flights.shape[0]
    over_ns = machine.counters[NOW] + constants.latency_ns
    push(machine.heap, machine.counters, over_ns, READ_OVER, read)
    if nodes[N_ROOT, node] != NONE:
        _expect_next_equal(machine, constants, node)
