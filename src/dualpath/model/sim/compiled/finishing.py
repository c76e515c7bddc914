"""What the end of a round leads to (stage 9 of the model), and storing new blocks."""

import numpy as np

from dualpath.model.sim.compiled.buffers import keep_more
from dualpath.model.sim.compiled.columns import (
    DE,
    DIRTY,
    FINISHED,
    FREE,
    GENERATED,
    LAST_ROUND,
    NOW,
    PROMPT,
    REQUESTS,
    SUBMIT,
    T_FINISHED,
    TOKENS,
)
from dualpath.model.sim.compiled.events import push
from dualpath.model.sim.compiled.jit import lean
from dualpath.model.sim.compiled.links import charge_path
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.compiled.scheduler import finished
from dualpath.model.sim.derived import PERSIST_GENERATED_PATH
from dualpath.model.sim.rules import to_ns
from dualpath.plan.counts import kv_tokens, new_full_blocks
from dualpath.policy.accounts import decode_tokens


@lean
def count_out(p: World, engine: int, tokens: int, hbm_tokens: int) -> None:
    """Count a request out at an engine."""
    engines = p.machine.engines
    engines[engine, REQUESTS] -= 1
    engines[engine, TOKENS] -= tokens
    engines[engine, FREE] += hbm_tokens
    engines[engine, DIRTY] = 1


@lean
def persist(p: World, path: int, agent: int, de: int, blocks: int) -> None:
    """Let an agent's new blocks start on their way to storage."""
    stored_ns = charge_path(p, path, de, de, blocks * p.constants.block_bytes)
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
    tokens = decode_tokens(prompt, generated, p.scheduler.rules.generated_reserve_tokens)
    count_out(p, de, tokens, tokens)
    stored = kv_tokens(prompt, generated)
    if not c.oracle:
        blocks = new_full_blocks(prompt, stored, c.block_tokens)
        persist(p, PERSIST_GENERATED_PATH, agent, de, blocks)
        full = prompt // c.block_tokens
        keep_more(p, de, agent, full, full + blocks)
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
