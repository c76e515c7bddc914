"""Everything a compiled handler may touch, handed down as one pointer."""

from typing import NamedTuple

from dualpath.sim.compiled.jit import Held, held, inlined
from dualpath.sim.compiled.machine_tables import Constants, Machine, Rounds
from dualpath.sim.compiled.tables import SchedulerState


class World(NamedTuple):
    """One run: the machine, the setup's numbers, the agents' rounds, the scheduler."""

    machine: Machine
    constants: Constants
    rounds: Rounds
    scheduler: SchedulerState


@inlined
def machine_of(p: Held[World]) -> Machine:
    """Return the machine's tables."""
    return held(p).machine


@inlined
def constants_of(p: Held[World]) -> Constants:
    """Return the setup's numbers."""
    return held(p).constants


@inlined
def rounds_of(p: Held[World]) -> Rounds:
    """Return the agents' rounds."""
    return held(p).rounds


@inlined
def scheduler_of(p: Held[World]) -> SchedulerState:
    """Return the scheduler's tables."""
    return held(p).scheduler
