"""Forward passes and the first token (stages 6 and 7 of the model)."""

from dualpath.model.sim.carried import fill_bytes, load_bytes, send_bytes
from dualpath.model.sim.compiled.batches import form_pass
from dualpath.model.sim.compiled.buffers import give_back_decode, give_back_prefill
from dualpath.model.sim.compiled.columns import (
    BATCHES,
    CHUNK_BSZ,
    COMPUTED,
    DE,
    DONE,
    FILLED,
    GENERATED,
    HIT,
    NONE,
    NOW,
    PE,
    PE_BLOCKS,
    PROMPT,
    QUEUE_HEAD,
    RECOMPUTED,
    SENT,
    T_DECODING,
    T_FIRST_TOKEN,
    T_PREFILL,
    T_SECOND_TOKEN,
    U_BUSY,
    U_CHUNK_HEAD,
)
from dualpath.model.sim.compiled.events import push
from dualpath.model.sim.compiled.finishing import count_out, finish, persist
from dualpath.model.sim.compiled.hits import first_at_prefill, hit_blocks
from dualpath.model.sim.compiled.jit import lean
from dualpath.model.sim.compiled.links import charge_path
from dualpath.model.sim.compiled.lookahead import fetch_chunks
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.compiled.scheduler import prefill_done
from dualpath.model.sim.derived import (
    FILL_PATH,
    LOAD_DE_PATH,
    LOAD_PE_PATH,
    PERSIST_PROMPT_PATH,
    RELOAD_PATH,
    SEND_PATH,
)
from dualpath.model.sim.rules import pass_end_ns, to_ns
from dualpath.plan.counts import chunk_blocks, new_full_blocks
from dualpath.policy.recompute import weight_tokens


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
        first_at_prefill(p, agent),
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
            first_at_prefill(p, agent),
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
    recomputed = flights[agent, RECOMPUTED]
    prefill_done(p.scheduler, agent)
    weight = weight_tokens(recomputed, p.scheduler.rules.computed_weight)
    count_out(p, pe, prompt + weight, 0)
    if not c.oracle:
        give_back_prefill(p, agent)
        new_blocks = new_full_blocks(flights[agent, HIT] + recomputed, prompt, c.block_tokens)
        persist(p, PERSIST_PROMPT_PATH, agent, de, new_blocks)
    if flights[agent, GENERATED] == 1:
        r = m.round_of[agent]
        m.times[r, T_DECODING] = m.times[r, T_SECOND_TOKEN] = m.times[r, T_FIRST_TOKEN]
        if not c.oracle:
            give_back_decode(p, agent)
        finish(p, agent)
    else:
        filled_ns = m.counters[NOW]
        if not c.oracle:
            prompt_bytes = fill_bytes(c.layer_kinds, prompt, c.block_tokens)
            filled_ns = charge_path(p, FILL_PATH, de, de, prompt_bytes)
        push(m.heap, m.counters, filled_ns + c.admission_ns, FILLED, agent)
