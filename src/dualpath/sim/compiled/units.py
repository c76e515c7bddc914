"""Prefill and decode units of the compiled core (the reference's prefill and decode)."""

import math

from dualpath.sim.compiled.events import add_node, drop_root, push
from dualpath.sim.compiled.jit import Held, inlined, lean
from dualpath.sim.compiled.kernels import chunk_flops, largest_chunk
from dualpath.sim.compiled.machine_tables import (
    CHUNK_BSZ,
    CHUNK_CACHED,
    CONTEXT,
    DECODE_END,
    DONE,
    NEXT_CHUNK,
    NEXT_QUEUED,
    NONE,
    NOW,
    QUEUE_HEAD,
    ROUND,
    U_CHUNK_HEAD,
    U_CONTEXT,
    U_COUNT,
    U_FIRST,
    U_JOINED,
    U_REQUESTS,
    U_ROOT,
    U_SINCE,
    U_STEP_NS,
    U_VERSION,
    U_WINDOW,
    UNIT_BITS,
)
from dualpath.sim.compiled.world import World, constants_of, machine_of, rounds_of
from dualpath.sim.costs import decode_step_s as _decode_step_s
from dualpath.sim.costs import pass_s as _pass_s
from dualpath.sim.costs import to_ns as _to_ns

pass_s = inlined(_pass_s)
decode_step_s = inlined(_decode_step_s)
to_ns = inlined(_to_ns)


@lean
def form_pass(p: Held[World], unit: int) -> tuple[int, float, float, float]:
    """Chain the chunks of a unit's next pass; return tokens, computation time and attention.

    Attention is that of the slowest and of the mean engine; without work tokens are 0.
    """
    m = machine_of(p)
    c = constants_of(p)
    rounds = rounds_of(p)
    flights, units = m.flights, m.units
    first, count = units[U_FIRST, unit], units[U_COUNT, unit]
    units[U_CHUNK_HEAD, unit] = NONE
    tail, tokens = NONE, 0
    slowest_s = sum_s = 0.0
    for engine in range(first, first + count):
        agent = m.engines[QUEUE_HEAD, engine]
        if agent == NONE:
            continue
        tokens_left, hbm_left = c.batch_cap_tokens, c.prefill_hbm_tokens
        spent_s = 0.0
        empty = True
        while agent != NONE:
            cached = flights[agent, DONE]
            remaining = rounds.prompt[flights[agent, ROUND]] - cached
            limit = min(tokens_left, hbm_left - cached)
            if limit <= 0:
                break
            bsz = largest_chunk(
                c.pair_s,
                c.index_pair_s,
                c.attention_token_s,
                c.window_tokens,
                c.affordable_s - spent_s,
                cached,
                remaining,
                c.block_tokens,
                empty,
                limit,
            )
            if bsz == 0:
                break
            spent_s += chunk_flops(
                c.pair_s,
                c.index_pair_s,
                c.attention_token_s,
                c.window_tokens,
                cached,
                bsz,
            )
            empty = False
            flights[agent, CHUNK_CACHED] = cached
            flights[agent, CHUNK_BSZ] = bsz
            flights[agent, NEXT_CHUNK] = NONE
            if tail == NONE:
                units[U_CHUNK_HEAD, unit] = agent
            else:
                flights[tail, NEXT_CHUNK] = agent
            tail = agent
            tokens += bsz
            tokens_left -= bsz
            hbm_left -= cached + bsz
            if bsz < remaining:
                break
            agent = flights[agent, NEXT_QUEUED]
        attention_s = 0.0 if empty else c.attention_batch_s + spent_s / 1.0
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
def _advance(p: Held[World], unit: int) -> None:
    m = machine_of(p)
    units, now_ns = m.units, m.counters[NOW]
    if units[U_REQUESTS, unit]:
        elapsed_ns = now_ns - units[U_SINCE, unit]
        m.unit_tokens[unit] += elapsed_ns / units[U_STEP_NS, unit]
    units[U_SINCE, unit] = now_ns


@lean
def _count(p: Held[World], unit: int, context: int, sign: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    m.units[U_REQUESTS, unit] += sign
    m.units[U_CONTEXT, unit] += sign * context
    m.units[U_WINDOW, unit] += sign * min(context, c.decode_window_tokens)


@lean
def _expect_next(p: Held[World], unit: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    units = m.units
    units[U_VERSION, unit] += 1
    step_ns = to_ns(
        decode_step_s(
            units[U_REQUESTS, unit],
            units[U_WINDOW, unit],
            units[U_CONTEXT, unit],
            units[U_COUNT, unit],
            c.step_s,
            c.request_s,
            c.decode_pair_s,
            c.decode_index_pair_s,
        )
    )
    units[U_STEP_NS, unit] = max(step_ns, 1)
    root = units[U_ROOT, unit]
    if root != NONE:
        left = max(m.keys[root] - m.unit_tokens[unit], 0.0)
        due_ns = m.counters[NOW] + int(left * units[U_STEP_NS, unit] + 0.5)
        number = unit | (units[U_VERSION, unit] << UNIT_BITS)
        push(m.heap, m.counters, due_ns, DECODE_END, number)


@lean
def join_decode(p: Held[World], unit: int, agent: int, prompt: int, generated: int) -> int:
    """Let an agent's round decode its second token onwards; return when the second is due."""
    m = machine_of(p)
    units = m.units
    _advance(p, unit)
    tokens = m.unit_tokens[unit]
    first = math.ceil(tokens)
    context = prompt + generated // 2
    m.flights[agent, CONTEXT] = context
    _count(p, unit, context, 1)
    end = float(first + generated - 1)
    units[U_ROOT, unit] = add_node(
        m.keys, m.links, units[U_ROOT, unit], agent, end, units[U_JOINED, unit]
    )
    units[U_JOINED, unit] += 1
    _expect_next(p, unit)
    wait_ns = int((first + 1 - tokens) * units[U_STEP_NS, unit] + 0.5)
    return m.counters[NOW] + wait_ns


@lean
def end_decode(p: Held[World], number: int) -> int:
    """End the rounds that are due into ``m.ended`` and return how many."""
    m = machine_of(p)
    unit = number & ((1 << UNIT_BITS) - 1)
    units = m.units
    if number >> UNIT_BITS != units[U_VERSION, unit]:
        return 0
    _advance(p, unit)
    root = units[U_ROOT, unit]
    m.unit_tokens[unit] = max(m.unit_tokens[unit], m.keys[root])
    ended = 0
    while root != NONE and m.keys[root] <= m.unit_tokens[unit]:
        m.ended[ended] = root
        ended += 1
        _count(p, unit, m.flights[root, CONTEXT], -1)
        root = drop_root(m.keys, m.links, root)
    units[U_ROOT, unit] = root
    _expect_next(p, unit)
    return ended
