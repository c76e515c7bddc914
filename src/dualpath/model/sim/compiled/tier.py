"""What buffers keep for agents' next rounds (the reference's ``KeptRuns``): a list per node.

From the agent used least recently on; what is kept of an agent is the head of its context.
"""

from dualpath.model.sim.compiled.columns import (
    K_BLOCKS,
    K_NEWER,
    K_OLDER,
    N_KEPT,
    N_NEWEST,
    N_OLDEST,
    NONE,
)
from dualpath.model.sim.compiled.jit import lean
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.rules import adopted_blocks, extended_blocks, kept_after_eviction


@lean
def adopt(p: World, node: int, agent: int, first: int, count: int) -> int:
    """Let a request have what is kept of ``count`` blocks from ``first`` on; return how many."""
    kept = p.machine.kept[node, agent, K_BLOCKS]
    adopted = adopted_blocks(kept, first, count)
    if adopted:
        _set(p, node, agent, first)
    return adopted


@lean
def keep(p: World, node: int, agent: int, first: int, end: int) -> None:
    """Keep blocks [first, end) that a request has given back, if their head is kept as well."""
    blocks = extended_blocks(p.machine.kept[node, agent, K_BLOCKS], first, end)
    if blocks:
        if p.machine.kept[node, agent, K_BLOCKS]:
            _set(p, node, agent, 0)
        _set(p, node, agent, blocks)


@lean
def shrink(p: World, node: int, most_blocks: int) -> None:
    """Evict, the least recently used agent's tail first, until no more are kept."""
    nodes = p.machine.nodes
    while nodes[node, N_KEPT] > most_blocks:
        agent = nodes[node, N_OLDEST]
        excess = nodes[node, N_KEPT] - most_blocks
        _set(p, node, agent, kept_after_eviction(p.machine.kept[node, agent, K_BLOCKS], excess))


@lean
def _set(p: World, node: int, agent: int, blocks: int) -> None:
    """Keep so many blocks; an agent that had none is the latest used, one with none leaves."""
    kept, nodes = p.machine.kept, p.machine.nodes
    before = kept[node, agent, K_BLOCKS]
    nodes[node, N_KEPT] += blocks - before
    kept[node, agent, K_BLOCKS] = blocks
    if before == 0 and blocks:
        _enter(p, node, agent)
    elif before and blocks == 0:
        _leave(p, node, agent)


@lean
def _enter(p: World, node: int, agent: int) -> None:
    kept, nodes = p.machine.kept, p.machine.nodes
    newest = nodes[node, N_NEWEST]
    kept[node, agent, K_OLDER] = newest
    kept[node, agent, K_NEWER] = NONE
    if newest == NONE:
        nodes[node, N_OLDEST] = agent
    else:
        kept[node, newest, K_NEWER] = agent
    nodes[node, N_NEWEST] = agent


@lean
def _leave(p: World, node: int, agent: int) -> None:
    kept, nodes = p.machine.kept, p.machine.nodes
    older, newer = kept[node, agent, K_OLDER], kept[node, agent, K_NEWER]
    if older == NONE:
        nodes[node, N_OLDEST] = newer
    else:
        kept[node, older, K_NEWER] = newer
    if newer == NONE:
        nodes[node, N_NEWEST] = older
    else:
        kept[node, newer, K_OLDER] = older
