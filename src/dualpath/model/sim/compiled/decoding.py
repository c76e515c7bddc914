"""Decode units in virtual token time (stage 8 of the model; the reference's decode)."""

from dualpath.model.sim.compiled.buffers import give_back_decode
from dualpath.model.sim.compiled.columns import (
    DE,
    DECODE_END,
    GENERATED,
    NOW,
    PROMPT,
    T_DECODING,
    T_SECOND_TOKEN,
    U_CONTEXT,
    U_COUNT,
    U_EXPECTED,
    U_NEXT_END,
    U_REQUESTS,
    U_SINCE,
    U_STEP_NS,
    U_WINDOW,
    UNIT,
)
from dualpath.model.sim.compiled.events import push
from dualpath.model.sim.compiled.finishing import finish
from dualpath.model.sim.compiled.jit import lean
from dualpath.model.sim.compiled.machine_tables import World
from dualpath.model.sim.compiled.wheel import enter_wheel, leave_wheel, turn_wheel
from dualpath.model.sim.rules import (
    decode_context_tokens,
    decode_step_ns,
    joining_step,
    seen_tokens,
    steps_ns,
)


@lean
def filled(p: World, agent: int) -> None:
    """A prompt's KV is in the DE's HBM."""
    if not p.constants.oracle:
        give_back_decode(p, agent)
    _decode(p, agent)


@lean
def _decode(p: World, agent: int) -> None:
    """Let an agent's round decode its second token onwards."""
    m = p.machine
    flights, units, now_ns = m.flights, m.units, m.counters[NOW]
    r, generated = m.round_of[agent], flights[agent, GENERATED]
    unit = m.prefill_units + m.engines[flights[agent, DE], UNIT]
    _advance(p, unit)
    tokens = m.unit_tokens[unit]
    first = joining_step(tokens)
    enter_wheel(p, unit, agent, first + generated - 1)
    _count(p, unit, agent, 1)
    _expect_next(p, unit)
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
    _advance(p, unit)
    unit_tokens[unit] = max(unit_tokens[unit], float(units[unit, U_NEXT_END]))
    count = 0
    while units[unit, U_REQUESTS] and float(units[unit, U_NEXT_END]) <= unit_tokens[unit]:
        ending = leave_wheel(p, unit, count)
        for position in range(count, ending):
            _count(p, unit, ended[position], -1)
        count = ending
        if units[unit, U_REQUESTS]:
            turn_wheel(p, unit)
    _expect_next(p, unit)
    for position in range(count):
        finish(p, ended[position])


@lean
def _advance(p: World, unit: int) -> None:
    units, now_ns = p.machine.units, p.machine.counters[NOW]
    if units[unit, U_REQUESTS]:
        elapsed_ns = now_ns - units[unit, U_SINCE]
        p.machine.unit_tokens[unit] += elapsed_ns / units[unit, U_STEP_NS]
    units[unit, U_SINCE] = now_ns


@lean
def _count(p: World, unit: int, agent: int, sign: int) -> None:
    units, flights = p.machine.units, p.machine.flights
    context = decode_context_tokens(flights[agent, PROMPT], flights[agent, GENERATED])
    units[unit, U_REQUESTS] += sign
    units[unit, U_CONTEXT] += sign * context
    units[unit, U_WINDOW] += sign * seen_tokens(context, p.constants.decode_window_tokens)


@lean
def _expect_next(p: World, unit: int) -> None:
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
