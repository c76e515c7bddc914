"""Prefill and decode units of the compiled core (the reference's prefill and decode)."""

import math

from dualpath.sim.compiled.events import add_node, drop_root, push
from dualpath.sim.compiled.jit import compiled
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
    Constants,
    Machine,
    Rounds,
)
from dualpath.sim.costs import decode_step_s as _decode_step_s
from dualpath.sim.costs import pass_s as _pass_s
from dualpath.sim.costs import to_ns as _to_ns

pass_s = compiled(_pass_s)
decode_step_s = compiled(_decode_step_s)
to_ns = compiled(_to_ns)


@compiled
def form_pass(
    machine: Machine, constants: Constants, rounds: Rounds, unit: int
) -> tuple[int, float, float, float]:
    """Chain the chunks of a unit's next pass; return tokens, computation time and attention.

    Attention is that of the slowest and of the mean engine; without work tokens are 0.
    """
    flights, units = machine.flights, machine.units
    first, count = units[U_FIRST, unit], units[U_COUNT, unit]
    units[U_CHUNK_HEAD, unit] = NONE
    tail, tokens = NONE, 0
    slowest_s = sum_s = 0.0
    for engine in range(first, first + count):
        agent = machine.engines[QUEUE_HEAD, engine]
        if agent == NONE:
            continue
        tokens_left, hbm_left = constants.batch_cap_tokens, constants.prefill_hbm_tokens
        spent_s = 0.0
        empty = True
        while agent != NONE:
            cached = flights[agent, DONE]
            remaining = rounds.prompt[flights[agent, ROUND]] - cached
            limit = min(tokens_left, hbm_left - cached)
            if limit <= 0:
                break
            bsz = largest_chunk(
                constants.pair_s,
                constants.index_pair_s,
                constants.attention_token_s,
                constants.window_tokens,
                constants.affordable_s - spent_s,
                cached,
                remaining,
                constants.block_tokens,
                empty,
                limit,
            )
            if bsz == 0:
                break
            spent_s += chunk_flops(
                constants.pair_s,
                constants.index_pair_s,
                constants.attention_token_s,
                constants.window_tokens,
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
        attention_s = 0.0 if empty else constants.attention_batch_s + spent_s / 1.0
        slowest_s = max(slowest_s, attention_s)
        sum_s += attention_s
    compute_s = pass_s(
        slowest_s,
        tokens / count,
        constants.batch_s,
        constants.feed_forward_token_s,
        constants.exchange_token_s,
        constants.interleaved,
    )
    return tokens, compute_s, slowest_s, sum_s / count


@compiled
def _advance(machine: Machine, unit: int) -> None:
    units, now_ns = machine.units, machine.counters[NOW]
    if units[U_REQUESTS, unit]:
        elapsed_ns = now_ns - units[U_SINCE, unit]
        machine.unit_tokens[unit] += elapsed_ns / units[U_STEP_NS, unit]
    units[U_SINCE, unit] = now_ns


@compiled
def _count(machine: Machine, constants: Constants, unit: int, context: int, sign: int) -> None:
    machine.units[U_REQUESTS, unit] += sign
    machine.units[U_CONTEXT, unit] += sign * context
    machine.units[U_WINDOW, unit] += sign * min(context, constants.decode_window_tokens)


@compiled
def _expect_next(machine: Machine, constants: Constants, unit: int) -> None:
    units = machine.units
    units[U_VERSION, unit] += 1
    step_ns = to_ns(
        decode_step_s(
            units[U_REQUESTS, unit],
            units[U_WINDOW, unit],
            units[U_CONTEXT, unit],
            units[U_COUNT, unit],
            constants.step_s,
            constants.request_s,
            constants.decode_pair_s,
            constants.decode_index_pair_s,
        )
    )
    units[U_STEP_NS, unit] = max(step_ns, 1)
    root = units[U_ROOT, unit]
    if root != NONE:
        left = max(machine.keys[root] - machine.unit_tokens[unit], 0.0)
        due_ns = machine.counters[NOW] + int(left * units[U_STEP_NS, unit] + 0.5)
        number = unit | (units[U_VERSION, unit] << UNIT_BITS)
        push(machine.heap, machine.counters, due_ns, DECODE_END, number)


@compiled
def join_decode(
    machine: Machine, constants: Constants, unit: int, agent: int, prompt: int, generated: int
) -> int:
    """Let an agent's round decode its second token onwards; return when the second is due."""
    units = machine.units
    _advance(machine, unit)
    tokens = machine.unit_tokens[unit]
    first = math.ceil(tokens)
    context = prompt + generated // 2
    machine.flights[agent, CONTEXT] = context
    _count(machine, constants, unit, context, 1)
    end = float(first + generated - 1)
    units[U_ROOT, unit] = add_node(
        machine.keys, machine.links, units[U_ROOT, unit], agent, end, units[U_JOINED, unit]
    )
    units[U_JOINED, unit] += 1
    _expect_next(machine, constants, unit)
    wait_ns = int((first + 1 - tokens) * units[U_STEP_NS, unit] + 0.5)
    return machine.counters[NOW] + wait_ns


@compiled
def end_decode(machine: Machine, constants: Constants, number: int) -> int:
    """End the rounds that are due into ``machine.ended`` and return how many."""
    unit = number & ((1 << UNIT_BITS) - 1)
    units = machine.units
    if number >> UNIT_BITS != units[U_VERSION, unit]:
        return 0
    _advance(machine, unit)
    root = units[U_ROOT, unit]
    machine.unit_tokens[unit] = max(machine.unit_tokens[unit], machine.keys[root])
    ended = 0
    while root != NONE and machine.keys[root] <= machine.unit_tokens[unit]:
        machine.ended[ended] = root
        ended += 1
        _count(machine, constants, unit, machine.flights[root, CONTEXT], -1)
        root = drop_root(machine.keys, machine.links, root)
    units[U_ROOT, unit] = root
    _expect_next(machine, constants, unit)
    return ended
