"""The compiled core's events: the life of a round, in the order of ``docs/simulator.md``.

The reference core (``sim.reference``) does the same with objects; both count by ``rules`` and
``plan.counts``.
"""

import numpy as np

from dualpath.core.blocks import holding_blocks
from dualpath.plan.counts import chunk_blocks, kv_tokens, new_full_blocks
from dualpath.policy.accounts import decode_tokens
from dualpath.policy.batching import next_chunk
from dualpath_sim.simulator.compiled.jit import inlined, lean, prefetch
from dualpath_sim.simulator.compiled.machine import (
    charge_path,
    fetch_assigned,
    fetch_chunks,
    fetch_next_round,
    fetch_queues,
    fetch_rows,
    node_at,
    push,
    read_storage,
)
from dualpath_sim.simulator.compiled.scheduler import (
    fetch_decode,
    fetch_prefill,
    finished,
    prefill_done,
    read_done,
    report,
    submit,
)
from dualpath_sim.simulator.compiled.tables import (
    A_DE,
    A_DE_READ,
    A_DE_REASON,
    A_PE,
    A_PE_READ,
    A_PE_REASON,
    A_READ_REASON,
    A_REQUEST,
    ARRIVE,
    BATCHES,
    CHUNK_BSZ,
    COMPUTED,
    DE,
    DE_READ,
    DECISIONS,
    DECODE_END,
    DIRTY,
    DONE,
    FETCH,
    FETCH_DUE,
    FILLED,
    FINISHED,
    FREE,
    GENERATED,
    HIT,
    LAST_ROUND,
    LENGTH,
    NEXT_WAITING,
    NONE,
    NOW,
    PARTS_LEFT,
    PE,
    PE_BLOCKS,
    PE_READ,
    PLACED,
    PROMPT,
    PROMPT_BLOCKS,
    QUEUE_HEAD,
    QUEUE_TAIL,
    READ,
    READING,
    REQUESTS,
    SENT,
    START_PASS,
    SUBMIT,
    T_ASSIGNED,
    T_DECODING,
    T_FINISHED,
    T_FIRST_TOKEN,
    T_GRANTED,
    T_LOADED,
    T_PREFILL,
    T_SECOND_TOKEN,
    T_SUBMITTED,
    TOKENS,
    U_BUSY,
    U_CHUNK_HEAD,
    U_CONTEXT,
    U_COUNT,
    U_EXPECTED,
    U_FIRST,
    U_NEXT_END,
    U_REQUESTS,
    U_SINCE,
    U_STEP_NS,
    U_WINDOW,
    UNASSIGNED,
    UNIT,
    WAITING_HEAD,
    WAITING_TAIL,
    WHEEL_BLOCK,
    World,
)
from dualpath_sim.simulator.derived import (
    FILL_PATH,
    LOAD_DE_PATH,
    LOAD_PE_PATH,
    PERSIST_GENERATED_PATH,
    PERSIST_PROMPT_PATH,
    READ_DE_PATH,
    READ_PE_PATH,
    RELOAD_PATH,
    SEND_PATH,
)
from dualpath_sim.simulator.rules import (
    chunk_limit_tokens,
    decode_context_tokens,
    decode_step_ns,
    fill_bytes,
    first_group,
    joining_step,
    load_bytes,
    next_multiple_ns,
    pass_end_ns,
    pass_s,
    read_bytes,
    seen_tokens,
    send_bytes,
    steps_ns,
    to_ns,
)

# 1. Submit, 2. fetch: from a client's submission to an assignment at both engines.


@lean
def submit_round(p: World, agent: int) -> None:
    """A client submits its next round."""
    m = p.machine
    times, now_ns = m.times, m.counters[NOW]
    r = m.round_of[agent] + 1
    m.round_of[agent] = r
    for stage in range(times.shape[1]):
        times[r, stage] = NONE
    times[r, T_SUBMITTED] = now_ns
    if p.constants.overhead_ns:
        push(m.heap, m.counters, now_ns + p.constants.overhead_ns, ARRIVE, agent)
    else:
        arrive(p, agent)


