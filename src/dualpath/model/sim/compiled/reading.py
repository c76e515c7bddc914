"""A round's reads, until all its KV is in DRAM and it waits at its PE (stage 4 of the model)."""

from dualpath.model.sim.carried import read_bytes
from dualpath.model.sim.compiled.columns import (
    DIRTY,
    DONE,
    HIT,
    NONE,
    NOW,
    PARTS_LEFT,
    PE,
    PE_BLOCKS,
    PE_READ,
    QUEUE_HEAD,
    QUEUE_TAIL,
    READ,
    READ_TOKENS,
    START_PASS,
    T_GRANTED,
    T_LOADED,
    U_BUSY,
    UNIT,
)
from dualpath.model.sim.compiled.events import push
from dualpath.model.sim.compiled.hits import first_at_prefill, found_blocks, hit_blocks
from dualpath.model.sim.compiled.jit import lean
from dualpath.model.sim.compiled.links import (
    charge_path,
    node_at,
    read_equal,
    read_fifo,
)
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.compiled.scheduler import read_done
from dualpath.model.sim.derived import READ_DE_PATH, READ_PE_PATH


@lean
def granted(p: World, agent: int) -> None:
    """A round has its buffers: queue its reads, not before what they read is stored."""
    m = p.machine
    flights, now_ns = m.flights, m.counters[NOW]
    m.times[m.round_of[agent], T_GRANTED] = now_ns
    parts = (1 if flights[agent, PE_READ] else 0) + (1 if flights[agent, PE_READ + 1] else 0)
    flights[agent, PARTS_LEFT] = parts
    if parts == 0:
        loaded(p, agent)
        return
    stored_ns = m.stored_ns[agent]
    for side in range(2):
        if flights[agent, PE_READ + side] == 0:
            continue
        if stored_ns > now_ns:
            push(m.heap, m.counters, stored_ns, READ, 2 * agent + side)
        else:
            read(p, 2 * agent + side)


@lean
def read(p: World, part: int) -> None:
    """Queue one part of a round's reads at its SNIC."""
    c, flights = p.constants, p.machine.flights
    agent, side = part >> 1, part & 1
    engine = flights[agent, PE + side]
    part_bytes = read_bytes(
        c.layer_kinds,
        side == 1,
        found_blocks(p, agent, side),
        first_at_prefill(p, agent),
        flights[agent, PE_BLOCKS],
        hit_blocks(p, agent),
        c.block_tokens,
    )
    charge_path(p, READ_DE_PATH if side else READ_PE_PATH, engine, engine, part_bytes)
    node = node_at(p, engine)
    if c.equal_snic:
        read_equal(p, node, part, part_bytes)
    else:
        read_fifo(p, node, part, part_bytes)


@lean
def part_read(p: World, part: int) -> None:
    """One part of a round's reads is over."""
    flights, engines = p.machine.flights, p.machine.engines
    agent, side = part >> 1, part & 1
    engine = flights[agent, PE + side]
    engines[engine, READ_TOKENS] -= flights[agent, PE_READ + side]
    engines[engine, DIRTY] = 1
    flights[agent, PARTS_LEFT] -= 1
    if flights[agent, PARTS_LEFT] == 0:
        loaded(p, agent)


@lean
def loaded(p: World, agent: int) -> None:
    """All of a round's KV is in DRAM: it waits at its PE."""
    m = p.machine
    flights, engines, units, now_ns = m.flights, m.engines, m.units, m.counters[NOW]
    m.times[m.round_of[agent], T_LOADED] = now_ns
    read_done(p.scheduler, agent)
    flights[agent, DONE] = flights[agent, HIT]
    m.next_queued[agent] = NONE
    pe = flights[agent, PE]
    if engines[pe, QUEUE_HEAD] == NONE:
        engines[pe, QUEUE_HEAD] = agent
    else:
        m.next_queued[engines[pe, QUEUE_TAIL]] = agent
    engines[pe, QUEUE_TAIL] = agent
    unit = engines[pe, UNIT]
    if units[unit, U_BUSY] == 0:
        units[unit, U_BUSY] = 1
        push(m.heap, m.counters, now_ns, START_PASS, unit)
