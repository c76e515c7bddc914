"""Online runs that Fig. 10, 11, 12 and Table 3 share."""

import msgspec

from dualpath.core.modes import Mode
from dualpath.model.evaluation.capacity import Sweep, sweep
from dualpath.model.evaluation.online import OnlineRun
from dualpath.model.evaluation.runs import Runs, agents_until
from dualpath.model.evaluation.settings import EvaluationSettings, RunSpec, System

WORKLOAD = "64K"
#: Most experiments that end by a rule have ended by then.
FIRST_LOOK_S = 3000.0
#: What every online figure says of how it was made.
METHOD = (
    "Poisson arrivals from an empty system, no tool delays. An experiment ends when the mean TTFT "
    "over a sliding 150 s exceeds 4 s, or is within 5 % of what it was 30 minutes before; numbers "
    "are means over the last 150 s."
)


def online_spec(
    settings: EvaluationSettings,
    system: System,
    mode: Mode,
    agents_per_s: float,
    nodes: tuple[int, int] | None = None,
    horizon_s: float | None = None,
) -> RunSpec:
    """Return an online experiment; agents arrive until ``horizon_s``, by default the settings'."""
    until_s = horizon_s or settings.horizon_s
    return RunSpec(
        system=system,
        mode=mode,
        workload=WORKLOAD,
        agents=agents_until(agents_per_s, until_s),
        nodes=nodes,
        agents_per_s=agents_per_s,
        until_s=until_s,
    )


def online(runs: Runs, system: System, mode: Mode, agents_per_s: float) -> OnlineRun:
    """Return one online experiment on the system's own cluster."""
    return runs.online(online_spec(runs.settings, system, mode, agents_per_s))


def rate_sweep(runs: Runs, system: System, mode: Mode) -> Sweep:
    """Return the rates of a system up to the first that misses the SLO, and its capacity."""
    return sweep(
        lambda rate: online(runs, system, mode, rate).meets_slo,
        runs.settings.aps_step(system),
        runs.settings.aps_limit(system),
        lambda rate: meets_slo(runs, online_spec(runs.settings, system, mode, rate)),
    )


def meets_slo(runs: Runs, spec: RunSpec) -> bool:
    """Return whether an experiment meets the SLO, simulating no more than its end takes to see.

    A run that is cut early has the same past: most end long before the horizon, which is there for
    agents to be followed to their own end.
    """
    assert spec.until_s is not None
    early = runs.online(msgspec.structs.replace(spec, until_s=min(FIRST_LOOK_S, spec.until_s)))
    return early.meets_slo if early.ending.rule != "horizon" else runs.online(spec).meets_slo