@lean
def arrive(p: World, agent: int) -> None:
    """A round reaches the scheduler."""
    m, columns = p.machine, p.rounds
    flights = m.flights
    r = m.round_of[agent]
    prompt, hit, generated = columns.prompt[r], columns.hit[r], columns.generated[r]
    flights[agent, PROMPT] = prompt
    flights[agent, HIT] = hit
    flights[agent, GENERATED] = generated
    submit(p.scheduler, agent, prompt, hit, generated)
    _expect_fetch(p, m.counters[NOW])


@lean
def _expect_fetch(p: World, not_before_ns: int) -> None:
    m = p.machine
    if m.counters[FETCH_DUE] == 0:
        m.counters[FETCH_DUE] = 1
        due_ns = next_multiple_ns(not_before_ns, p.constants.interval_ns)
        push(m.heap, m.counters, due_ns, FETCH, 0)


@lean
def fetch(p: World) -> None:
    """Let every group report and fetch, PE groups first and in turn."""
    m, s = p.machine, p.scheduler
    m.counters[FETCH_DUE] = 0
    now_ns = m.counters[NOW]
    prefill_groups = s.first_decode_group
    first = first_group(now_ns, p.constants.interval_ns, prefill_groups)
    for place in range(m.groups.shape[0]):
        if place < prefill_groups:
            group = (first + place) % prefill_groups
            _report(p, group)
            count = fetch_prefill(s, group)
        else:
            _report(p, place)
            count = fetch_decode(s, place)
        fetch_assigned(p, count)
        for row in range(count):
            _take(p, row)
    if s.counters[UNASSIGNED]:
        _expect_fetch(p, now_ns + 1)


@lean
def _report(p: World, group: int) -> None:
    m, s = p.machine, p.scheduler
    engines = m.engines
    for engine in range(m.groups[group, 0], m.groups[group, 1]):
        if engines[engine, DIRTY]:
            engines[engine, DIRTY] = 0
            report(
                s,
                engine,
                s.work[PLACED, :0],
                engines[engine, REQUESTS],
                engines[engine, TOKENS],
                engines[engine, READING],
                engines[engine, FREE],
                0,
            )


@lean
def _take(p: World, row: int) -> None:
    """Count an assignment at both engines and reserve its buffers."""
    m, s = p.machine, p.scheduler
    assigned, flights, engines = s.assigned, m.flights, m.engines
    agent = assigned[row, A_REQUEST]
    pe, de = assigned[row, A_PE], assigned[row, A_DE]
    pe_read, de_read = assigned[row, A_PE_READ], assigned[row, A_DE_READ]
    pe_tokens, de_tokens = s.requests[agent, LENGTH], s.requests[agent, LENGTH + 1]
    flights[agent, PE], flights[agent, DE] = pe, de
    flights[agent, PE_READ], flights[agent, DE_READ] = pe_read, de_read
    for engine, tokens, read in ((pe, pe_tokens, pe_read), (de, de_tokens, de_read)):
        engines[engine, REQUESTS] += 1
        engines[engine, TOKENS] += tokens
        engines[engine, READING] += read
        engines[engine, DIRTY] = 1
    engines[de, FREE] -= de_tokens
    if m.decisions.shape[0]:
        _record(p, row)
    _assigned(p, agent)


@lean
def _record(p: World, row: int) -> None:
    m, assigned = p.machine, p.scheduler.assigned
    decisions, decision = m.decisions, m.counters[DECISIONS]
    m.counters[DECISIONS] += 1
    decisions[decision, 0] = m.round_of[assigned[row, A_REQUEST]]
    decisions[decision, 1] = assigned[row, A_PE]
    decisions[decision, 2] = assigned[row, A_DE]
    decisions[decision, 3] = assigned[row, A_PE_READ]
    decisions[decision, 4] = assigned[row, A_DE_READ]
    decisions[decision, 5] = assigned[row, A_PE_REASON]
    decisions[decision, 6] = assigned[row, A_DE_REASON]
    decisions[decision, 7] = assigned[row, A_READ_REASON]


