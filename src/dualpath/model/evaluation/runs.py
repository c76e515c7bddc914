"""Runs on demand, each made once: figures ask for a specification and get its reduced numbers."""

import math
from collections.abc import Callable
from typing import Protocol

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.columns.agent_table import AgentTable
from dualpath.model.evaluation.calibration import AS_WRITTEN, Calibration
from dualpath.model.evaluation.offline import OfflineRun, offline_run
from dualpath.model.evaluation.online import OnlineRun, online_run
from dualpath.model.evaluation.settings import EvaluationSettings, RunSpec
from dualpath.model.sim.result import SimulationResult
from dualpath.model.sim.settings import Setup

#: Agent tables kept: the modes of one comparison follow each other and share one.
_TABLES_KEPT = 2


class Inputs(Protocol):
    """Where clusters, models and workloads come from."""

    def setup(self, spec: RunSpec) -> Setup:
        """Return cluster, model costs and mode of a run."""

    def agents(self, spec: RunSpec, seed: int) -> AgentTable:
        """Return the run's agents, arrivals included."""


class Simulate(Protocol):
    """``sim.run.simulate`` with a core chosen."""

    def __call__(
        self, setup: Setup, agents: AgentTable, *, until_s: float | None, window_s: float
    ) -> SimulationResult:
        """Run the agents."""


OnRun = Callable[[RunSpec], None]
"""Called with every run before it is made."""


class Runs:
    """Owns the numbers of all runs made so far, and makes the others."""

    def __init__(
        self,
        settings: EvaluationSettings,
        inputs: Inputs,
        simulate: Simulate,
        on_run: OnRun = lambda spec: None,
        calibration: Calibration = AS_WRITTEN,
    ) -> None:
        """Make no run yet."""
        self.settings = settings
        self.calibration = calibration
        self._inputs = inputs
        self._simulate = simulate
        self._on_run = on_run
        self._offline: dict[RunSpec, OfflineRun] = {}
        self._online: dict[RunSpec, OnlineRun] = {}
        self._tables: dict[tuple[object, ...], AgentTable] = {}

    def setup(self, spec: RunSpec) -> Setup:
        """Return the setup of a run without making it."""
        return self._inputs.setup(spec)

    def offline(self, spec: RunSpec) -> OfflineRun:
        """Return the numbers of a run whose agents start all at once."""
        if spec not in self._offline:
            self._offline[spec] = offline_run(self.result(spec), self.settings)
        return self._offline[spec]

    def online(self, spec: RunSpec) -> OnlineRun:
        """Return the numbers of a run whose agents arrive until ``spec.until_s``."""
        if spec.agents_per_s is None or spec.until_s is None:
            raise ConfigError(f"{spec.title}: an online run needs a rate and an end; give both")
        if spec not in self._online:
            self._online[spec] = online_run(self.result(spec), spec.until_s)
        return self._online[spec]

    def agents(self, spec: RunSpec) -> AgentTable:
        """Return the agents of a run, the same for every mode and cluster."""
        key = (
            spec.workload,
            spec.agents,
            spec.append_scale,
            spec.generation_scale,
            spec.agents_per_s,
            spec.generator,
            spec.unseen_generation,
        )
        if key not in self._tables:
            while len(self._tables) >= _TABLES_KEPT:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = self._inputs.agents(spec, self.settings.seed)
        return self._tables[key]

    def result(self, spec: RunSpec) -> SimulationResult:
        """Make a run and return all of it; it is not kept."""
        self._on_run(spec)
        result = self._simulate(
            self._inputs.setup(spec),
            self.agents(spec),
            until_s=spec.until_s,
            window_s=self.settings.window_s,
        )
        if spec.until_s is None and result.stopped:
            raise ConfigError(f"{spec.title}: the run ended with rounds unfinished; raise its end")
        return result


def agents_until(agents_per_s: float, until_s: float) -> int:
    """Return a number of Poisson arrivals that practically surely lasts for ``until_s``."""
    mean = agents_per_s * until_s
    return math.ceil(mean + 6 * math.sqrt(mean)) + 1
