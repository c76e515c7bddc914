"""DRAM buffers of the nodes, granted first come, first served (stage 3 of the model)."""

from dualpath.model.sim.compiled.columns import (
    DE_BLOCKS,
    FREE_BYTES,
    N_HEAD,
    N_TAIL,
    NEXT_WAITING,
    NONE,
    PARTS_LEFT,
    PE,
    PE_BLOCKS,
    PROMPT_BLOCKS,
    TIER_BLOCKS,
)
from dualpath.model.sim.compiled.jit import lean, prefetch
from dualpath.model.sim.compiled.links import node_at
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.compiled.reading import granted


@lean
def reserve(p: World, node: int, agent: int) -> None:
    """Let a round wait for room at its DE's node, then at its PE's."""
    _wait_at(p, node, agent)
    _grant_decode(p, node)


@lean
def give_back(p: World, engine: int, blocks: int) -> None:
    """Free blocks at an engine's node and grant what fits then."""
    c = p.constants
    if blocks == 0:
        return
    node = node_at(p, engine)
    p.machine.node_bytes[node, FREE_BYTES] += blocks * c.block_bytes
    if node < c.prefill_nodes:
        _grant_prefill(p, node)
    else:
        _grant_decode(p, node)


@lean
def _wait_at(p: World, node: int, agent: int) -> None:
    flights, nodes = p.machine.flights, p.machine.nodes
    flights[agent, NEXT_WAITING] = NONE
    if nodes[node, N_HEAD] == NONE:
        nodes[node, N_HEAD] = agent
    else:
        flights[nodes[node, N_TAIL], NEXT_WAITING] = agent
    nodes[node, N_TAIL] = agent


@lean
def _next_granted(p: World, node: int) -> int:
    """Take the first who waits at a node if there is room, else NONE."""
    m = p.machine
    flights, nodes, node_bytes = m.flights, m.nodes, m.node_bytes
    agent = nodes[node, N_HEAD]
    if agent == NONE:
        return NONE
    prefetch(flights, flights[agent, NEXT_WAITING], 0)
    prefetch(m.round_of, flights[agent, NEXT_WAITING], 0)
    at_pe = node < p.constants.prefill_nodes
    blocks = flights[agent, PE_BLOCKS] if at_pe else flights[agent, PROMPT_BLOCKS]
    need_bytes = blocks * p.constants.block_bytes
    if need_bytes > node_bytes[node, FREE_BYTES]:
        return NONE
    node_bytes[node, FREE_BYTES] -= need_bytes
    nodes[node, N_HEAD] = flights[agent, NEXT_WAITING]
    return int(agent)


@lean
def _grant_decode(p: World, node: int) -> None:
    flights = p.machine.flights
    agent = _next_granted(p, node)
    while agent != NONE:
        if p.constants.tier_tokens and flights[agent, TIER_BLOCKS]:
            # KV of the DRAM tier arrives in the DE buffer, as if it had been read there.
            flights[agent, DE_BLOCKS] += flights[agent, TIER_BLOCKS]
            flights[agent, PARTS_LEFT] += 1
        if flights[agent, PE_BLOCKS]:
            pe_node = node_at(p, flights[agent, PE])
            _wait_at(p, pe_node, agent)
            _grant_prefill(p, pe_node)
        else:
            granted(p, agent)
        agent = _next_granted(p, node)


@lean
def _grant_prefill(p: World, node: int) -> None:
    agent = _next_granted(p, node)
    while agent != NONE:
        granted(p, agent)
        agent = _next_granted(p, node)
