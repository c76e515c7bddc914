"""What buffers keep for agents' next rounds (the reference's ``KeptRuns``): a list per node.

From the agent used least recently on; what is kept of an agent is the head of its context.
"""

from dualpath.model.sim.compiled.columns import (
    K_BLOCKS,
    K_INTERVAL,
    K_NEWER,
    K_OLDER,
    K_USED,
    N_ERRORS,
    N_INTERVALS,
    N_KEPT,
    N_NEWEST,
    N_OLDEST,
    N_USES,
    NONE,
)
from dualpath.model.sim.compiled.jit import lean
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.rules import (
    REUSE_WINDOW,
    adopted_blocks,
    extended_blocks,
    kept_after_eviction,
)
from dualpath.policy.reuse import believed, expected_interval, faded_sum, given_up


@lean
def adopt(p: World, node: int, agent: int, first: int, count: int) -> int:
    """Let a request have what is kept of ``count`` blocks from ``first`` on; return how many."""
    kept = p.machine.kept[node, agent, K_BLOCKS]
    adopted = adopted_blocks(kept, first, count)
    if adopted:
        _set(p, node, agent, first)
    return adopted


@lean
def use(p: World, node: int, agent: int) -> None:
    """Note that an agent's next request has come, whether anything is kept for it or not."""
    kept, nodes = p.machine.kept, p.machine.nodes
    nodes[node, N_USES] += 1
    used, before = kept[node, agent, K_USED], kept[node, agent, K_INTERVAL]
    if used:
        interval = nodes[node, N_USES] - used
        if before:
            for column, sample in ((N_INTERVALS, interval), (N_ERRORS, abs(interval - before))):
                nodes[node, column] = faded_sum(nodes[node, column], sample, REUSE_WINDOW)
        kept[node, agent, K_INTERVAL] = interval
    kept[node, agent, K_USED] = nodes[node, N_USES]


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
    """Evict until no more are kept, the tail first of an agent's (``policy.reuse``)."""
    nodes = p.machine.nodes
    while nodes[node, N_KEPT] > most_blocks:
        agent = _next_to_leave(p, node)
        excess = nodes[node, N_KEPT] - most_blocks
        _set(p, node, agent, kept_after_eviction(p.machine.kept[node, agent, K_BLOCKS], excess))


@lean
def _next_to_leave(p: World, node: int) -> int:
    kept, nodes = p.machine.kept, p.machine.nodes
    oldest = int(nodes[node, N_OLDEST])
    age = nodes[node, N_USES] - kept[node, oldest, K_USED]
    if not believed(nodes[node, N_INTERVALS], nodes[node, N_ERRORS]):
        return oldest
    if given_up(age, _expected(p, node, oldest)):
        return oldest
    farthest = agent = int(nodes[node, N_NEWEST])
    latest = _next_use(p, node, agent)
    while agent != oldest:
        agent = int(kept[node, agent, K_OLDER])
        if _next_use(p, node, agent) > latest:
            farthest, latest = agent, _next_use(p, node, agent)
    return farthest


@lean
def _next_use(p: World, node: int, agent: int) -> int:
    return int(p.machine.kept[node, agent, K_USED]) + _expected(p, node, agent)


@lean
def _expected(p: World, node: int, agent: int) -> int:
    interval = p.machine.kept[node, agent, K_INTERVAL]
    return expected_interval(interval, p.machine.nodes[node, N_INTERVALS], REUSE_WINDOW)


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
