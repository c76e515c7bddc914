"""Everything a compiled handler may touch."""

from typing import NamedTuple

from dualpath.sim.compiled.constants import Constants, Rounds
from dualpath.sim.compiled.machine_tables import Machine
from dualpath.sim.compiled.tables import SchedulerState


class World(NamedTuple):
    """One run: the machine, the setup's numbers, the agents' rounds, the scheduler."""

    machine: Machine
    constants: Constants
    rounds: Rounds
    scheduler: SchedulerState
