"""``simulate``: check the input, pick a core, run it."""

from collections.abc import Callable
from typing import Literal

from dualpath.core.agents import AgentTable
from dualpath.sim.result import SimulationResult
from dualpath.sim.settings import Setup

Core = Literal["compiled", "reference"]
Progress = Callable[[int, int, float], None]
"""Called now and then with (rounds finished, rounds in all, virtual seconds)."""


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

    Both cores give the same numbers to the last bit.  ``until_s`` stops the run at that virtual
    time.  Raises ``ConfigError`` for a setup that cannot be or cannot hold the largest round, and
    ``TraceError`` for rounds that cannot be or exceed the model's context limit.
    """
    raise NotImplementedError
