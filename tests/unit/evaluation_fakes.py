"""A simulator in closed form: storage and computation as two rates, whatever the scheduler does."""

import msgspec
import numpy as np

from dualpath.core.modes import Mode
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.evaluation.settings import RunSpec
from dualpath_sim.simulator.result import NS_PER_S, Batches, LinkUse, SimulationResult, TurnTimes
from dualpath_sim.simulator.settings import (
    ClusterSettings,
    DecodeCosts,
    ModelCosts,
    PrefillCosts,
    Setup,
)

ROUNDS = 6
#: Seconds of a round before its first token, per agent in the system and prefill node.
SPEED_S = {
    Mode.BASIC: 0.02,
    Mode.LAYERWISE: 0.016,
    Mode.ROUND_ROBIN: 0.013,
    Mode.DUALPATH: 0.01,
    Mode.SPLIT: 0.009,
    Mode.ORACLE: 0.008,
}
MODEL = ModelCosts(
    name="fake",
    layers=2,
    kv_bytes_per_token=40_000,
    prefill=PrefillCosts(batch_s=0.1),
    decode=DecodeCosts(),
    prefill_tokens_per_s=1e5,
)


class FakeInputs:
    """Six equal rounds per agent, on the cluster that a specification asks for."""

    def __init__(self) -> None:
        self.tables_made = 0

    def setup(self, spec: RunSpec) -> Setup:
        prefill, decode = spec.nodes or (2, 4)
        cluster = ClusterSettings(prefill_nodes=prefill, decode_nodes=decode)
        changed = msgspec.structs.replace(cluster, **dict(spec.overrides))
        return Setup(cluster=changed, model=MODEL, mode=spec.mode)

    def agents(self, spec: RunSpec, seed: int) -> AgentTable:
        self.tables_made += 1
        n = spec.agents or 8
        rng = np.random.default_rng(seed)
        append = np.full((n, ROUNDS), round(300 * spec.append_scale))
        generated = np.full((n, ROUNDS), round(100 * spec.generation_scale))
        prompt = np.cumsum(append + generated, axis=1) - generated
        hits = np.maximum(prompt - append - 1, 0) // 64 * 64
        start_s = np.zeros(n)
        if spec.agents_per_s is not None:
            start_s = np.cumsum(rng.exponential(1 / spec.agents_per_s, n))
        return AgentTable(
            first_round=np.arange(n + 1) * ROUNDS,
            start_s=start_s,
            start_after_round=np.full(n, -1),
            prompt_tokens=prompt.ravel().astype(np.int32),
            hit_tokens=hits.ravel().astype(np.int32),
            generated_tokens=generated.ravel().astype(np.int32),
            delay_s=np.zeros(n * ROUNDS, np.float32),
        )


class FakeSimulator:
    """Gives every round the same time to its first token; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, setup: Setup, agents: AgentTable, *, until_s: float | None, window_s: float
    ) -> SimulationResult:
        self.calls += 1
        at_once = agents.start_s[-1] == 0
        load = agents.agents if at_once else 300 * agents.agents / agents.start_s[-1]
        wait_s = SPEED_S[setup.mode] * load / setup.cluster.prefill_nodes
        turns = _turns(agents, wait_s, until_s)
        end_ns = int(turns.finished_ns.max())
        return SimulationResult(
            setup=setup,
            agents=agents,
            turns=turns,
            batches=_batches(end_ns),
            links=_links(setup, end_ns, window_s),
            decisions=None,
            end_ns=end_ns,
            stopped=until_s is not None,
            events=0,
        )


def _turns(agents: AgentTable, wait_s: float, until_s: float | None) -> TurnTimes:
    decode_s = 0.02 * (agents.generated_tokens - 1).reshape(-1, ROUNDS)
    length_s = np.cumsum(wait_s + decode_s, axis=1)
    finished = agents.start_s[:, None] + length_s
    submitted = finished - decode_s - wait_s
    shares = (0.0, 0.1, 0.2, 0.6, 0.7, 1.0)
    early = [submitted + share * wait_s for share in shares]
    first = early[-1]
    times = [*early, first + 0.01, first + 0.02, finished]
    whole = [(one.ravel() * NS_PER_S).astype(np.int64) for one in times]
    if until_s is not None:
        whole = [np.where(one <= until_s * NS_PER_S, one, -1) for one in whole]
    return TurnTimes(*whole)


def _batches(end_ns: int) -> Batches:
    count = 50
    start_ns = np.linspace(0, end_ns, count, endpoint=False).astype(np.int64)
    return Batches(
        start_ns=start_ns,
        end_ns=start_ns + 1,
        unit=np.zeros(count, np.int64),
        tokens=np.full(count, 1000),
        attention_max_s=np.full(count, 0.11),
        attention_mean_s=np.full(count, 0.1),
    )


def _links(setup: Setup, end_ns: int, window_s: float) -> LinkUse:
    windows = int(end_ns / NS_PER_S / window_s) + 1
    read = np.ones((windows, setup.cluster.nodes))
    read[:, : setup.cluster.prefill_nodes] = 2.0
    none = np.zeros_like(read)
    return LinkUse(round(window_s * NS_PER_S), read, none, none)