@lean
def _assigned(p: World, agent: int) -> None:
    m, c = p.machine, p.constants
    flights, now_ns = m.flights, m.counters[NOW]
    r = m.round_of[agent]
    flights[agent, PE_BLOCKS] = holding_blocks(flights[agent, PE_READ], c.block_tokens)
    flights[agent, PROMPT_BLOCKS] = holding_blocks(flights[agent, PROMPT], c.block_tokens)
    m.times[r, T_ASSIGNED] = now_ns
    if c.oracle:
        m.times[r, T_GRANTED] = now_ns
        loaded(p, agent)
        return
    reserve(p, node_at(p, flights[agent, DE]), agent)


# 3. Buffers of the nodes, granted first come, first served.


@lean
def release_prefill(p: World, agent: int) -> None:
    """Free a round's blocks at its PE's node and grant what fits then."""
    flights = p.machine.flights
    blocks = flights[agent, PE_BLOCKS]
    if blocks:
        node = node_at(p, flights[agent, PE])
        p.machine.free_bytes[node] += blocks * p.constants.block_bytes
        _grant_prefill(p, node)


@lean
def release_decode(p: World, agent: int) -> None:
    """Free a round's blocks at its DE's node and grant what fits then."""
    flights = p.machine.flights
    node = node_at(p, flights[agent, DE])
    p.machine.free_bytes[node] += flights[agent, PROMPT_BLOCKS] * p.constants.block_bytes
    _grant_decode(p, node)


@lean
def reserve(p: World, node: int, agent: int) -> None:
    """Queue a round for room at its DE's node, then at its PE's."""
    _wait_at(p, node, agent)
    _grant_decode(p, node)


@lean
def _wait_at(p: World, node: int, agent: int) -> None:
    flights, waiting = p.machine.flights, p.machine.waiting
    flights[agent, NEXT_WAITING] = NONE
    if waiting[node, WAITING_HEAD] == NONE:
        waiting[node, WAITING_HEAD] = agent
    else:
        flights[waiting[node, WAITING_TAIL], NEXT_WAITING] = agent
    waiting[node, WAITING_TAIL] = agent


@lean
def _next_granted(p: World, node: int) -> int:
    """Take the first agent that waits at a node if there is room, else return NONE."""
    m = p.machine
    flights = m.flights
    agent = m.waiting[node, WAITING_HEAD]
    if agent == NONE:
        return NONE
    prefetch(flights, flights[agent, NEXT_WAITING], 0)
    prefetch(m.round_of, flights[agent, NEXT_WAITING], 0)
    at_pe = node < p.constants.prefill_nodes
    blocks = flights[agent, PE_BLOCKS] if at_pe else flights[agent, PROMPT_BLOCKS]
    need_bytes = blocks * p.constants.block_bytes
    if need_bytes > m.free_bytes[node]:
        return NONE
    m.free_bytes[node] -= need_bytes
    m.waiting[node, WAITING_HEAD] = flights[agent, NEXT_WAITING]
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


# 4. Read, until all KV of a round is in DRAM and it waits at its PE.


@lean
def granted(p: World, agent: int) -> None:
    """A round has its buffers: queue its reads, not before what they read is stored."""
    m = p.machine
    flights, now_ns = m.flights, m.counters[NOW]
    m.times[m.round_of[agent], T_GRANTED] = now_ns
    parts = (1 if flights[agent, PE_READ] else 0) + (1 if flights[agent, PE_READ + 1] else 0)
    flights[agent, PARTS_LEFT] = parts
    if parts == 0:
        loaded(p, agent)
        return
    stored_ns = m.stored_ns[agent]
    for side in range(2):
        if flights[agent, PE_READ + side] == 0:
            continue
        if stored_ns > now_ns:
            push(m.heap, m.counters, stored_ns, READ, 2 * agent + side)
        else:
            read(p, 2 * agent + side)


