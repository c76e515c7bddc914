"""What the end of a round leads to (stage 9 of the model), and storing new blocks."""

import numpy as np

from dualpath.model.sim.compiled.columns import (
    DE,
    DIRTY,
    FINISHED,
    FREE,
    GENERATED,
    LAST_ROUND,
    NOW,
    PERSIST_PATH,
    PROMPT,
    REQUESTS,
    SUBMIT,
    T_FINISHED,
    TOKENS,
)
from dualpath.model.sim.compiled.events import push
from dualpath.model.sim.compiled.jit import inlined, lean
from dualpath.model.sim.compiled.links import charge_path
from dualpath.model.sim.compiled.scheduler import finished
from dualpath.model.sim.compiled.tier import tier_put
from dualpath.model.sim.compiled.world import World
from dualpath.model.sim.costs import to_ns as _to_ns

to_ns = inlined(_to_ns)


@lean
def count_out(p: World, engine: int, tokens: int, hbm_tokens: int) -> None:
    """Count a request out at an engine."""
    engines = p.machine.engines
    engines[engine, REQUESTS] -= 1
    engines[engine, TOKENS] -= tokens
    engines[engine, FREE] += hbm_tokens
    engines[engine, DIRTY] = 1


@lean
def persist(p: World, agent: int, de: int, blocks: int) -> None:
    """Let an agent's new blocks start on their way to storage."""
    stored_ns = charge_path(p, PERSIST_PATH, de, de, blocks)
    p.machine.stored_ns[agent] = max(p.machine.stored_ns[agent], stored_ns)


@lean
def finish(p: World, agent: int) -> None:
    """A round has got its last token."""
    m, c = p.machine, p.constants
    flights, now_ns = m.flights, m.counters[NOW]
    r, de = m.round_of[agent], flights[agent, DE]
    prompt, generated = flights[agent, PROMPT], flights[agent, GENERATED]
    m.times[r, T_FINISHED] = now_ns
    m.counters[FINISHED] += 1
    finished(p.scheduler, agent)
    decode_tokens = prompt + min(generated, p.scheduler.rules.generated_reserve_tokens)
    count_out(p, de, decode_tokens, decode_tokens)
    # The last token's KV is never computed.
    stored = prompt + generated - 1
    if not c.oracle:
        persist(p, agent, de, stored // c.block_tokens - prompt // c.block_tokens)
    if c.tier_tokens:
        tier_put(p, agent, stored)
    if r < flights[agent, LAST_ROUND]:
        push(m.heap, m.counters, now_ns + _delay_ns(p, r + 1), SUBMIT, agent)
    if p.rounds.waiting_for.size:
        _start_sub_agents(p, r)


@lean
def _delay_ns(p: World, r: int) -> int:
    """Return the tool delay before a round."""
    return to_ns(float(p.rounds.delay_s[r]))


@lean
def _start_sub_agents(p: World, r: int) -> None:
    m, columns = p.machine, p.rounds
    place = np.searchsorted(columns.waiting_for, r)
    while place < columns.waiting_for.size and columns.waiting_for[place] == r:
        agent = columns.waiting_agent[place]
        wait_ns = columns.start_ns[agent] + _delay_ns(p, columns.first_round[agent])
        push(m.heap, m.counters, m.counters[NOW] + wait_ns, SUBMIT, agent)
        place += 1
