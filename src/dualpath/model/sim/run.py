"""``simulate``: check the input, pick a core, run it."""

import importlib
import importlib.util
from typing import Literal

from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.laboratory.workload.columns.agent_table import AgentTable
from dualpath.model.sim.derived import check
from dualpath.model.sim.reference.core import ReferenceCore
from dualpath.model.sim.result import Progress, SimulationResult
from dualpath.model.sim.rules import to_ns
from dualpath.model.sim.settings import Setup

Core = Literal["compiled", "reference"]


def simulate(
    setup: Setup,
    agents: AgentTable,
    *,
    core: Core = "compiled",
    record_decisions: bool = False,
    until_s: float | None = None,
    window_s: float = 1.0,
    progress: Progress | None = None,
) -> SimulationResult:
    """Run ``agents`` on the simulated cluster and return every round's times.

    Both cores give the same numbers to the last bit; only the reference core lets nodes change
    their role (``ClusterSettings.rebalancing``).  ``until_s`` stops the run at that virtual
    time.  Raises ``ConfigError`` for a setup that cannot be or cannot hold the largest round, and
    ``TraceError`` for rounds that cannot be or exceed the model's context limit.
    """
    check(setup, agents)
    if not window_s > 0:
        raise ConfigError(f"window_s is {window_s}, must be above 0; leave it at 1")
    until_ns = None if until_s is None else to_ns(until_s)
    if core == "reference":
        reference = ReferenceCore(
            setup, agents, record_decisions=record_decisions, window_ns=to_ns(window_s)
        )
        return reference.run(until_ns, progress)
    if setup.cluster.rebalancing is not None:
        raise ConfigError(
            "rebalancing is set, but core is 'compiled', whose nodes keep their roles; "
            "use core='reference' or leave rebalancing out"
        )
    if importlib.util.find_spec("numba") is None:
        raise ConfigError(
            "the compiled core needs numba, which is not installed; "
            f"{extra('simulate').remedy}, or use the reference core"
        )
    # Imported here, since compiling costs seconds and numba is optional.
    compiled_core = importlib.import_module("dualpath.model.sim.compiled.core")
    result: SimulationResult = compiled_core.run_compiled(
        setup,
        agents,
        record_decisions=record_decisions,
        window_ns=to_ns(window_s),
        until_ns=until_ns,
        progress=progress,
    )
    return result
