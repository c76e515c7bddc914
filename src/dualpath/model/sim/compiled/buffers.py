"""DRAM buffers of the nodes, granted first come, first served (stage 3 of the model), the tier."""

from dualpath.core.blocks import holding_blocks
from dualpath.model.sim.carried import whole_at_decode, whole_at_prefill
from dualpath.model.sim.compiled.columns import (
    DE,
    DE_KEPT,
    DE_READ,
    DIRTY,
    FREE_BYTES,
    HIT,
    K_BLOCKS,
    N_HEAD,
    N_TAIL,
    NEXT_WAITING,
    NONE,
    PE,
    PE_BLOCKS,
    PE_KEPT,
    PE_READ,
    PROMPT,
    PROMPT_BLOCKS,
    READ_TOKENS,
    RECOMPUTED,
    TIER_HITS,
    TOKENS,
)
from dualpath.model.sim.compiled.hits import count_blocks, first_at_prefill, found_blocks
from dualpath.model.sim.compiled.jit import lean, prefetch
from dualpath.model.sim.compiled.links import node_at
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.compiled.reading import granted
from dualpath.model.sim.compiled.scheduler import choose_anew
from dualpath.model.sim.compiled.tier import adopt, keep, shrink, use
from dualpath.model.sim.rules import room_blocks
from dualpath.policy.recompute import more_weight


@lean
def reserve(p: World, node: int, agent: int) -> None:
    """Let a round wait for room at its DE's node, then at its PE's."""
    _wait_at(p, node, agent)
    _grant_decode(p, node)


@lean
def give_back_prefill(p: World, agent: int) -> None:
    """Free a round's blocks at its PE's node and grant what fits then."""
    flights, c = p.machine.flights, p.constants
    blocks = flights[agent, PE_BLOCKS]
    if blocks == 0:
        return
    node, first = node_at(p, flights[agent, PE]), first_at_prefill(p, agent)
    found, hit = found_blocks(p, agent, 0), flights[agent, HIT]
    whole = whole_at_prefill(c.layer_kinds, found, first, blocks, hit, c.block_tokens)
    _free(p, node, agent, first, blocks, whole)
    _grant_prefill(p, node)


@lean
def give_back_decode(p: World, agent: int) -> None:
    """Free a round's blocks at its DE's node and grant what fits then."""
    flights, c = p.machine.flights, p.constants
    node = node_at(p, flights[agent, DE])
    whole = whole_at_decode(
        c.layer_kinds,
        found_blocks(p, agent, 1),
        first_at_prefill(p, agent),
        flights[agent, PE_BLOCKS],
        flights[agent, HIT],
        flights[agent, PROMPT],
        c.block_tokens,
    )
    _free(p, node, agent, 0, flights[agent, PROMPT_BLOCKS], whole)
    _grant_decode(p, node)


@lean
def keep_more(p: World, de: int, agent: int, first: int, end: int) -> None:
    """Keep blocks that were written beyond any reservation: generated ones."""
    if p.constants.keeps:
        node = node_at(p, de)
        keep(p, node, agent, first, end)
        _shrink(p, node)


@lean
def _free(p: World, node: int, agent: int, first: int, blocks: int, whole: int) -> None:
    """Give back blocks from ``first`` on, the first ``whole`` full ones, to be kept."""
    p.machine.node_bytes[node, FREE_BYTES] += blocks * p.constants.block_bytes
    if p.constants.keeps:
        keep(p, node, agent, first, first + whole)


@lean
def _shrink(p: World, node: int) -> None:
    free_bytes = p.machine.node_bytes[node, FREE_BYTES]
    shrink(p, node, room_blocks(free_bytes, p.constants.block_bytes))


@lean
def _adopt(p: World, node: int, agent: int, side: int, first: int) -> None:
    """Take what a side keeps.

    What a PE was believed to keep and does not, or not any more, it reads.  When its DE grants the
    slots, a round of whose hit either keeps less has its reads chosen anew.
    """
    m, block_tokens = p.machine, p.constants.block_tokens
    flights = m.flights
    believed = flights[agent, PE_KEPT + side]
    adopted = adopt(p, node, agent, first, holding_blocks(believed, block_tokens))
    found = min(adopted * block_tokens, believed)
    m.counters[TIER_HITS] += found
    if side:
        pe_kept = m.kept[node_at(p, flights[agent, PE]), agent, K_BLOCKS] * block_tokens
        pe_believed = flights[agent, DE_KEPT] + flights[agent, PE_KEPT]
        if found < believed or (flights[agent, PE_KEPT] and pe_kept < pe_believed):
            _choose_anew(p, agent, pe_kept, found)
    elif found < believed:
        flights[agent, PE_READ] += believed - found
        _expect_reads(p, flights[agent, PE], believed - found)


@lean
def _choose_anew(p: World, agent: int, pe_kept: int, de_kept: int) -> None:
    """Let a round's hit come from elsewhere: its engines keep so many tokens of it only."""
    m, s = p.machine, p.scheduler
    flights = m.flights
    before = flights[agent, RECOMPUTED]
    for side in range(2):
        _expect_reads(p, flights[agent, PE + side], -flights[agent, PE_READ + side])
    anew = choose_anew(s, agent, pe_kept, de_kept, before)
    flights[agent, PE_READ], flights[agent, DE_READ] = anew[0], anew[1]
    flights[agent, PE_KEPT], flights[agent, DE_KEPT] = anew[2], anew[3]
    recomputed = anew[4]
    flights[agent, HIT] -= recomputed - before
    flights[agent, RECOMPUTED] = recomputed
    more = more_weight(before, recomputed, s.rules.computed_weight)
    m.engines[flights[agent, PE], TOKENS] += more
    count_blocks(p, agent)
    for side in range(2):
        _expect_reads(p, flights[agent, PE + side], flights[agent, PE_READ + side])


@lean
def _expect_reads(p: World, engine: int, tokens: int) -> None:
    """Let an engine have so many more tokens to read."""
    p.machine.engines[engine, READ_TOKENS] += tokens
    p.machine.engines[engine, DIRTY] = 1


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
    if p.constants.keeps:
        _adopt(p, node, agent, int(not at_pe), first_at_prefill(p, agent) if at_pe else 0)
        use(p, node, agent)
        _shrink(p, node)
    return int(agent)


@lean
def _grant_decode(p: World, node: int) -> None:
    flights = p.machine.flights
    agent = _next_granted(p, node)
    while agent != NONE:
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