@lean
def read(p: World, part: int) -> None:
    """Queue one part of a round's reads at its SNIC."""
    c, flights = p.constants, p.machine.flights
    agent, side = part >> 1, part & 1
    engine = flights[agent, PE + side]
    part_bytes = read_bytes(
        c.layer_kinds,
        side == 1,
        0,
        0,
        flights[agent, PE_BLOCKS],
        hit_blocks(p, agent),
        c.block_tokens,
    )
    charge_path(p, READ_DE_PATH if side else READ_PE_PATH, engine, engine, part_bytes)
    node = node_at(p, engine)
    read_storage(p, node, part, part_bytes)


@lean
def part_read(p: World, part: int) -> None:
    """One part of a round's reads is over."""
    flights, engines = p.machine.flights, p.machine.engines
    agent, side = part >> 1, part & 1
    engine = flights[agent, PE + side]
    engines[engine, READING] -= flights[agent, PE_READ + side]
    engines[engine, DIRTY] = 1
    flights[agent, PARTS_LEFT] -= 1
    if flights[agent, PARTS_LEFT] == 0:
        loaded(p, agent)


@lean
def loaded(p: World, agent: int) -> None:
    """All of a round's KV is in DRAM: it waits at its PE."""
    m = p.machine
    flights, engines, units, now_ns = m.flights, m.engines, m.units, m.counters[NOW]
    m.times[m.round_of[agent], T_LOADED] = now_ns
    read_done(p.scheduler, agent)
    flights[agent, DONE] = flights[agent, HIT]
    m.next_queued[agent] = NONE
    pe = flights[agent, PE]
    if engines[pe, QUEUE_HEAD] == NONE:
        engines[pe, QUEUE_HEAD] = agent
    else:
        m.next_queued[engines[pe, QUEUE_TAIL]] = agent
    engines[pe, QUEUE_TAIL] = agent
    unit = engines[pe, UNIT]
    if units[unit, U_BUSY] == 0:
        units[unit, U_BUSY] = 1
        push(m.heap, m.counters, now_ns, START_PASS, unit)


# 5. Prefill: which chunks enter a unit's next forward pass.


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


# 6. The pass, 7. the first token.


@lean
def start_pass(p: World, unit: int, follows: bool) -> None:
    """Begin a unit's next forward pass if any of its engines has work; it may follow another."""
    m = p.machine
    tokens, compute_s, slowest_s, mean_s = form_pass(p, unit)
    m.units[unit, U_BUSY] = 1 if tokens else 0
    if tokens == 0:
        return
    flights, batches, now_ns = m.flights, m.batches, m.counters[NOW]
    agent = m.units[unit, U_CHUNK_HEAD]
    while agent != NONE:
        if flights[agent, DONE] == flights[agent, HIT]:
            m.times[m.round_of[agent], T_PREFILL] = now_ns
        agent = m.next_chunk[agent]
    overlapped = follows and p.constants.overlap_passes
    end_ns = _pass_end(p, unit, to_ns(compute_s), overlapped)
    batch = m.counters[BATCHES]
    m.counters[BATCHES] += 1
    batches[batch, 0] = now_ns
    batches[batch, 1] = end_ns
    batches[batch, 2] = unit
    batches[batch, 3] = tokens
    m.attention_s[batch, 0] = slowest_s
    m.attention_s[batch, 1] = mean_s
    push(m.heap, m.counters, end_ns, COMPUTED, unit)


