"""The large runs of §7.6, which Fig. 15 and Table 3 share."""

from dualpath.core.modes import Mode
from dualpath.model.evaluation.offline import OfflineRun
from dualpath.model.evaluation.runs import Runs
from dualpath.model.evaluation.settings import DS_660B, RunSpec

PREFILL_NODES, DECODE_NODES = 2, 4
#: The online run of §7.6 has 22 times 2P4D and its rate.
ONLINE_SCALE_UP = 22


def small_spec(runs: Runs) -> RunSpec:
    """2P4D with 2K agents, at the length that is read into Table 3."""
    length, agents = runs.calibration.table3_length, runs.settings.offline_agents[-1]
    return RunSpec(system=DS_660B, mode=Mode.DUALPATH, workload=length, agents=agents)


def large_spec(runs: Runs) -> RunSpec:
    """48P96D with 48K agents: 24 times the small one."""
    factor = runs.settings.scale_up
    return RunSpec(
        system=DS_660B,
        mode=Mode.DUALPATH,
        workload=runs.calibration.table3_length,
        agents=factor * runs.settings.offline_agents[-1],
        nodes=(factor * PREFILL_NODES, factor * DECODE_NODES),
    )


def large_offline(runs: Runs) -> OfflineRun:
    """Return the large offline run."""
    return runs.offline(large_spec(runs))
