"""The life of a round in the compiled core: the handlers of ``reference.core`` over tables."""

import numpy as np

from dualpath.sim.compiled.events import push
from dualpath.sim.compiled.jit import Held, inlined, lean
from dualpath.sim.compiled.ledger import report
from dualpath.sim.compiled.links import charge_cnic, charge_path, read_equal, read_fifo
from dualpath.sim.compiled.machine_tables import (
    ARRIVE,
    BATCHES,
    CHUNK_BSZ,
    CHUNK_CACHED,
    COMPUTED,
    DE,
    DE_BLOCKS,
    DE_READ,
    DE_TOKENS,
    DECISIONS,
    DIRTY,
    DONE,
    FETCH,
    FETCH_DUE,
    FILL_PATH,
    FILLED,
    FINISHED,
    FREE,
    FREE_BYTES,
    LOAD_DE_PATH,
    LOAD_PE_PATH,
    N_HEAD,
    N_TAIL,
    NEXT_CHUNK,
    NEXT_QUEUED,
    NEXT_WAITING,
    NONE,
    NOW,
    PARTS_LEFT,
    PE,
    PE_BLOCKS,
    PE_READ,
    PE_TOKENS,
    PERSIST_PATH,
    PROMPT_BLOCKS,
    QUEUE_HEAD,
    QUEUE_TAIL,
    READ,
    READ_DE_PATH,
    READ_PE_PATH,
    READ_TOKENS,
    RELOAD_PATH,
    REQUESTS,
    ROUND,
    SEND_PATH,
    SENT,
    START_PASS,
    SUBMIT,
    TIER_BLOCKS,
    TIER_HITS,
    TIER_LOADED,
    TIER_NEWER,
    TIER_NEWEST,
    TIER_OLDER,
    TIER_OLDEST,
    TIER_TOKENS,
    TIER_USED,
    TOKENS,
    U_BUSY,
    U_CHUNK_HEAD,
    UNIT,
    WAITS_AT_PE,
)
from dualpath.sim.compiled.scheduler import (
    fetch_decode,
    fetch_prefill,
    finished,
    prefill_done,
    read_done,
    submit,
)
from dualpath.sim.compiled.tables import (
    A_DE,
    A_DE_READ,
    A_DE_REASON,
    A_PE,
    A_PE_READ,
    A_PE_REASON,
    A_READ_REASON,
    A_REQUEST,
    LAST_SEQ,
    LENGTH,
    UNTOLD,
)
from dualpath.sim.compiled.units import end_decode, form_pass, join_decode, to_ns
from dualpath.sim.compiled.world import World, constants_of, machine_of, rounds_of, scheduler_of
from dualpath.sim.costs import next_multiple_ns as _next_multiple_ns
from dualpath.sim.result import TurnTimes

next_multiple_ns = inlined(_next_multiple_ns)

#: Rows of ``Machine.times``.
(
    T_SUBMITTED,
    T_ASSIGNED,
    T_GRANTED,
    T_LOADED,
    T_PREFILL,
    T_FIRST_TOKEN,
    T_DECODING,
    T_SECOND_TOKEN,
    T_FINISHED,
) = range(len(TurnTimes._fields))


# 1. Submit.


@lean
def submit_round(p: Held[World], r: int) -> None:
    """A client submits a round."""
    m = machine_of(p)
    c = constants_of(p)
    m.times[T_SUBMITTED, r] = m.counters[NOW]
    if c.overhead_ns:
        push(m.heap, m.counters, m.counters[NOW] + c.overhead_ns, ARRIVE, r)
    else:
        arrive(p, r)


@lean
def arrive(p: Held[World], r: int) -> None:
    """A round reaches the scheduler."""
    m = machine_of(p)
    c = constants_of(p)
    rounds = rounds_of(p)
    s = scheduler_of(p)
    agent = rounds.agent[r]
    m.flights[agent, ROUND] = r
    in_tier = 0
    if c.tier_tokens:
        in_tier = _tier_hit(p, agent, rounds.hit[r])
        in_tier -= in_tier % c.block_tokens
        m.counters[TIER_HITS] += in_tier
    m.flights[agent, TIER_BLOCKS] = in_tier // c.block_tokens
    submit(s, agent, rounds.prompt[r], rounds.hit[r] - in_tier, rounds.generated[r])
    _expect_fetch(p, m.counters[NOW])