@lean
def _pass_end(p: World, unit: int, compute_ns: int, overlapped: bool) -> int:
    m, c = p.machine, p.constants
    now_ns = m.counters[NOW]
    if c.oracle:
        return now_ns + compute_ns
    moved_ns = now_ns
    agent = m.units[unit, U_CHUNK_HEAD]
    while agent != NONE:
        moved_ns = max(moved_ns, _load(p, agent))
        agent = m.next_chunk[agent]
    if not c.resident:
        moved_ns = max(moved_ns, _send(p, unit))
    return pass_end_ns(now_ns, compute_ns, moved_ns, c.layers, c.resident, overlapped)


@lean
def _load(p: World, agent: int) -> int:
    flights, c = p.machine.flights, p.constants
    pe, de = flights[agent, PE], flights[agent, DE]
    at_pe, at_de, reloaded = load_bytes(
        c.layer_kinds,
        flights[agent, DONE] // c.block_tokens,
        0,
        flights[agent, PE_BLOCKS],
        hit_blocks(p, agent),
        c.block_tokens,
        c.resident,
    )
    end_ns = charge_path(p, LOAD_PE_PATH, pe, de, at_pe)
    end_ns = max(end_ns, charge_path(p, LOAD_DE_PATH, pe, de, at_de))
    return max(end_ns, charge_path(p, RELOAD_PATH, pe, de, reloaded))


@lean
def _send(p: World, unit: int) -> int:
    """Charge the transfers to the DEs, before the chunks count as done."""
    m, c = p.machine, p.constants
    flights, end_ns = m.flights, m.counters[NOW]
    agent = m.units[unit, U_CHUNK_HEAD]
    while agent != NONE:
        cached = flights[agent, DONE]
        chunk_bytes = send_bytes(
            c.layer_kinds,
            chunk_blocks(cached, flights[agent, CHUNK_BSZ], c.block_tokens),
            cached // c.block_tokens,
            0,
            flights[agent, PE_BLOCKS],
            hit_blocks(p, agent),
            flights[agent, PROMPT],
            c.block_tokens,
        )
        sent_ns = charge_path(p, SEND_PATH, flights[agent, PE], flights[agent, DE], chunk_bytes)
        end_ns = max(end_ns, sent_ns)
        agent = m.next_chunk[agent]
    return end_ns


@lean
def computed(p: World, unit: int) -> None:
    """The computation of a unit's pass is over."""
    m, c = p.machine, p.constants
    flights, now_ns = m.flights, m.counters[NOW]
    fetch_chunks(p, unit)
    sent_ns = now_ns
    if c.resident and not c.oracle:
        sent_ns = _send(p, unit)
    agent = m.units[unit, U_CHUNK_HEAD]
    while agent != NONE:
        flights[agent, DONE] += flights[agent, CHUNK_BSZ]
        if flights[agent, DONE] == flights[agent, PROMPT]:
            m.engines[flights[agent, PE], QUEUE_HEAD] = m.next_queued[agent]
            m.times[m.round_of[agent], T_FIRST_TOKEN] = now_ns
        agent = m.next_chunk[agent]
    if sent_ns > now_ns:
        push(m.heap, m.counters, sent_ns, SENT, unit)
    else:
        sent(p, unit)


@lean
def sent(p: World, unit: int) -> None:
    """The KV of a unit's pass is at the DEs: the next pass can begin."""
    m = p.machine
    flights = m.flights
    agent = m.units[unit, U_CHUNK_HEAD]
    while agent != NONE:
        following = m.next_chunk[agent]
        if flights[agent, DONE] == flights[agent, PROMPT]:
            _prefilled(p, agent)
        agent = following
    start_pass(p, unit, True)


