"""How to divide N nodes into prefill and decode nodes (§8.1): simulate the shapes, take the best.

The objective is the JCT of all agents at once, or the highest arrival rate of agents with TTFT and
TPOT within an SLO.  The rate is found by bisection; each experiment ends by the rule of
§7.4 and is judged by the means of its last window, as in ``runs``.

Up to ``PlanSettings.most_shapes`` shapes, every one is tried.  Of more, evenly spread shapes are
tried first, then ever closer ones around the best so far: apart from noise, the objective over P
has one peak.  Nothing here is random: agents are the caller's and the same for every shape.
"""

import math
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from dualpath.core.cluster import ClusterShape, Role
from dualpath.core.errors import ConfigError, DualPathError
from dualpath.plan.bounds import prefill_to_decode_range
from dualpath.plan.movements import Replicas
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.catalog.costs import hbm_for_kv_bytes, sharing
from dualpath_sim.catalog.geometry import ModelGeometry
from dualpath_sim.catalog.gpu import GpuRates
from dualpath_sim.evaluation.comparison import RunSummary, summarise
from dualpath_sim.evaluation.runs import TTFT_LIMIT_S, ending, measured
from dualpath_sim.evaluation.serving import RateSearch, within
from dualpath_sim.evaluation.settings import PlanSettings
from dualpath_sim.simulator.result import NS_PER_S, SimulationResult
from dualpath_sim.simulator.settings import ClusterSettings, Setup

#: Rates below this count as no capacity.
LEAST_RATE = 1e-4


class ShapeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One P:D.

    ``jct_s`` or ``agents_per_s`` by the objective, None where ``refusal`` names why the shape
    is impossible.  ``binds`` is of the run at the objective; ``slo`` names what is missed just
    above the capacity ("TTFT", "TPOT", "nothing answered").  ``bottleneck_free`` is Eq. 9.
    """

    prefill_nodes: int
    decode_nodes: int
    jct_s: float | None = None
    agents_per_s: float | None = None
    summary: RunSummary | None = None
    slo: str = ""
    bottleneck_free: bool = False
    runs: int = 0
    refusal: str = ""

    @property
    def binds(self) -> str:
        """What binds in the run at the objective."""
        return self.summary.binds if self.summary else ""

    @property
    def score(self) -> float:
        """Higher is better."""
        if self.jct_s is not None:
            return -self.jct_s
        return self.agents_per_s if self.agents_per_s is not None else -math.inf


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All shapes tried, by P; ``ratio_range`` is Eq. 9's smallest and largest P/D."""

    settings: PlanSettings
    shapes: tuple[ShapeResult, ...]
    best: ShapeResult
    ratio_range: tuple[float, float]


class Simulate(Protocol):
    """The part of ``sim.run.simulate`` that is used."""

    def __call__(
        self, setup: Setup, agents: AgentTable, *, until_s: float | None = None
    ) -> SimulationResult:
        """Run and return every round's times."""


SetupFor = Callable[[int, int], Setup]
"""(P, D) to a setup, with its own model costs, since those of experts depend on the shape."""
AgentsFor = Callable[[float | None], AgentTable]
"""Agents per second, None for all at once, to the agents of one run."""
Progress = Callable[[str], None]


