"""The compiled core: the main loop, and the way in and out of its tables."""

import numba
import numpy as np

from dualpath.core.agents import AgentTable
from dualpath.core.errors import ConfigError
from dualpath.sim.compiled.events import pop, push
from dualpath.sim.compiled.jit import hold
from dualpath.sim.compiled.links import end_equal
from dualpath.sim.compiled.machine_tables import (
    ARRIVE,
    BATCHES,
    COMPUTED,
    DECISIONS,
    DECODE_END,
    FETCH,
    FILLED,
    FINISHED,
    HANDLED,
    HEAP_TIME,
    KIND_BITS,
    MOST_WINDOWS,
    NOW,
    PENDING,
    READ,
    READ_OVER,
    SENT,
    SNIC_END,
    START_PASS,
    SUBMIT,
    TIER_HITS,
    TIER_LOADED,
    WINDOWS,
    Constants,
    Machine,
    Rounds,
    constants,
    new_machine,
    rounds,
)
from dualpath.sim.compiled.rounds import (
    arrive,
    computed,
    decode_ended,
    fetch,
    filled,
    part_loaded,
    part_read,
    read,
    sent,
    start_pass,
    submit_round,
)
from dualpath.sim.compiled.tables import SchedulerState, new_scheduler
from dualpath.sim.compiled.world import World
from dualpath.sim.derived import limits
from dualpath.sim.layout import cluster_layout
from dualpath.sim.progress import Progress
from dualpath.sim.result import Batches, Decisions, LinkUse, SimulationResult, TurnTimes
from dualpath.sim.scheduling import engine_specs, scheduler_settings
from dualpath.sim.settings import Setup

#: Why the loop came back.
OVER, STOPPED, PAUSED, FULL = range(4)
#: Events between two signs of life; so few batches at most begin meanwhile.
PAUSE_EVENTS = 20_000
NEVER_NS = 1 << 62


@numba.njit(cache=True, _nrt=False)
def run_events(
    machine: Machine,
    constants: Constants,
    rounds: Rounds,
    scheduler: SchedulerState,
    until_ns: int,
    most_events: int,
) -> int:
    """Handle events until there are none, the next is too late, or it is time for a pause."""
    p = hold(World(machine, constants, rounds, scheduler))
    heap, counters = machine.heap, machine.counters
    room = heap.shape[0] - 3 * machine.flights.shape[0] - machine.units.shape[1] - 64
    for _ in range(most_events):
        if counters[PENDING] == 0:
            return OVER
        if counters[PENDING] > room:
            return FULL
        time_ns = heap[0, HEAP_TIME]
        if time_ns > until_ns:
            return STOPPED
        payload = pop(heap, counters)
        counters[NOW] = time_ns
        counters[HANDLED] += 1
        kind, number = payload & ((1 << KIND_BITS) - 1), payload >> KIND_BITS
        if kind == SUBMIT:
            submit_round(p, number)
        elif kind == ARRIVE:
            arrive(p, number)
        elif kind == FETCH:
            fetch(p)
        elif kind == READ:
            read(p, number)
        elif kind == READ_OVER:
            part_read(p, number)
        elif kind == SNIC_END:
            end_equal(p, number)
        elif kind == TIER_LOADED:
            part_loaded(p, number)
        elif kind == START_PASS:
            start_pass(p, number)
        elif kind == COMPUTED:
            computed(p, number)
        elif kind == SENT:
            sent(p, number)
        elif kind == FILLED:
            filled(p, number)
        elif kind == DECODE_END:
            decode_ended(p, number)
    return PAUSED


@numba.njit(cache=True, _nrt=False)
def push_starts(machine: Machine, rounds: Rounds, waits: np.ndarray) -> None:  # type: ignore[type-arg]  # numba's own view
    """Let every agent that waits for nobody submit its first round."""
    for agent in range(rounds.start_ns.size):
        if not waits[agent]:
            first = rounds.first_round[agent]
            start_ns = rounds.start_ns[agent] + rounds.delay_ns[first]
            push(machine.heap, machine.counters, start_ns, SUBMIT, first)