@lean
def _prefilled(p: World, agent: int) -> None:
    m, c = p.machine, p.constants
    flights = m.flights
    pe, de, prompt = flights[agent, PE], flights[agent, DE], flights[agent, PROMPT]
    prefill_done(p.scheduler, agent)
    uncount(p, pe, prompt, 0)
    if not c.oracle:
        release_prefill(p, agent)
        new_blocks = new_full_blocks(flights[agent, HIT], prompt, c.block_tokens)
        persist(p, PERSIST_PROMPT_PATH, agent, de, new_blocks)
    if flights[agent, GENERATED] == 1:
        r = m.round_of[agent]
        m.times[r, T_DECODING] = m.times[r, T_SECOND_TOKEN] = m.times[r, T_FIRST_TOKEN]
        if not c.oracle:
            release_decode(p, agent)
        finish(p, agent)
    else:
        filled_ns = m.counters[NOW]
        if not c.oracle:
            prompt_bytes = fill_bytes(c.layer_kinds, prompt, c.block_tokens)
            filled_ns = charge_path(p, FILL_PATH, de, de, prompt_bytes)
        push(m.heap, m.counters, filled_ns + c.admission_ns, FILLED, agent)


# 8. Decode.  The rounds of a unit end after whole tokens, and no two that are decoded together are
# further apart than the longest generation: a wheel has a list of rounds for each token, so that a
# round enters and leaves at the same small cost, however many are decoded.  A place holds the agent
# that entered last plus one, 0 for none.


