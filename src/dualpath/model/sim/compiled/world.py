"""Everything a compiled handler may touch."""

from typing import NamedTuple

from dualpath.model.sim.compiled.constants import Constants, Rounds
from dualpath.model.sim.compiled.machine_tables import MachineTables
from dualpath.model.sim.compiled.tables import SchedulerState


class World(NamedTuple):
    """One run: the machine, the setup's numbers, the agents' rounds, the scheduler."""

    machine: MachineTables
    constants: Constants
    rounds: Rounds
    scheduler: SchedulerState
