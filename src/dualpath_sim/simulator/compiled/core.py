"""The compiled core: its main loop, and how a setup enters its tables and a result leaves them."""

import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.compiled.jit import cached, hold
from dualpath_sim.simulator.compiled.machine import look_ahead, pop
from dualpath_sim.simulator.compiled.rounds import (
    arrive,
    computed,
    decode_ended,
    fetch,
    filled,
    part_read,
    read,
    sent,
    start_pass,
    submit_round,
)
from dualpath_sim.simulator.compiled.tables import (
    ARRIVE,
    BATCHES,
    COMPUTED,
    DECISIONS,
    DECODE_END,
    FETCH,
    FILLED,
    FINISHED,
    HANDLED,
    HEAP_REST,
    HEAP_TIME,
    KIND_BITS,
    KIND_MASK,
    MOST_WINDOWS,
    NONE,
    NOW,
    NUMBER_SHIFT,
    PENDING,
    PUSHED,
    READ,
    READ_OVER,
    SENT,
    START_PASS,
    SUBJECT_MASK,
    SUBMIT,
    WINDOWS,
    Constants,
    MachineTables,
    Rounds,
    SchedulerState,
    World,
    constants,
    new_machine,
    new_scheduler,
    rounds,
    whole_ns,
)
from dualpath_sim.simulator.derived import cluster_layout, engine_specs, limits, scheduler_settings
from dualpath_sim.simulator.result import (
    Batches,
    Decisions,
    LinkUse,
    Progress,
    SimulationResult,
    TurnTimes,
)
from dualpath_sim.simulator.settings import Setup

#: Why the loop returned.
OVER, STOPPED, PAUSED, FULL = range(4)
#: Events between two calls of ``progress``; at most as many batches begin in between.
PAUSE_EVENTS = 20_000
NEVER_NS = 1 << 62


@cached
def run_events(
    machine: MachineTables,
    constants: Constants,
    rounds: Rounds,
    scheduler: SchedulerState,
    until_ns: int,
    most_events: int,
) -> int:
    """Handle events until none is left, the next is after ``until_ns``, or ``most_events`` are."""
    p = hold(World(machine, constants, rounds, scheduler))
    heap, counters = machine.heap, machine.counters
    room = heap.shape[0] - 3 * machine.flights.shape[0] - machine.units.shape[0] - 64
    for _ in range(most_events):
        if counters[PENDING] == 0:
            return OVER
        if counters[PENDING] > room:
            return FULL
        time_ns = heap[0, HEAP_TIME]
        if time_ns > until_ns:
            return STOPPED
        event = pop(heap, counters)
        look_ahead(p)
        counters[NOW] = time_ns
        counters[HANDLED] += 1
        kind, subject = event & KIND_MASK, event >> KIND_BITS & SUBJECT_MASK
        if kind == SUBMIT:
            submit_round(p, subject)
        elif kind == ARRIVE:
            arrive(p, subject)
        elif kind == FETCH:
            fetch(p)
        elif kind == READ:
            read(p, subject)
        elif kind == READ_OVER:
            part_read(p, subject)
        elif kind == START_PASS:
            start_pass(p, subject, False)
        elif kind == COMPUTED:
            computed(p, subject)
        elif kind == SENT:
            sent(p, subject)
        elif kind == FILLED:
            filled(p, subject)
        elif kind == DECODE_END:
            decode_ended(p, subject, event >> NUMBER_SHIFT)
    return PAUSED


def _push_starts(machine: MachineTables, columns: Rounds, agents: AgentTable) -> None:
    """Push the first rounds of all agents that wait for no other agent's round."""
    starting = np.flatnonzero(agents.start_after_round < 0)
    delays_s = columns.delay_s[columns.first_round[starting]]
    times_ns = columns.start_ns[starting] + whole_ns(delays_s)
    numbers = np.argsort(times_ns, kind="stable")
    # Rows in order are a heap.
    machine.heap[: starting.size, HEAP_TIME] = times_ns[numbers]
    machine.heap[: starting.size, HEAP_REST] = (
        numbers << NUMBER_SHIFT | starting[numbers] << KIND_BITS | SUBMIT
    )
    machine.counters[PENDING] = machine.counters[PUSHED] = starting.size


def run_compiled(
    setup: Setup,
    agents: AgentTable,
    *,
    record_decisions: bool,
    window_ns: int,
    until_ns: int | None,
    progress: Progress | None,
) -> SimulationResult:
    """Run until no event is left, or none up to ``until_ns``."""
    derived, layout = limits(setup), cluster_layout(setup.cluster)
    scheduler = new_scheduler(
        scheduler_settings(setup, derived),
        engine_specs(setup, derived, layout),
        agents.agents,
    )
    machine = new_machine(setup, agents, record_decisions=record_decisions)
    numbers, columns = constants(setup, window_ns), rounds(agents)
    _push_starts(machine, columns, agents)
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


def _with_room_for_batches(machine: MachineTables) -> MachineTables:
    """Return the machine with room for the batches of one call of the loop."""
    used = int(machine.counters[BATCHES])
    if used + PAUSE_EVENTS <= len(machine.batches):
        return machine
    more = max(len(machine.batches), PAUSE_EVENTS)
    return machine._replace(
        batches=np.concatenate([machine.batches, np.zeros((more, 4), np.int64)]),
        attention_s=np.concatenate([machine.attention_s, np.zeros((more, 2))]),
    )


def _with_room_for_events(machine: MachineTables) -> MachineTables:
    return machine._replace(heap=np.concatenate([machine.heap, np.zeros_like(machine.heap)]))


def _result(
    setup: Setup,
    agents: AgentTable,
    machine: MachineTables,
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
            f"{MOST_WINDOWS} are stored; raise window_s"
        )
    if stopped:
        _mark_unsubmitted(machine, agents)
    batches = int(counters[BATCHES])
    batch_rows, attention_s = machine.batches[:batches], machine.attention_s[:batches]
    return SimulationResult(
        setup=setup,
        agents=agents,
        turns=TurnTimes(*machine.times.T),
        batches=Batches(*batch_rows.T.copy(), *attention_s.T.copy()),
        links=LinkUse(numbers.window_ns, *(table[:windows].copy() for table in machine.use)),
        decisions=_decisions(machine) if record_decisions else None,
        end_ns=end_ns,
        stopped=stopped,
        events=int(counters[HANDLED]),
    )


def _mark_unsubmitted(machine: MachineTables, agents: AgentTable) -> None:
    """Set the times of rounds that were never submitted, which no event has set."""
    latest = np.repeat(machine.round_of, np.diff(agents.first_round))
    machine.times[np.arange(agents.rounds) > latest] = NONE


def _decisions(machine: MachineTables) -> Decisions:
    rows = machine.decisions[: int(machine.counters[DECISIONS])]
    wide = [rows[:, column].astype(np.int64) for column in range(5)]
    pe, de, read = (rows[:, column].astype(np.int8) for column in range(5, 8))
    cached = np.zeros((2, len(rows)), np.int64)
    return Decisions(wide[0], wide[1], wide[2], wide[3], wide[4], pe, de, read, *cached)
