"""From a client's submission to an assignment at both engines (stages 1 to 3 of the model)."""

from dualpath.core.blocks import holding_blocks
from dualpath.model.sim.compiled.buffers import reserve
from dualpath.model.sim.compiled.columns import (
    ARRIVE,
    DE,
    DE_KEPT,
    DE_READ,
    DECISIONS,
    DIRTY,
    FETCH,
    FETCH_DUE,
    FREE,
    GENERATED,
    HIT,
    K_BLOCKS,
    NONE,
    NOW,
    PE,
    PE_KEPT,
    PE_READ,
    PROMPT,
    PROMPT_BLOCKS,
    READ_TOKENS,
    RECOMPUTED,
    REQUESTS,
    T_ASSIGNED,
    T_GRANTED,
    T_SUBMITTED,
    TOKENS,
)
from dualpath.model.sim.compiled.events import push
from dualpath.model.sim.compiled.hits import count_blocks
from dualpath.model.sim.compiled.jit import lean
from dualpath.model.sim.compiled.ledger import report
from dualpath.model.sim.compiled.links import node_at
from dualpath.model.sim.compiled.lookahead import fetch_assigned
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.compiled.reading import loaded
from dualpath.model.sim.compiled.scheduler import fetch_decode, fetch_prefill, keep, submit
from dualpath.model.sim.compiled.tables import (
    A_DE,
    A_DE_KEPT,
    A_DE_READ,
    A_DE_REASON,
    A_PE,
    A_PE_KEPT,
    A_PE_READ,
    A_PE_REASON,
    A_READ_REASON,
    A_RECOMPUTE,
    A_REQUEST,
    LENGTH,
    UNASSIGNED,
)
from dualpath.model.sim.rules import first_group, next_multiple_ns
from dualpath.policy.accounts import LAST_SEQ
from dualpath.policy.recompute import weight_tokens


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
    m, c, columns = p.machine, p.constants, p.rounds
    flights = m.flights
    r = m.round_of[agent]
    prompt, hit, generated = columns.prompt[r], columns.hit[r], columns.generated[r]
    flights[agent, PROMPT] = prompt
    flights[agent, HIT] = hit
    flights[agent, GENERATED] = generated
    submit(p.scheduler, agent, prompt, hit, generated)
    if c.keeps:
        for engine in range(m.engines.shape[0]):
            kept = m.kept[node_at(p, engine), agent, K_BLOCKS]
            keep(p.scheduler, agent, engine, min(kept * c.block_tokens, hit))
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
                s.engines[LAST_SEQ, engine],
                engines[engine, REQUESTS],
                engines[engine, TOKENS],
                engines[engine, READ_TOKENS],
                engines[engine, FREE],
            )


@lean
def _take(p: World, row: int) -> None:
    """Count an assignment in at both engines and reserve its buffers."""
    m, s = p.machine, p.scheduler
    assigned, flights, engines = s.assigned, m.flights, m.engines
    agent = assigned[row, A_REQUEST]
    pe, de = assigned[row, A_PE], assigned[row, A_DE]
    pe_read, de_read = assigned[row, A_PE_READ], assigned[row, A_DE_READ]
    pe_tokens, de_tokens = s.requests[agent, LENGTH], s.requests[agent, LENGTH + 1]
    recomputed = assigned[row, A_RECOMPUTE]
    flights[agent, RECOMPUTED] = recomputed
    flights[agent, HIT] -= recomputed
    flights[agent, PE], flights[agent, DE] = pe, de
    flights[agent, PE_READ], flights[agent, DE_READ] = pe_read, de_read
    flights[agent, PE_KEPT] = assigned[row, A_PE_KEPT]
    flights[agent, DE_KEPT] = assigned[row, A_DE_KEPT]
    for engine, tokens, read in ((pe, pe_tokens, pe_read), (de, de_tokens, de_read)):
        engines[engine, REQUESTS] += 1
        engines[engine, TOKENS] += tokens
        engines[engine, READ_TOKENS] += read
        engines[engine, DIRTY] = 1
    engines[pe, TOKENS] += weight_tokens(recomputed, s.rules.computed_weight)
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
    decisions[decision, 8] = assigned[row, A_PE_KEPT]
    decisions[decision, 9] = assigned[row, A_DE_KEPT]


@lean
def _assigned(p: World, agent: int) -> None:
    m, c = p.machine, p.constants
    flights, now_ns = m.flights, m.counters[NOW]
    r = m.round_of[agent]
    count_blocks(p, agent)
    flights[agent, PROMPT_BLOCKS] = holding_blocks(flights[agent, PROMPT], c.block_tokens)
    m.times[r, T_ASSIGNED] = now_ns
    if c.oracle:
        m.times[r, T_GRANTED] = now_ns
        loaded(p, agent)
        return
    reserve(p, node_at(p, flights[agent, DE]), agent)
