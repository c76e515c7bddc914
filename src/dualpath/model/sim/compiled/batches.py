"""Which chunks enter a unit's next forward pass (stage 5 of the model; the reference's prefill)."""

from dualpath.model.sim.compiled.columns import (
    CHUNK_BSZ,
    DONE,
    NONE,
    PROMPT,
    QUEUE_HEAD,
    U_CHUNK_HEAD,
    U_COUNT,
    U_FIRST,
)
from dualpath.model.sim.compiled.jit import lean, prefetch
from dualpath.model.sim.compiled.lookahead import fetch_queues
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.rules import chunk_limit_tokens, pass_s
from dualpath.policy.batching import next_chunk


@lean
def form_pass(p: World, unit: int) -> tuple[int, float, float, float]:
    """Chain the chunks of a unit's next pass; return tokens, computation time and attention.

    Attention is that of the slowest and of the mean engine; without work tokens are 0.
    """
    m, c = p.machine, p.constants
    engines, units = m.engines, m.units
    first, count = units[unit, U_FIRST], units[unit, U_COUNT]
    units[unit, U_CHUNK_HEAD] = NONE
    fetch_queues(p, unit)
    tail, tokens = NONE, 0
    slowest_s = sum_s = 0.0
    for engine in range(first, first + count):
        if engines[engine, QUEUE_HEAD] == NONE:
            continue
        tail, engine_tokens, spent_s = _pack(p, unit, engine, tail)
        attention_s = c.attention_batch_s + spent_s / 1.0 if engine_tokens else 0.0
        tokens += engine_tokens
        slowest_s = max(slowest_s, attention_s)
        sum_s += attention_s
    compute_s = pass_s(
        slowest_s,
        tokens / count,
        c.batch_s,
        c.feed_forward_token_s,
        c.exchange_token_s,
        c.interleaved,
    )
    return tokens, compute_s, slowest_s, sum_s / count


@lean
def _pack(p: World, unit: int, engine: int, tail: int) -> tuple[int, int, float]:
    """Chain an engine's chunks behind ``tail``; return the new tail, tokens and attention time."""
    m, c = p.machine, p.constants
    flights = m.flights
    tokens_left, hbm_left = c.batch_cap_tokens, c.prefill_hbm_tokens
    tokens, spent_s = 0, 0.0
    agent = m.engines[engine, QUEUE_HEAD]
    while agent != NONE:
        following = m.next_queued[agent]
        if following != NONE:
            prefetch(flights, following, 0)
            prefetch(m.next_queued, following, 0)
        cached = flights[agent, DONE]
        remaining = flights[agent, PROMPT] - cached
        limit = chunk_limit_tokens(tokens_left, hbm_left, cached)
        if limit <= 0:
            break
        bsz, spent_s = next_chunk(
            c.pair_s,
            c.index_pair_s,
            c.attention_token_s,
            c.window_tokens,
            c.affordable_s,
            spent_s,
            cached,
            remaining,
            c.block_tokens,
            tokens == 0,
            limit,
        )
        if bsz == 0:
            break
        flights[agent, CHUNK_BSZ] = bsz
        m.next_chunk[agent] = NONE
        if tail == NONE:
            m.units[unit, U_CHUNK_HEAD] = agent
        else:
            m.next_chunk[tail] = agent
        tail = agent
        tokens += bsz
        tokens_left -= bsz
        hbm_left -= cached + bsz
        if bsz < remaining:
            break
        agent = following
    return tail, tokens, spent_s