@lean
def enter_wheel(p: World, unit: int, agent: int, end: int) -> None:
    """Let an agent's round end after token ``end``; the unit does not count it yet."""
    m = p.machine
    units, wheel = m.units, m.wheel
    row = unit - m.prefill_units
    place = end & (wheel.shape[1] - 1)
    before = wheel[row, place]
    wheel[row, place] = agent + 1
    m.next_ending[agent] = before
    if before == 0:
        m.wheel_blocks[row, place // WHEEL_BLOCK] += 1
    if units[unit, U_REQUESTS] == 0 or end < units[unit, U_NEXT_END]:
        units[unit, U_NEXT_END] = end


@lean
def leave_wheel(p: World, unit: int, count: int) -> int:
    """Append those that end next to ``ended``, of ``count``, as they came; return the new count."""
    m = p.machine
    wheel, ended = m.wheel, m.ended
    row = unit - m.prefill_units
    place = m.units[unit, U_NEXT_END] & (wheel.shape[1] - 1)
    first, entry = count, wheel[row, place]
    wheel[row, place] = 0
    m.wheel_blocks[row, place // WHEEL_BLOCK] -= 1
    while entry:
        fetch_rows(p, entry - 1)
        fetch_next_round(p, entry - 1)
        ended[count] = entry - 1
        count += 1
        entry = m.next_ending[entry - 1]
    last = count - 1
    while first < last:
        ended[first], ended[last] = ended[last], ended[first]
        first += 1
        last -= 1
    return count


@lean
def turn_wheel(p: World, unit: int) -> None:
    """Find the next end of a unit that has rounds left."""
    m = p.machine
    wheel, blocks = m.wheel, m.wheel_blocks
    row, mask = unit - m.prefill_units, wheel.shape[1] - 1
    end = m.units[unit, U_NEXT_END] + 1
    while wheel[row, end & mask] == 0:
        end += 1
        if end % WHEEL_BLOCK == 0:
            while blocks[row, (end & mask) // WHEEL_BLOCK] == 0:
                end += WHEEL_BLOCK
    m.units[unit, U_NEXT_END] = end


@lean
def filled(p: World, agent: int) -> None:
    """A prompt's KV is in the DE's HBM."""
    if not p.constants.oracle:
        release_decode(p, agent)
    _decode(p, agent)


@lean
def _decode(p: World, agent: int) -> None:
    """Let an agent's round decode its second token onwards."""
    m = p.machine
    flights, units, now_ns = m.flights, m.units, m.counters[NOW]
    r, generated = m.round_of[agent], flights[agent, GENERATED]
    unit = m.prefill_units + m.engines[flights[agent, DE], UNIT]
    _advance_unit(p, unit)
    tokens = m.unit_tokens[unit]
    first = joining_step(tokens)
    enter_wheel(p, unit, agent, first + generated - 1)
    _count_context(p, unit, agent, 1)
    _expect_end(p, unit)
    m.times[r, T_DECODING] = now_ns
    wait_ns = steps_ns(first + 1 - tokens, units[unit, U_STEP_NS])
    m.times[r, T_SECOND_TOKEN] = now_ns + wait_ns


@lean
def decode_ended(p: World, unit: int, number: int) -> None:
    """Rounds of a unit have got their last token, unless that changed since push ``number``."""
    m = p.machine
    units, unit_tokens, ended = m.units, m.unit_tokens, m.ended
    if number != units[unit, U_EXPECTED]:
        return
    _advance_unit(p, unit)
    unit_tokens[unit] = max(unit_tokens[unit], float(units[unit, U_NEXT_END]))
    count = 0
    while units[unit, U_REQUESTS] and float(units[unit, U_NEXT_END]) <= unit_tokens[unit]:
        ending = leave_wheel(p, unit, count)
        for position in range(count, ending):
            _count_context(p, unit, ended[position], -1)
        count = ending
        if units[unit, U_REQUESTS]:
            turn_wheel(p, unit)
    _expect_end(p, unit)
    for position in range(count):
        finish(p, ended[position])


@lean
def _advance_unit(p: World, unit: int) -> None:
    units, now_ns = p.machine.units, p.machine.counters[NOW]
    if units[unit, U_REQUESTS]:
        elapsed_ns = now_ns - units[unit, U_SINCE]
        p.machine.unit_tokens[unit] += elapsed_ns / units[unit, U_STEP_NS]
    units[unit, U_SINCE] = now_ns


@lean
def _count_context(p: World, unit: int, agent: int, sign: int) -> None:
    units, flights = p.machine.units, p.machine.flights
    context = decode_context_tokens(flights[agent, PROMPT], flights[agent, GENERATED])
    units[unit, U_REQUESTS] += sign
    units[unit, U_CONTEXT] += sign * context
    units[unit, U_WINDOW] += sign * seen_tokens(context, p.constants.decode_window_tokens)


@lean
def _expect_end(p: World, unit: int) -> None:
    m, c = p.machine, p.constants
    units = m.units
    step_ns = decode_step_ns(
        units[unit, U_REQUESTS],
        units[unit, U_WINDOW],
        units[unit, U_CONTEXT],
        units[unit, U_COUNT],
        c.step_s,
        c.request_s,
        c.decode_pair_s,
        c.decode_index_pair_s,
    )
    units[unit, U_STEP_NS] = step_ns
    if units[unit, U_REQUESTS]:
        left = float(units[unit, U_NEXT_END]) - m.unit_tokens[unit]
        due_ns = m.counters[NOW] + steps_ns(left, step_ns)
        units[unit, U_EXPECTED] = push(m.heap, m.counters, due_ns, DECODE_END, unit)


# 9. Finish.


@lean
def uncount(p: World, engine: int, tokens: int, hbm_tokens: int) -> None:
    """Remove a request from an engine's load."""
    engines = p.machine.engines
    engines[engine, REQUESTS] -= 1
    engines[engine, TOKENS] -= tokens
    engines[engine, FREE] += hbm_tokens
    engines[engine, DIRTY] = 1


@lean
def persist(p: World, path: int, agent: int, de: int, blocks: int) -> None:
    """Start writing an agent's new blocks to storage."""
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
    uncount(p, de, tokens, tokens)
    stored = kv_tokens(prompt, generated)
    if not c.oracle:
        blocks = new_full_blocks(prompt, stored, c.block_tokens)
        persist(p, PERSIST_GENERATED_PATH, agent, de, blocks)
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


@inlined
def hit_blocks(p: World, agent: int) -> int:
    """Return how many blocks of a round's prompt are hits."""
    return holding_blocks(p.machine.flights[agent, HIT], p.constants.block_tokens)
