"""``simulate``: check the input, pick a core, run it."""

import importlib
import importlib.util
import sys
from typing import Literal

from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.derived import check
from dualpath_sim.simulator.reference.core import ReferenceCore
from dualpath_sim.simulator.result import Progress, SimulationResult
from dualpath_sim.simulator.rules import to_ns
from dualpath_sim.simulator.settings import ClusterSettings, Setup

Core = Literal["auto", "compiled", "reference"]

#: Up to so many rounds ``auto`` takes the reference core.  For 10,244 rounds of DualPath on 2P4D
#: (70 agents, 64K, DS 660B, seed 0) either core was measured to take 1.4 CPU-s, the compiled one
#: for importing numba and loading its cached code.  Compiling takes half a minute, once on a
#: machine.
SMALL_RUN_ROUNDS = 10_000
_COMPILED_CORE = "dualpath_sim.simulator.compiled.core"


def simulate(
    setup: Setup,
    agents: AgentTable,
    *,
    core: Core = "auto",
    record_decisions: bool = False,
    until_s: float | None = None,
    window_s: float = 1.0,
    progress: Progress | None = None,
) -> SimulationResult:
    """Run ``agents`` on the simulated cluster and return every round's times.

    Both cores give the same numbers to the last bit.  The compiled core knows the paper's system
    alone; ``auto`` takes it for large runs where numba is installed, for small ones as well where
    an earlier run has loaded it, and the reference core otherwise.  ``until_s`` stops the run at
    that virtual time.  Raises ``ConfigError`` for an impossible setup, one that cannot hold the
    largest round, and one that the chosen core does not know; ``TraceError`` for impossible rounds
    and those that exceed the model's context limit.
    """
    check(setup, agents)
    if not window_s > 0:
        raise ConfigError(f"window_s is {window_s}, must be above 0; leave it at 1")
    until_ns = None if until_s is None else to_ns(until_s)
    if core == "compiled":
        check_compiled(setup.cluster)
    elif core == "reference" or not _compiles(setup.cluster, agents.rounds):
        reference = ReferenceCore(
            setup, agents, record_decisions=record_decisions, window_ns=to_ns(window_s)
        )
        return reference.run(until_ns, progress)
    # Imported here, since importing numba takes a second and compiling longer.
    compiled_core = importlib.import_module(_COMPILED_CORE)
    result: SimulationResult = compiled_core.run_compiled(
        setup,
        agents,
        record_decisions=record_decisions,
        window_ns=to_ns(window_s),
        until_ns=until_ns,
        progress=progress,
    )
    return result


def check_compiled(cluster: ClusterSettings | None = None) -> None:
    """Raise ``ConfigError`` if the compiled core cannot run here, or not on this cluster."""
    if not _numba_is_installed():
        raise ConfigError(
            f"{{core}} compiled needs numba, which is not installed; {extra('simulate').remedy}, "
            "or use {core} reference, which is slower and gives the same numbers"
        )
    if cluster is not None and (unknown := cluster.beyond_the_paper):
        raise ConfigError(
            f"{', '.join(f'{{{name}}}' for name in unknown)} is set, which {{core}} compiled does "
            "not know: it plays the paper's system alone; leave {core} at auto or use "
            "{core} reference"
        )


def _compiles(cluster: ClusterSettings, rounds: int) -> bool:
    """Return whether the compiled core knows a run and is faster, loading it included."""
    if cluster.beyond_the_paper or not _numba_is_installed():
        return False
    return rounds > SMALL_RUN_ROUNDS or _COMPILED_CORE in sys.modules


def _numba_is_installed() -> bool:
    return importlib.util.find_spec("numba") is not None
