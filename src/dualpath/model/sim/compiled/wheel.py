"""Which rounds of a decode unit end after which token: a wheel of lists, one per token.

Rounds end after whole tokens, and no two that are decoded together further apart than the longest
generation.  So every round enters and leaves at the same small cost, however many are decoded.
A place holds the number above the agent's that entered last, 0 for nobody.
"""

from dualpath.model.sim.compiled.columns import U_NEXT_END, U_REQUESTS, WHEEL_BLOCK
from dualpath.model.sim.compiled.jit import lean
from dualpath.model.sim.compiled.lookahead import fetch_next_round, fetch_rows
from dualpath.model.sim.compiled.machine_tables import World


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