def run_compiled(
    setup: Setup,
    agents: AgentTable,
    *,
    record_decisions: bool,
    window_ns: int,
    until_ns: int | None,
    progress: Progress | None,
) -> SimulationResult:
    """Run until nothing is left to happen, or nothing before ``until_ns``."""
    derived, layout = limits(setup), cluster_layout(setup.cluster)
    scheduler = new_scheduler(
        scheduler_settings(setup, derived),
        engine_specs(setup, derived, layout),
        agents.agents,
    )
    machine = new_machine(setup, agents, record_decisions=record_decisions)
    numbers, columns = constants(setup, window_ns), rounds(agents)
    push_starts(machine, columns, agents.start_after_round >= 0)
    last_ns = NEVER_NS if until_ns is None else until_ns
    while True:
        machine = _with_room_for_batches(machine)
        why = run_events(machine, numbers, columns, scheduler, last_ns, PAUSE_EVENTS)
        if why == FULL:
            machine = _with_room_for_events(machine)
        elif why != PAUSED:
            break
        elif progress is not None:
            counters = machine.counters
            progress(int(counters[FINISHED]), agents.rounds, int(counters[NOW]) / 1e9)
    return _result(setup, agents, machine, numbers, why == STOPPED, record_decisions)


def _with_room_for_batches(machine: Machine) -> Machine:
    """Return the machine with room for the batches of one call of the loop."""
    used = int(machine.counters[BATCHES])
    if used + PAUSE_EVENTS <= len(machine.batches):
        return machine
    more = max(len(machine.batches), PAUSE_EVENTS)
    return machine._replace(
        batches=np.concatenate([machine.batches, np.zeros((more, 4), np.int64)]),
        attention_s=np.concatenate([machine.attention_s, np.zeros((more, 2))]),
    )


def _with_room_for_events(machine: Machine) -> Machine:
    return machine._replace(heap=np.concatenate([machine.heap, np.zeros_like(machine.heap)]))


def _result(
    setup: Setup,
    agents: AgentTable,
    machine: Machine,
    numbers: Constants,
    stopped: bool,
    record_decisions: bool,
) -> SimulationResult:
    counters = machine.counters
    end_ns = int(counters[NOW])
    windows = max(int(counters[WINDOWS]), -(-end_ns // numbers.window_ns))
    if windows > MOST_WINDOWS:
        raise ConfigError(
            f"the run lasts {windows} windows of {numbers.window_ns / 1e9:g} s, at most "
            f"{MOST_WINDOWS} are kept; raise window_s"
        )
    batches = int(counters[BATCHES])
    batch_rows, attention_s = machine.batches[:batches], machine.attention_s[:batches]
    return SimulationResult(
        setup=setup,
        agents=agents,
        turns=TurnTimes(*machine.times),
        batches=Batches(
            *(np.ascontiguousarray(batch_rows[:, column]) for column in range(4)),
            *(np.ascontiguousarray(attention_s[:, column]) for column in range(2)),
        ),
        links=LinkUse(numbers.window_ns, *(table[:windows].copy() for table in machine.use)),
        decisions=_decisions(machine) if record_decisions else None,
        end_ns=end_ns,
        stopped=stopped,
        events=int(counters[HANDLED]),
        dram_tier_hit_tokens=int(counters[TIER_HITS]),
    )


def _decisions(machine: Machine) -> Decisions:
    rows = machine.decisions[: int(machine.counters[DECISIONS])]
    wide = [rows[:, column].astype(np.int64) for column in range(5)]
    narrow = [rows[:, column].astype(np.int8) for column in range(5, 8)]
    return Decisions(wide[0], wide[1], wide[2], wide[3], wide[4], *narrow)