def make_plan(
    settings: PlanSettings,
    setup_for: SetupFor,
    agents_for: AgentsFor,
    simulate: Simulate,
    progress: Progress = lambda text: None,
) -> Plan:
    """Search the shapes of ``settings.total_nodes`` nodes and return all that were tried.

    Raises ``ConfigError`` for settings out of range, and the first refusal (``DualPathError``)
    if no shape can be.
    """
    search = _Search(settings, setup_for, agents_for, simulate, progress)
    for prefill_nodes in _spread_shapes(settings):
        search.try_shape(prefill_nodes)
    step = _first_step(settings)
    while step > 1:
        step = -(-step // 2)
        centre = search.best().prefill_nodes
        for prefill_nodes in (centre - step, centre + step):
            search.try_shape(prefill_nodes)
    return search.plan()


def reshaped(
    cluster: ClusterSettings,
    prefill_nodes: int,
    decode_nodes: int,
    weights: tuple[ModelGeometry, GpuRates] | None,
) -> ClusterSettings:
    """Return the cluster with another P and D.

    Where experts are spread over fewer or more GPUs than in ``cluster``, its HBM for KV changes
    by what the weights then take less or more; ``weights`` None leaves it.  Raises ``ConfigError``
    if the weights leave none.
    """
    shape = msgspec.structs.replace(cluster, prefill_nodes=prefill_nodes, decode_nodes=decode_nodes)
    if weights is None:
        return shape
    room = {}
    for role in Role:
        before = hbm_for_kv_bytes(*weights, sharing(cluster, role))
        after = hbm_for_kv_bytes(*weights, sharing(shape, role))
        name = f"{role}_hbm_bytes"
        room[name] = getattr(cluster, name) + after - before
        if room[name] <= 0:
            raise ConfigError(
                f"weights over {sharing(shape, role).experts} GPUs leave no HBM for KV at the "
                f"{role} engines; give the role more nodes"
            )
    return msgspec.structs.replace(
        shape,
        prefill_hbm_bytes=room["prefill_hbm_bytes"],
        decode_hbm_bytes=room["decode_hbm_bytes"],
    )


def link_shape(cluster: ClusterSettings, replicas: Replicas) -> ClusterShape:
    """Return the cluster in the symbols of §4.2; ``replicas`` of KV among an engine's GPUs."""
    return ClusterShape(
        prefill_nodes=cluster.prefill_nodes,
        decode_nodes=cluster.decode_nodes,
        gpus_per_node=cluster.gpus_per_node,
        cnic_bytes_per_s=cluster.cnic_bytes_per_s,
        snic_ratio=cluster.snic_bytes_per_s / cluster.cnic_bytes_per_s,
        dram_bytes_per_s=cluster.dram_bytes_per_s,
        prefill_replicas=replicas.prefill_loads,
        decode_replicas=replicas.decode,
    )


def broken_slo(result: SimulationResult, settings: PlanSettings) -> str:
    """Return what an online run breaks: "TTFT", "TPOT", "nothing answered", or "" for nothing."""
    turns = result.turns
    answered = turns.first_token_ns >= 0
    if not answered.any():
        return "nothing answered"
    first_s = turns.first_token_ns / NS_PER_S
    ttft_s = result.ttft_s()
    # The rule's limit is the paper's; in units of the SLO it is the caller's, and variation stays.
    scale = TTFT_LIMIT_S / settings.ttft_slo_s
    end = ending(first_s[answered], ttft_s[answered] * scale, settings.horizon_s)
    if end.rule == "TTFT above limit":
        return "TTFT"
    ttft = measured(first_s, np.where(answered, ttft_s, np.nan), end.at_s)
    if ttft.mean is None:
        return "nothing answered"
    if ttft.mean > settings.ttft_slo_s:
        return "TTFT"
    tpot = measured(turns.finished_ns / NS_PER_S, result.tpot_s(), end.at_s)
    return "TPOT" if (tpot.mean or 0.0) > settings.tpot_slo_s else ""


class _Search:
    """Runs shapes once each and remembers them; owns the rate at which bisection begins."""

    def __init__(
        self,
        settings: PlanSettings,
        setup_for: SetupFor,
        agents_for: AgentsFor,
        simulate: Simulate,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._setup_for = setup_for
        self._agents_for = agents_for
        self._simulate = simulate
        self._progress = progress
        self._tried: dict[int, ShapeResult] = {}
        self._refusals: list[DualPathError] = []
        self._ratio_range = (0.0, 0.0)
        self._rate = settings.first_rate

    def try_shape(self, prefill_nodes: int) -> None:
        """Run one P unless it was or cannot be."""
        if prefill_nodes in self._tried or not 1 <= prefill_nodes < self._settings.total_nodes:
            return
        decode_nodes = self._settings.total_nodes - prefill_nodes
        self._progress(f"{prefill_nodes}P{decode_nodes}D")
        try:
            setup = self._setup_for(prefill_nodes, decode_nodes)
            links = link_shape(setup.cluster, setup.replicas)
            low, high = self._ratio_range = prefill_to_decode_range(links)
            free = low <= prefill_nodes / decode_nodes <= high
            jct = self._settings.objective == "jct"
            found = self._jct(setup) if jct else self._capacity(setup)
            found = msgspec.structs.replace(found, bottleneck_free=free)
        except DualPathError as error:
            self._refusals.append(error)
            found = ShapeResult(
                prefill_nodes=prefill_nodes, decode_nodes=decode_nodes, refusal=str(error)
            )
        self._tried[prefill_nodes] = found

    def best(self) -> ShapeResult:
        """Return the best so far, of equals the one with fewer prefill nodes."""
        shapes = [self._tried[p] for p in sorted(self._tried)]
        best = max(shapes, key=lambda shape: shape.score)
        if best.refusal:
            raise self._refusals[0]
        return best

    def plan(self) -> Plan:
        """Return everything that was tried."""
        return Plan(
            settings=self._settings,
            shapes=tuple(self._tried[p] for p in sorted(self._tried)),
            best=self.best(),
            ratio_range=self._ratio_range,
        )

    def _jct(self, setup: Setup) -> ShapeResult:
        summary = summarise(self._simulate(setup, self._agents_for(None)))
        return ShapeResult(
            prefill_nodes=setup.cluster.prefill_nodes,
            decode_nodes=setup.cluster.decode_nodes,
            jct_s=summary.jct_s,
            summary=summary,
            runs=1,
        )

    def _capacity(self, setup: Setup) -> ShapeResult:
        """Search the highest rate within the SLO."""
        search = RateSearch(self._rate, within(self._settings.precision), least_rate=LEAST_RATE)
        slo = ""
        summary: RunSummary | None = None
        while (rate := search.next_rate()) is not None:
            result = self._simulate(setup, self._agents_for(rate), until_s=self._settings.horizon_s)
            broken = broken_slo(result, self._settings)
            shape = f"{setup.cluster.prefill_nodes}P{setup.cluster.decode_nodes}D"
            self._progress(f"{shape} at {rate:.3g} agents/s: {broken or 'within the SLO'}")
            search.answer(rate, not broken)
            if broken:
                slo = broken
            else:
                summary = summarise(result)
        capacity = search.bracket.met
        self._rate = capacity or self._rate
        return ShapeResult(
            prefill_nodes=setup.cluster.prefill_nodes,
            decode_nodes=setup.cluster.decode_nodes,
            agents_per_s=capacity,
            summary=summary,
            slo=slo,
            runs=search.runs,
        )


def _first_step(settings: PlanSettings) -> int:
    """Spacing of the first shapes: half of the budget spreads, the other half refines."""
    shapes = settings.total_nodes - 1
    return 1 if shapes <= settings.most_shapes else -(-shapes // (settings.most_shapes // 2))


def _spread_shapes(settings: PlanSettings) -> list[int]:
    step = _first_step(settings)
    last = settings.total_nodes - 1
    return sorted({*range(1, settings.total_nodes, step), last})
