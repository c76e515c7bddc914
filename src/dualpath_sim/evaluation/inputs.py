"""Clusters and models from the catalog, workloads from the generator or from trace files."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.workload.arrivals import arrival_times_s
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.conversations import RoundColumns
from dualpath.workload.columns.generator import DATASETS, GeneratorSettings, Tail, generate
from dualpath.workload.columns.sessions_to_columns import (
    WorkloadSettings,
    agents_from_rounds,
    agents_from_sessions,
)
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.formats import read_trace
from dualpath.workload.formats.lines import OnBroken
from dualpath_sim.catalog.costs import (
    DEFAULT_GPU,
    model_costs,
    prompt_tokens_per_s,
)
from dualpath_sim.catalog.load import load_cluster, load_gpu, load_model
from dualpath_sim.evaluation.settings import AS_WRITTEN, Calibration, RunSpec
from dualpath_sim.simulator.settings import ClusterSettings, ModelCosts, PrefillCosts, Setup


class CatalogInputs:
    """Owns what has been read or generated so far; every run takes it from here."""

    def __init__(
        self,
        tail: Tail = "gamma",
        traces: Mapping[str, Path] | None = None,
        calibration: Calibration = AS_WRITTEN,
        on_broken: OnBroken | None = None,
    ) -> None:
        """``traces`` gives names to trace files, beside the datasets of Table 2."""
        self._on_broken = on_broken
        self._calibration = calibration
        self._generator = GeneratorSettings(tail=tail)
        self._traces = dict(traces or {})
        self._columns: dict[tuple[object, ...], RoundColumns] = {}
        self._sessions: dict[str, list[Session]] = {}

    def setup(self, spec: RunSpec) -> Setup:
        """Return the catalog's cluster with the run's changes, and the model's costs on it."""
        changes = dict(self._calibration.cluster) | dict(spec.overrides)
        if spec.nodes is not None:
            changes["prefill_nodes"], changes["decode_nodes"] = spec.nodes
        cluster = msgspec.structs.replace(load_cluster(spec.system.cluster), **changes)
        costs = self._costs(spec.system.model, cluster)
        return Setup(cluster=cluster, model=_changed(costs, cluster, spec), mode=spec.mode)

    def _costs(self, model: str, cluster: ClusterSettings) -> ModelCosts:
        changed, geometry, gpu = self._calibration, load_model(model), load_gpu(DEFAULT_GPU)
        replace = msgspec.structs.replace
        efficiency = dict(changed.prefill_efficiency).get(model, geometry.prefill_efficiency)
        prefill = replace(gpu.prefill, **dict(changed.prefill))
        decode = replace(gpu.decode, **dict(changed.decode))
        return model_costs(
            replace(geometry, prefill_efficiency=efficiency),
            replace(gpu, prefill=prefill, decode=decode),
            cluster,
        )

    def agents(self, spec: RunSpec, seed: int) -> AgentTable:
        """Return the run's agents; a trace is cut at the model's context limit."""
        table = self._trace_agents(spec, seed) if spec.workload in self._traces else None
        if table is None:
            table = self._generated_agents(spec, seed)
        if spec.unseen_generation != 1:
            more = np.rint(table.generated_tokens * spec.unseen_generation)
            table = table._replace(generated_tokens=np.maximum(more, 1).astype(np.int32))
        if spec.agents_per_s is None:
            return table
        # Sub-agents start after a round of their parent, whatever the arrivals.
        start_s = np.zeros(table.agents)
        own = table.start_after_round < 0
        start_s[own] = arrival_times_s(int(own.sum()), spec.agents_per_s, seed)
        return table._replace(start_s=start_s)

    def _generated_agents(self, spec: RunSpec, seed: int) -> AgentTable:
        dataset = DATASETS.get(spec.workload)
        if dataset is None:
            known = ", ".join([*DATASETS, *self._traces])
            raise ConfigError(f"workload {spec.workload!r} is unknown; choose one of {known}")
        key = (spec.workload, seed, spec.generator)
        if key not in self._columns:
            generator = msgspec.structs.replace(self._generator, **dict(spec.generator))
            self._columns[key] = generate(dataset, seed, generator)
        workload = self._workload(spec, seed, dataset.max_tokens)
        return agents_from_rounds(self._columns[key], workload)

    def _trace_agents(self, spec: RunSpec, seed: int) -> AgentTable:
        if spec.workload not in self._sessions:
            self._sessions[spec.workload] = read_trace(
                self._traces[spec.workload], on_broken=self._on_broken
            )
        limit = self.setup(spec).model.context_limit_tokens
        workload = self._workload(spec, seed, limit)
        return agents_from_sessions(self._sessions[spec.workload], workload)

    def _workload(self, spec: RunSpec, seed: int, most: int | None) -> WorkloadSettings:
        return WorkloadSettings(
            agents=spec.agents or None,
            seed=seed,
            max_context_tokens=most,
            scale_append=spec.append_scale,
            scale_generate=spec.generation_scale,
        )


#: Times of a PE; the other fields of ``PrefillCosts`` are counts and choices.
_PREFILL_TIMES = tuple(name for name in PrefillCosts.__struct_fields__ if name.endswith("_s"))


def _changed(costs: ModelCosts, cluster: ClusterSettings, spec: RunSpec) -> ModelCosts:
    """Return the costs with the run's changes; β follows what the changed PE gets done."""
    if spec.prefill_slowdown == 1 and spec.interleaved is None:
        return costs
    changes: dict[str, float | bool] = {
        name: getattr(costs.prefill, name) * spec.prefill_slowdown for name in _PREFILL_TIMES
    }
    if spec.interleaved is not None:
        changes["interleaved"] = spec.interleaved
    prefill = msgspec.structs.replace(costs.prefill, **changes)
    rate = prompt_tokens_per_s(prefill, cluster.compute_quota_s)
    return msgspec.structs.replace(costs, prefill=prefill, prefill_tokens_per_s=rate)
