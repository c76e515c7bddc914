"""The DRAM tier (``reference.memories``) as a list of agents from the least recently used on."""

from dualpath.model.sim.compiled.columns import (
    NONE,
    TIER_NEWER,
    TIER_NEWEST,
    TIER_OLDER,
    TIER_OLDEST,
    TIER_TOKENS,
    TIER_USED,
)
from dualpath.model.sim.compiled.jit import lean
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.rules import tier_hit_tokens


@lean
def tier_hit(p: World, agent: int, hit_tokens: int) -> int:
    """Return how many hit tokens of an agent the tier has in whole blocks; count it as used."""
    held = p.machine.flights[agent, TIER_TOKENS]
    if held <= 0:
        return 0
    _leave(p, agent)
    _enter(p, agent, held)
    return tier_hit_tokens(held, hit_tokens, p.constants.block_tokens)


@lean
def tier_put(p: World, agent: int, tokens: int) -> None:
    """Hold an agent's whole context; those used least recently leave for it."""
    if p.machine.flights[agent, TIER_TOKENS] > 0:
        _leave(p, agent)
    if tokens > p.constants.tier_tokens:
        return
    _enter(p, agent, tokens)
    counters = p.machine.counters
    while counters[TIER_USED] > p.constants.tier_tokens:
        _leave(p, counters[TIER_OLDEST])


@lean
def _enter(p: World, agent: int, tokens: int) -> None:
    flights, counters = p.machine.flights, p.machine.counters
    newest = counters[TIER_NEWEST]
    flights[agent, TIER_TOKENS] = tokens
    flights[agent, TIER_OLDER] = newest
    flights[agent, TIER_NEWER] = NONE
    if newest == NONE:
        counters[TIER_OLDEST] = agent
    else:
        flights[newest, TIER_NEWER] = agent
    counters[TIER_NEWEST] = agent
    counters[TIER_USED] += tokens


@lean
def _leave(p: World, agent: int) -> None:
    flights, counters = p.machine.flights, p.machine.counters
    older, newer = flights[agent, TIER_OLDER], flights[agent, TIER_NEWER]
    if older == NONE:
        counters[TIER_OLDEST] = newer
    else:
        flights[older, TIER_NEWER] = newer
    if newer == NONE:
        counters[TIER_NEWEST] = older
    else:
        flights[newer, TIER_OLDER] = older
    counters[TIER_USED] -= flights[agent, TIER_TOKENS]
    flights[agent, TIER_TOKENS] = NONE