@lean
def _expect_fetch(p: Held[World], not_before_ns: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    if m.counters[FETCH_DUE] == 0:
        m.counters[FETCH_DUE] = 1
        due_ns = next_multiple_ns(not_before_ns, c.interval_ns)
        push(m.heap, m.counters, due_ns, FETCH, 0)


# 2. Fetch.


@lean
def fetch(p: Held[World]) -> None:
    """Let every group report and fetch, PE groups first and in turn."""
    m = machine_of(p)
    c = constants_of(p)
    s = scheduler_of(p)
    m.counters[FETCH_DUE] = 0
    tick = m.counters[NOW] // c.interval_ns
    for place in range(m.groups.shape[0]):
        group = place
        if place < s.first_decode_group:
            group = (place + tick) % s.first_decode_group
        for engine in range(m.groups[group, 0], m.groups[group, 1]):
            if m.engines[DIRTY, engine]:
                m.engines[DIRTY, engine] = 0
                report(
                    s,
                    engine,
                    s.engines[LAST_SEQ, engine],
                    m.engines[REQUESTS, engine],
                    m.engines[TOKENS, engine],
                    m.engines[READ_TOKENS, engine],
                    m.engines[FREE, engine],
                )
        is_prefill = group < s.first_decode_group
        count = fetch_prefill(s, group) if is_prefill else fetch_decode(s, group)
        for row in range(count):
            _take(p, row)
    if s.counters[UNTOLD]:
        _expect_fetch(p, m.counters[NOW] + 1)


@lean
def _take(p: Held[World], row: int) -> None:
    """Count an assignment in at both engines."""
    m = machine_of(p)
    s = scheduler_of(p)
    assigned, flights, engines = s.assigned, m.flights, m.engines
    agent = assigned[row, A_REQUEST]
    pe, de = assigned[row, A_PE], assigned[row, A_DE]
    pe_read, de_read = assigned[row, A_PE_READ], assigned[row, A_DE_READ]
    pe_tokens, de_tokens = s.requests[agent, LENGTH], s.requests[agent, LENGTH + 1]
    flights[agent, PE], flights[agent, DE] = pe, de
    flights[agent, PE_READ], flights[agent, DE_READ] = pe_read, de_read
    flights[agent, PE_TOKENS], flights[agent, DE_TOKENS] = pe_tokens, de_tokens
    for engine, tokens, read in ((pe, pe_tokens, pe_read), (de, de_tokens, de_read)):
        engines[REQUESTS, engine] += 1
        engines[TOKENS, engine] += tokens
        engines[READ_TOKENS, engine] += read
        engines[DIRTY, engine] = 1
    engines[FREE, de] -= de_tokens
    if m.decisions.shape[0]:
        decision = m.counters[DECISIONS]
        m.counters[DECISIONS] += 1
        m.decisions[decision, 0] = flights[agent, ROUND]
        m.decisions[decision, 1] = pe
        m.decisions[decision, 2] = de
        m.decisions[decision, 3] = pe_read
        m.decisions[decision, 4] = de_read
        m.decisions[decision, 5] = assigned[row, A_PE_REASON]
        m.decisions[decision, 6] = assigned[row, A_DE_REASON]
        m.decisions[decision, 7] = assigned[row, A_READ_REASON]
    _assigned(p, agent)


@lean
def _over(p: Held[World], engine: int, tokens: int, hbm_tokens: int) -> None:
    """Count a request out at an engine."""
    m = machine_of(p)
    m.engines[REQUESTS, engine] -= 1
    m.engines[TOKENS, engine] -= tokens
    m.engines[FREE, engine] += hbm_tokens
    m.engines[DIRTY, engine] = 1


# 3. Buffers.


@lean
def _assigned(p: Held[World], agent: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    rounds = rounds_of(p)
    flights = m.flights
    r = flights[agent, ROUND]
    pe_read, de_read = flights[agent, PE_READ], flights[agent, DE_READ]
    flights[agent, PE_BLOCKS] = -(-pe_read // c.block_tokens)
    flights[agent, DE_BLOCKS] = -(-de_read // c.block_tokens)
    flights[agent, PARTS_LEFT] = (1 if pe_read else 0) + (1 if de_read else 0)
    flights[agent, PROMPT_BLOCKS] = -(-rounds.prompt[r] // c.block_tokens)
    m.times[T_ASSIGNED, r] = m.counters[NOW]
    if c.oracle:
        m.times[T_GRANTED, r] = m.counters[NOW]
        _loaded(p, agent)
        return
    node = flights[agent, DE] // c.gpus_per_node
    _wait_at(p, node, agent, 0)
    _grant_decode(p, node)


@lean
def _wait_at(p: Held[World], node: int, agent: int, at_pe: int) -> None:
    m = machine_of(p)
    m.flights[agent, WAITS_AT_PE] = at_pe
    m.flights[agent, NEXT_WAITING] = NONE
    if m.nodes[N_HEAD, node] == NONE:
        m.nodes[N_HEAD, node] = agent
    else:
        m.flights[m.nodes[N_TAIL, node], NEXT_WAITING] = agent
    m.nodes[N_TAIL, node] = agent


@lean
def _next_granted(p: Held[World], node: int) -> int:
    """Take the first who waits at a node if there is room, else NONE."""
    m = machine_of(p)
    c = constants_of(p)
    agent = m.nodes[N_HEAD, node]
    if agent == NONE:
        return NONE
    waits_at_pe = m.flights[agent, WAITS_AT_PE]
    blocks = m.flights[agent, PE_BLOCKS] if waits_at_pe else m.flights[agent, PROMPT_BLOCKS]
    need_bytes = blocks * c.block_bytes
    if need_bytes > m.node_bytes[FREE_BYTES, node]:
        return NONE
    m.node_bytes[FREE_BYTES, node] -= need_bytes
    m.nodes[N_HEAD, node] = m.flights[agent, NEXT_WAITING]
    return int(agent)


@lean
def _grant_decode(p: Held[World], node: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    agent = _next_granted(p, node)
    while agent != NONE:
        flights = m.flights
        tier_blocks = flights[agent, TIER_BLOCKS]
        flights[agent, DE_BLOCKS] += tier_blocks
        flights[agent, PARTS_LEFT] += 1 if tier_blocks else 0
        if flights[agent, PE_BLOCKS]:
            pe_node = flights[agent, PE] // c.gpus_per_node
            _wait_at(p, pe_node, agent, 1)
            _grant_prefill(p, pe_node)
        else:
            _granted(p, agent)
        agent = _next_granted(p, node)


@lean
def _grant_prefill(p: Held[World], node: int) -> None:
    agent = _next_granted(p, node)
    while agent != NONE:
        _granted(p, agent)
        agent = _next_granted(p, node)


@lean
def _give_back(p: Held[World], engine: int, blocks: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    if blocks == 0:
        return
    node = engine // c.gpus_per_node
    m.node_bytes[FREE_BYTES, node] += blocks * c.block_bytes
    if node < c.prefill_nodes:
        _grant_prefill(p, node)
    else:
        _grant_decode(p, node)


# 4. Read.


@lean
def _granted(p: Held[World], agent: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    flights, now_ns = m.flights, m.counters[NOW]
    m.times[T_GRANTED, flights[agent, ROUND]] = now_ns
    if flights[agent, PARTS_LEFT] == 0:
        _loaded(p, agent)
        return
    if flights[agent, TIER_BLOCKS]:
        de = flights[agent, DE]
        tier_bytes = flights[agent, TIER_BLOCKS] * c.block_bytes
        end_ns = charge_cnic(p, de, m.engines.shape[1] + de, tier_bytes)
        push(m.heap, m.counters, end_ns, TIER_LOADED, agent)
    stored_ns = m.stored_ns[agent]
    for side in range(2):
        tokens = flights[agent, DE_READ] if side else flights[agent, PE_READ]
        if tokens == 0:
            continue
        if stored_ns > now_ns:
            push(m.heap, m.counters, stored_ns, READ, 2 * agent + side)
        else:
            read(p, 2 * agent + side)


@lean
def read(p: Held[World], part: int) -> None:
    """Queue one part of a round's reads at its SNIC."""
    m = machine_of(p)
    c = constants_of(p)
    agent, side = part >> 1, part & 1
    engine = m.flights[agent, DE] if side else m.flights[agent, PE]
    tokens = m.flights[agent, DE_READ] if side else m.flights[agent, PE_READ]
    blocks = -(-tokens // c.block_tokens)
    charge_path(p, READ_DE_PATH if side else READ_PE_PATH, engine, engine, blocks)
    node = engine // c.gpus_per_node
    if c.equal_snic:
        read_equal(p, node, part, blocks * c.block_bytes)
    else:
        read_fifo(p, node, part, blocks * c.block_bytes)


@lean
def part_read(p: Held[World], part: int) -> None:
    """One part of a round's reads is over."""
    m = machine_of(p)
    agent, side = part >> 1, part & 1
    engine = m.flights[agent, DE] if side else m.flights[agent, PE]
    tokens = m.flights[agent, DE_READ] if side else m.flights[agent, PE_READ]
    m.engines[READ_TOKENS, engine] -= tokens
    m.engines[DIRTY, engine] = 1
    part_loaded(p, agent)


@lean
def part_loaded(p: Held[World], agent: int) -> None:
    """One part of a round's KV is in DRAM."""
    m = machine_of(p)
    m.flights[agent, PARTS_LEFT] -= 1
    if m.flights[agent, PARTS_LEFT] == 0:
        _loaded(p, agent)


# 5. Prefill.


@lean
def _loaded(p: Held[World], agent: int) -> None:
    m = machine_of(p)
    rounds = rounds_of(p)
    s = scheduler_of(p)
    flights, engines = m.flights, m.engines
    r = flights[agent, ROUND]
    m.times[T_LOADED, r] = m.counters[NOW]
    read_done(s, agent)
    flights[agent, DONE] = rounds.hit[r]
    flights[agent, NEXT_QUEUED] = NONE
    pe = flights[agent, PE]
    if engines[QUEUE_HEAD, pe] == NONE:
        engines[QUEUE_HEAD, pe] = agent
    else:
        flights[engines[QUEUE_TAIL, pe], NEXT_QUEUED] = agent
    engines[QUEUE_TAIL, pe] = agent
    unit = engines[UNIT, pe]
    if m.units[U_BUSY, unit] == 0:
        m.units[U_BUSY, unit] = 1
        push(m.heap, m.counters, m.counters[NOW], START_PASS, unit)


@lean
def start_pass(p: Held[World], unit: int) -> None:
    """Begin a unit's next forward pass if any of its engines has work."""
    m = machine_of(p)
    rounds = rounds_of(p)
    tokens, compute_s, slowest_s, mean_s = form_pass(p, unit)
    m.units[U_BUSY, unit] = 1 if tokens else 0
    if tokens == 0:
        return
    flights, now_ns = m.flights, m.counters[NOW]
    agent = m.units[U_CHUNK_HEAD, unit]
    while agent != NONE:
        r = flights[agent, ROUND]
        if flights[agent, CHUNK_CACHED] == rounds.hit[r]:
            m.times[T_PREFILL, r] = now_ns
        agent = flights[agent, NEXT_CHUNK]
    end_ns = _pass_end(p, unit, to_ns(compute_s))
    batch = m.counters[BATCHES]
    m.counters[BATCHES] += 1
    m.batches[batch, 0] = now_ns
    m.batches[batch, 1] = end_ns
    m.batches[batch, 2] = unit
    m.batches[batch, 3] = tokens
    m.attention_s[batch, 0] = slowest_s
    m.attention_s[batch, 1] = mean_s
    push(m.heap, m.counters, end_ns, COMPUTED, unit)


# 6. The pass.


@lean
def _pass_end(p: Held[World], unit: int, compute_ns: int) -> int:
    m = machine_of(p)
    c = constants_of(p)
    now_ns = m.counters[NOW]
    if c.oracle:
        return now_ns + compute_ns
    moved_ns = now_ns
    agent = m.units[U_CHUNK_HEAD, unit]
    while agent != NONE:
        moved_ns = max(moved_ns, _load(p, agent))
        agent = m.flights[agent, NEXT_CHUNK]
    if c.resident:
        return moved_ns + compute_ns
    moved_ns = max(moved_ns, _send(p, unit))
    exposed_ns = (moved_ns - now_ns) // c.layers
    return max(now_ns + compute_ns, moved_ns) + exposed_ns


@lean
def _load(p: Held[World], agent: int) -> int:
    m = machine_of(p)
    c = constants_of(p)
    rounds = rounds_of(p)
    flights = m.flights
    missed = flights[agent, CHUNK_CACHED] - rounds.hit[flights[agent, ROUND]]
    if c.resident and missed:
        return m.counters[NOW]
    pe, de = flights[agent, PE], flights[agent, DE]
    end_ns = charge_path(p, LOAD_PE_PATH, pe, de, flights[agent, PE_BLOCKS])
    end_ns = max(end_ns, charge_path(p, LOAD_DE_PATH, pe, de, flights[agent, DE_BLOCKS]))
    return max(end_ns, charge_path(p, RELOAD_PATH, pe, de, missed // c.block_tokens))


@lean
def _send(p: Held[World], unit: int) -> int:
    m = machine_of(p)
    c = constants_of(p)
    rounds = rounds_of(p)
    flights = m.flights
    end_ns = m.counters[NOW]
    agent = m.units[U_CHUNK_HEAD, unit]
    while agent != NONE:
        blocks = -(-flights[agent, CHUNK_BSZ] // c.block_tokens)
        if flights[agent, CHUNK_CACHED] == rounds.hit[flights[agent, ROUND]]:
            blocks += flights[agent, PE_BLOCKS]
        sent_ns = charge_path(p, SEND_PATH, flights[agent, PE], flights[agent, DE], blocks)
        end_ns = max(end_ns, sent_ns)
        agent = flights[agent, NEXT_CHUNK]
    return end_ns


# 7. First token.


@lean
def computed(p: Held[World], unit: int) -> None:
    """The computation of a unit's pass is over."""
    m = machine_of(p)
    c = constants_of(p)
    rounds = rounds_of(p)
    flights, now_ns = m.flights, m.counters[NOW]
    agent = m.units[U_CHUNK_HEAD, unit]
    while agent != NONE:
        flights[agent, DONE] += flights[agent, CHUNK_BSZ]
        r = flights[agent, ROUND]
        if flights[agent, DONE] == rounds.prompt[r]:
            m.engines[QUEUE_HEAD, flights[agent, PE]] = flights[agent, NEXT_QUEUED]
            m.times[T_FIRST_TOKEN, r] = now_ns
        agent = flights[agent, NEXT_CHUNK]
    sent_ns = now_ns
    if c.resident and not c.oracle:
        sent_ns = _send(p, unit)
    if sent_ns > now_ns:
        push(m.heap, m.counters, sent_ns, SENT, unit)
    else:
        sent(p, unit)


@lean
def sent(p: Held[World], unit: int) -> None:
    """The KV of a unit's pass is at the DEs: the next pass can begin."""
    m = machine_of(p)
    rounds = rounds_of(p)
    agent = m.units[U_CHUNK_HEAD, unit]
    while agent != NONE:
        following = m.flights[agent, NEXT_CHUNK]
        if m.flights[agent, DONE] == rounds.prompt[m.flights[agent, ROUND]]:
            _prefilled(p, agent)
        agent = following
    start_pass(p, unit)


@lean
def _prefilled(p: Held[World], agent: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    rounds = rounds_of(p)
    s = scheduler_of(p)
    flights = m.flights
    r, pe, de = flights[agent, ROUND], flights[agent, PE], flights[agent, DE]
    prefill_done(s, agent)
    _over(p, pe, flights[agent, PE_TOKENS], 0)
    if not c.oracle:
        _give_back(p, pe, flights[agent, PE_BLOCKS])
        new_blocks = rounds.prompt[r] // c.block_tokens - rounds.hit[r] // c.block_tokens
        _persist(p, agent, de, new_blocks)
    if rounds.generated[r] == 1:
        m.times[T_DECODING, r] = m.times[T_SECOND_TOKEN, r] = m.times[T_FIRST_TOKEN, r]
        if not c.oracle:
            _give_back(p, de, flights[agent, PROMPT_BLOCKS])
        _finished(p, agent)
    else:
        filled_ns = m.counters[NOW]
        if not c.oracle:
            filled_ns = charge_path(p, FILL_PATH, de, de, flights[agent, PROMPT_BLOCKS])
        push(m.heap, m.counters, filled_ns + c.admission_ns, FILLED, agent)


# 8. Decode.


@lean
def filled(p: Held[World], agent: int) -> None:
    """A prompt's KV is in the DE's HBM."""
    m = machine_of(p)
    c = constants_of(p)
    if not c.oracle:
        _give_back(p, m.flights[agent, DE], m.flights[agent, PROMPT_BLOCKS])
    _decode(p, agent)


@lean
def _decode(p: Held[World], agent: int) -> None:
    m = machine_of(p)
    rounds = rounds_of(p)
    r = m.flights[agent, ROUND]
    m.times[T_DECODING, r] = m.counters[NOW]
    unit = m.prefill_units + m.engines[UNIT, m.flights[agent, DE]]
    second_ns = join_decode(p, unit, agent, rounds.prompt[r], rounds.generated[r])
    m.times[T_SECOND_TOKEN, r] = second_ns


@lean
def decode_ended(p: Held[World], number: int) -> None:
    """Rounds of a decode unit have got their last token."""
    m = machine_of(p)
    for position in range(end_decode(p, number)):
        _finished(p, m.ended[position])


# 9. Finish.


@lean
def _finished(p: Held[World], agent: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    rounds = rounds_of(p)
    s = scheduler_of(p)
    flights, now_ns = m.flights, m.counters[NOW]
    r, de = flights[agent, ROUND], flights[agent, DE]
    m.times[T_FINISHED, r] = now_ns
    m.counters[FINISHED] += 1
    finished(s, agent)
    _over(p, de, flights[agent, DE_TOKENS], flights[agent, DE_TOKENS])
    stored = rounds.prompt[r] + rounds.generated[r] - 1
    if not c.oracle:
        new_blocks = stored // c.block_tokens - rounds.prompt[r] // c.block_tokens
        _persist(p, agent, de, new_blocks)
    if c.tier_tokens:
        _tier_put(p, agent, stored)
    if r + 1 < rounds.first_round[agent + 1]:
        push(m.heap, m.counters, now_ns + rounds.delay_ns[r + 1], SUBMIT, r + 1)
    if rounds.waiting_for.size:
        _start_sub_agents(p, r)


@lean
def _start_sub_agents(p: Held[World], r: int) -> None:
    m = machine_of(p)
    rounds = rounds_of(p)
    place = np.searchsorted(rounds.waiting_for, r)
    while place < rounds.waiting_for.size and rounds.waiting_for[place] == r:
        agent = rounds.waiting_agent[place]
        first = rounds.first_round[agent]
        start_ns = m.counters[NOW] + rounds.start_ns[agent] + rounds.delay_ns[first]
        push(m.heap, m.counters, start_ns, SUBMIT, first)
        place += 1


@lean
def _persist(p: Held[World], agent: int, de: int, blocks: int) -> None:
    m = machine_of(p)
    stored_ns = charge_path(p, PERSIST_PATH, de, de, blocks)
    m.stored_ns[agent] = max(m.stored_ns[agent], stored_ns)


# The DRAM tier: ``reference.tier`` as a list of agents from the least recently used on.


@lean
def _tier_hit(p: Held[World], agent: int, hit_tokens: int) -> int:
    m = machine_of(p)
    held = m.flights[agent, TIER_TOKENS]
    if held <= 0:
        return 0
    _leave_tier(p, agent)
    _enter_tier(p, agent, held)
    return min(held, hit_tokens)


@lean
def _tier_put(p: Held[World], agent: int, tokens: int) -> None:
    m = machine_of(p)
    c = constants_of(p)
    if m.flights[agent, TIER_TOKENS] > 0:
        _leave_tier(p, agent)
    if tokens > c.tier_tokens:
        return
    _enter_tier(p, agent, tokens)
    while m.counters[TIER_USED] > c.tier_tokens:
        _leave_tier(p, m.counters[TIER_OLDEST])


@lean
def _enter_tier(p: Held[World], agent: int, tokens: int) -> None:
    m = machine_of(p)
    flights, counters = m.flights, m.counters
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
def _leave_tier(p: Held[World], agent: int) -> None:
    m = machine_of(p)
    flights, counters = m.flights, m.counters
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
