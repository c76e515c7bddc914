"""Settings of the online experiment; this module imports no heavy dependencies."""

from typing import Annotated

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath.laboratory.experiments.settings import JctSettings


class OnlineSettings(Settings, frozen=True, kw_only=True):
    """Agents arrive (Poisson) for ``arrive_s`` on one cluster, at rates found by bisection.

    A rate meets the SLO if mean TTFT is at most ``ttft_slo_s`` and mean TPOT at most
    ``tpot_slo_s``.  ``agreeing_runs`` and ``most_runs`` apply to each mode's search
    (``model.evaluation.rate_search``).
    """

    jct: JctSettings = JctSettings(
        name="online", nodes=("1P2D",), mode=(Mode.BASIC, Mode.DUALPATH), repeat=1
    )
    first_agents_per_s: Annotated[
        float, Setting("rate at which the search begins by doubling or halving", gt=0, le=1e6)
    ] = 0.4
    least_agents_per_s: Annotated[float, Setting("lowest rate that is tried", gt=0, le=1e6)] = 0.05
    most_agents_per_s: Annotated[
        float, Setting("highest rate that is tried; KV is stored for its agents", gt=0, le=1e6)
    ] = 1.6
    precision: Annotated[
        float, Setting("relative width of the final bracket of the capacity", gt=0, le=1)
    ] = 0.1
    agreeing_runs: Annotated[
        int, Setting("runs that must agree on each end of the bracket", ge=1, le=9)
    ] = 2
    most_runs: Annotated[int, Setting("maximum of runs per mode", ge=1, le=1000)] = 16
    arrive_s: Annotated[float, Setting("time in which agents arrive", gt=0)] = 60.0
    ttft_slo_s: Annotated[float, Setting("limit of the mean TTFT", gt=0)] = 2.0
    tpot_slo_s: Annotated[float, Setting("limit of the mean TPOT", gt=0)] = 0.05

    def check(self) -> None:
        """Raise ``ConfigError`` for inconsistent rates, and for several clusters."""
        super().check()
        rates = (self.least_agents_per_s, self.first_agents_per_s, self.most_agents_per_s)
        if not rates[0] <= rates[1] <= rates[2]:
            raise ConfigError(
                f"{{first_agents_per_s}} is {rates[1]:g}, must be between {{least_agents_per_s}} "
                f"({rates[0]:g}) and {{most_agents_per_s}} ({rates[2]:g}); correct one of them"
            )
        if len(self.jct.nodes) != 1:
            raise ConfigError(
                f"{{nodes}} is {self.jct.nodes}; give one cluster for an online experiment"
            )
