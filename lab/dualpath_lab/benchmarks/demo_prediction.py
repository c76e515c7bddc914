"""Prediction of the demo by the simulator with the demo's parameters.

Cells are every recorded run, the same with a wrong parameter or a part of the model disabled, and
the current demo on machines of several speeds.  Inputs from a recorded run are the lengths of its
turns and the time of Oracle, which loads nothing: compared with Oracle's time on the machine with
known costs, it gives the speed of the run's machine.  The storage rate follows from it as in the
demo.  Predicted are the times of Basic and DualPath.  All agents start at the same time in random
order; a prediction is the median over such orders, drawn with its range.

Inputs are in ``demo_prediction/``: ``cluster.toml`` (settings and measured rates), ``costs.toml``
(measured by `dualpath profile`) and ``measured.json``, which this module writes when it is run with
the folders of `dualpath demo --out RUN` as arguments.  Nothing in them was fitted to the times of
Basic and DualPath.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import TraceError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.core.settings import Setting, Settings
from dualpath.node.machine import ClientMachine
from dualpath.report.model import Table
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.conversation.prompts import Contents, Vocabulary, approximate_encode
from dualpath.workload.replay.result import ReplayResult, read_result
from dualpath_lab.demo.run import LOAD_SHARE
from dualpath_lab.demo.sessions import demo_agents as midway_agents
from dualpath_lab.demo.settings import DemoSettings, cluster_settings
from dualpath_sim.catalog.costs import load_model_costs
from dualpath_sim.catalog.load import load_cluster
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    Stage,
    one_stage,
)
from dualpath_sim.simulator.result import SimulationResult
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import ClusterSettings, ModelCosts, Setup

FOLDER = Path(__file__).parent / "demo_prediction"
CLUSTER, COSTS, MEASURED = FOLDER / "cluster.toml", FOLDER / "costs.toml", FOLDER / "measured.json"
#: The modes that the demo compares; for DualPath the default mode.
MODES = (Mode.BASIC, DEFAULT_MODE, Mode.ORACLE)

#: Largest allowed error of the ratio of completion times Basic : DualPath.
TARGET_ERROR = 0.15
BLOCK_TOKENS = 64
#: Number of random orders of the agents, and a smaller one where only the median is used.
ORDERS, FEW_ORDERS = 60, 24
#: Times of computation of the machines for which the current demo is predicted.
PACES = (0.25, 1.0, 4.0)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds in one mode: the whole task, the mean agent, the mean time to first token."""

    jct_s: float
    mean_agent_jct_s: float
    mean_ttft_s: float


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the demo; ``rounds`` (prompt, stored, generated tokens) per agent."""

    trace: str
    machine: ClientMachine
    measured: dict[Mode, Figures]
    rounds: dict[str, list[tuple[int, int, int]]]

    @property
    def ratio(self) -> float:
        """JCT of Basic over JCT of DualPath."""
        return self.measured[Mode.BASIC].jct_s / self.measured[DEFAULT_MODE].jct_s


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Figures per mode and order of the agents; ``recorded`` is the run that is predicted."""

    figures: dict[Mode, list[Figures]]
    recorded: RecordedRun | None = None

    def values(self, mode: Mode, name: str) -> list[float]:
        """Return one of the figures for every order."""
        return [getattr(figures, name) for figures in self.figures[mode]]

    @property
    def ratios(self) -> list[float]:
        """JCT of Basic over JCT of DualPath for every order."""
        pairs = zip(self.figures[Mode.BASIC], self.figures[DEFAULT_MODE], strict=True)
        return [basic.jct_s / dualpath.jct_s for basic, dualpath in pairs]

    @property
    def ratio(self) -> float:
        """The median over the orders."""
        return statistics.median(self.ratios)

    @property
    def share(self) -> float:
        """Share of Basic's wait for loads that DualPath saves; the median over the orders."""
        basic, dualpath, oracle = (self.values(mode, "jct_s") for mode in MODES)
        runs = zip(basic, dualpath, oracle, strict=True)
        return statistics.median((b_s - d_s) / (b_s - o_s) for b_s, d_s, o_s in runs)


def read_recorded(path: Path = MEASURED) -> list[RecordedRun]:
    """Return the recorded runs."""
    return msgspec.json.decode(path.read_bytes(), type=list[RecordedRun])


def read_setting() -> tuple[ClusterSettings, ModelCosts]:
    """Return the demo's cluster and the costs of its model."""
    cluster = load_cluster(CLUSTER)
    return cluster, load_model_costs(COSTS, "", cluster)


def predict(
    cluster: ClusterSettings, model: ModelCosts, agents: AgentTable, orders: int = ORDERS
) -> Prediction:
    """Simulate the demo's modes, with the reference core."""
    chance = np.random.default_rng(0)
    tables = [_reordered(agents, chance.permutation(agents.agents)) for _ in range(orders)]
    setups = {mode: Setup(cluster=cluster, model=model, mode=mode) for mode in MODES}
    return Prediction(
        figures={
            mode: [_figures(simulate(setup, table)) for table in tables]
            for mode, setup in setups.items()
        }
    )


def _reordered(agents: AgentTable, order: NDArray[np.int64]) -> AgentTable:
    """Return the same agents in another order; there are no sub-agents."""
    first, end = agents.first_round[:-1], agents.first_round[1:]
    rows = np.concatenate([np.arange(first[agent], end[agent]) for agent in order])
    return AgentTable(
        first_round=np.concatenate([[0], np.cumsum((end - first)[order])]),
        start_s=agents.start_s[order],
        start_after_round=agents.start_after_round[order],
        prompt_tokens=agents.prompt_tokens[rows],
        hit_tokens=agents.hit_tokens[rows],
        generated_tokens=agents.generated_tokens[rows],
        delay_s=agents.delay_s[rows],
    )


def recorded_agents(run: RecordedRun) -> AgentTable:
    """Return agents with the recorded lengths."""
    rows = np.array([row for rounds in run.rounds.values() for row in rounds], np.int32)
    agents, rounds = len(run.rounds), len(rows)
    return AgentTable(
        first_round=np.cumsum([0, *map(len, run.rounds.values())]).astype(np.int64),
        start_s=np.zeros(agents),
        start_after_round=np.full(agents, -1, np.int64),
        prompt_tokens=rows[:, 0].copy(),
        hit_tokens=rows[:, 1].copy(),
        generated_tokens=rows[:, 2].copy(),
        delay_s=np.zeros(rounds, np.float32),
    )


def demo_agents(encode: Callable[[str], Sequence[int]]) -> AgentTable:
    """Return the agents of the current demo, each with a stored history."""
    given = DemoSettings()
    agents, _ = midway_agents(given, encode)
    settings = WorkloadSettings(
        agents=given.agents,
        seed=given.seed,
        max_context_tokens=given.max_context_tokens,
        scale_generate=given.scale_generate,
    )
    table = agents_from_sessions([agent.rest for agent in agents], settings, encode=encode)
    hit_tokens = table.hit_tokens.copy()
    for agent, first in zip(agents, table.first_round[:-1], strict=True):
        contents = Contents(Vocabulary(seed=given.seed, encode=encode))
        history = agent.history.start(settings, contents).next_turn()
        assert history is not None, "it has one prompt"
        hit_tokens[first] = history.prompt.tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return table._replace(hit_tokens=hit_tokens)


def predict_demo(
    cluster: ClusterSettings,
    model: ModelCosts,
    agents: AgentTable,
    *,
    pace: float = 1.0,
    orders: int = FEW_ORDERS,
) -> Prediction:
    """Simulate the current demo: its memories, and the storage rate derived from Oracle's run.

    Computing, copying and writing take ``pace`` times as long as on the machine of the costs.
    """
    model = slower(model, pace)
    memories = cluster_settings(DEFAULT_MODE, DemoSettings(), Path(), "", Path(), 0.0)
    load_bytes = int(agents.hit_tokens.sum()) * model.kv_bytes_per_token
    setup = Setup(cluster=cluster, model=model, mode=Mode.ORACLE)
    oracle_jct_s = simulate(setup, agents).jct_s
    demo_cluster = msgspec.structs.replace(
        cluster,
        snic_bytes_per_s=load_bytes / (LOAD_SHARE * oracle_jct_s * cluster.prefill_nodes),
        snic_write_bytes_per_s=cluster.snic_write_bytes_per_s / pace,
        cnic_bytes_per_s=cluster.cnic_bytes_per_s / pace,
        dram_bytes_per_s=cluster.dram_bytes_per_s / pace,
        prefill_buffer_bytes=memories.buffer_bytes,
        decode_buffer_bytes=memories.buffer_bytes,
        prefill_hbm_bytes=memories.hbm_bytes,
        decode_hbm_bytes=memories.hbm_bytes,
    )
    return predict(demo_cluster, model, agents, orders)


def predict_run(
    cluster: ClusterSettings,
    model: ModelCosts,
    run: RecordedRun,
    *,
    pace: float = 1.0,
    orders: int = ORDERS,
) -> Prediction:
    """Simulate a recorded run at the machine speed derived from Oracle's time, over ``pace``."""
    agents = recorded_agents(run)
    oracle = predict_demo(cluster, model, agents, orders=FEW_ORDERS).values(Mode.ORACLE, "jct_s")
    here = run.measured[Mode.ORACLE].jct_s / statistics.median(oracle)
    found = predict_demo(cluster, model, agents, pace=here * pace, orders=orders)
    return msgspec.structs.replace(found, recorded=run)


def _figures(result: SimulationResult) -> Figures:
    return Figures(
        jct_s=result.jct_s,
        mean_agent_jct_s=float(result.agent_jct_s().mean()),
        mean_ttft_s=float(result.ttft_s().mean()),
    )


def record(folder: Path) -> RecordedRun:
    """Return the figures of a folder that `dualpath demo` has written."""
    results = {mode: read_result(folder / f"{mode.value}.json") for mode in MODES}
    for mode, result in results.items():
        if result.failed:
            raise TraceError(f"{folder}: {result.summary.turns_failed} turns of {mode} failed")
    basic = results[Mode.BASIC]
    return RecordedRun(
        trace=basic.setting.trace,
        machine=basic.machine,
        measured={mode: _measured(result) for mode, result in results.items()},
        rounds=_rounds(basic),
    )


def _measured(result: ReplayResult) -> Figures:
    summary = result.summary
    if summary.session_jct_s is None or summary.ttft_s is None:
        raise TraceError(f"{result.setting.label} has no turns; run the demo again")
    return Figures(
        jct_s=summary.jct_s,
        mean_agent_jct_s=summary.session_jct_s.mean,
        mean_ttft_s=summary.ttft_s.mean,
    )


def _rounds(result: ReplayResult) -> dict[str, list[tuple[int, int, int]]]:
    rounds: dict[str, list[tuple[int, int, int]]] = {}
    # Agents in the order of their first requests, turns in their own order.
    for turn in sorted(result.turns, key=lambda turn: (turn.turn, turn.start_s)):
        lengths = turn.prompt_tokens, turn.ideal_hit_tokens, turn.generated_tokens
        rounds.setdefault(turn.conversation_id, []).append(lengths)
    return rounds


def comparison(predicted: Prediction, run: RecordedRun) -> Table:
    """Return predicted and measured figures with relative errors."""
    title = f"{run.trace}: {len(run.rounds)} agents, {sum(map(len, run.rounds.values()))} turns"
    names = Figures.__struct_fields__
    rows = [
        _row(
            f"{name.removesuffix('_s').replace('_', ' ')}, s: {mode}",
            predicted.values(mode, name),
            getattr(run.measured[mode], name),
            2,
        )
        for name in names
        for mode in MODES
    ]
    rows.append(_row(f"JCT basic : {DEFAULT_MODE}", predicted.ratios, run.ratio, 3))
    rules = tuple(len(MODES) * (index + 1) for index in range(len(names)))
    columns = ("", "simulated", "(range)", "measured", "error")
    return Table(title, columns, tuple(rows), rules=rules)


def _row(label: str, found: Sequence[float], measured: float, decimals: int) -> tuple[str, ...]:
    middle = statistics.median(found)
    return (
        label,
        f"{middle:.{decimals}f}",
        f"{min(found):.{decimals}f} to {max(found):.{decimals}f}",
        f"{measured:.{decimals}f}",
        _error(middle, measured),
    )


def _variants(cluster: ClusterSettings) -> Iterable[tuple[str, ClusterSettings, float]]:
    for factor in (0.8, 1.25):
        yield f"the machine takes {factor:g} of the time", cluster, factor
    for factor in (0.5, 2.0):
        faster = msgspec.structs.replace(
            cluster, cnic_bytes_per_s=cluster.cnic_bytes_per_s * factor
        )
        yield f"transfers run at {factor:g} of the rate", faster, 1.0
    free = msgspec.structs.replace(
        cluster, cnic_bytes_per_s=1e15, dram_bytes_per_s=1e15, snic_write_bytes_per_s=1e15
    )
    yield "transfers and writes take no time", free, 1.0
    late = msgspec.structs.replace(cluster, request_overhead_s=0.05)
    yield "requests reach the scheduler after 50 ms", late, 1.0


def slower(model: ModelCosts, factor: float) -> ModelCosts:
    """Return costs with all times multiplied."""
    replace = msgspec.structs.replace
    scaled = [
        replace(
            costs,
            **{k: getattr(costs, k) * factor for k in costs.__struct_fields__ if k.endswith("_s")},
        )
        for costs in (model.prefill, model.decode)
    ]
    return replace(model, prefill=scaled[0], decode=scaled[1])


def _error(found: float, wanted: float) -> str:
    return f"{found / wanted - 1:+.1%}"


# --------------------------------------------------------------------------------------- experiment


class PredictionSettings(Settings, frozen=True, kw_only=True):
    """How exactly the recorded runs are predicted."""

    orders: Annotated[int, Setting("random orders of the agents of a recorded run", ge=1)] = ORDERS


Predict = Callable[[], Prediction]


def _stages(settings: PredictionSettings, progress: Progress) -> list[Stage[Predict, Prediction]]:
    cluster, model = read_setting()
    cells: dict[str, Predict] = {}
    few = min(settings.orders, FEW_ORDERS)
    for run in read_recorded():
        cells[run.trace] = partial(predict_run, cluster, model, run, orders=settings.orders)
        for label, changed, pace in _variants(cluster):
            wrong = partial(predict_run, changed, model, run, pace=pace, orders=few)
            cells[f"{run.trace}: {label}"] = wrong
    for pace in PACES:
        cells[f"the demo, computing in {pace:g} of the time"] = partial(_demo, pace, few)
    return one_stage(cells, lambda predict, number: predict())


def _demo(pace: float, orders: int) -> Prediction:
    cluster, model = read_setting()
    agents = demo_agents(approximate_encode)
    return predict_demo(cluster, model, agents, pace=pace, orders=orders)


def draw(raw: RawData[PredictionSettings, Prediction]) -> Page:
    """Draw what was predicted, beside what was measured for a recorded run."""
    rows, tables, results = [], [], []
    for run in raw.runs:
        name, found, recorded = run.cell, run.result, run.result.recorded
        error = "" if recorded is None else _error(found.ratio, recorded.ratio)
        seconds = (f"{statistics.median(found.values(mode, 'jct_s')):.1f}" for mode in MODES)
        rows.append((name, *seconds, f"{found.ratio:.3f}", error, f"{found.share:.0%}"))
        results.append(
            KeyResult(f"{name}: Basic : DualPath", found.ratio, tolerance=0.0, any_machine=True)
        )
        if recorded is not None and recorded.trace == name:
            tables.append(comparison(found, recorded))
            wrong = abs(found.ratio / recorded.ratio - 1)
            results.append(
                KeyResult(f"{name}: error of the ratio", wrong, TARGET_ERROR, at_least=False)
            )
    columns = ("", *(f"{mode}, s" for mode in MODES), "Basic : DualPath", "error", "share")
    return Page(
        tables=(*tables, Table("Every prediction", columns, tuple(rows))), results=tuple(results)
    )


DEMO_PREDICTION = Experiment(
    name="demo-prediction",
    title="The demo, predicted",
    settings=PredictionSettings(),
    result=Prediction,
    stages=_stages,
    draw=draw,
    summary=lambda found: f"Basic : DualPath {found.ratio:.2f}",
)

if __name__ == "__main__":
    recorded_runs = [record(Path(folder)) for folder in sys.argv[1:]]
    content = msgspec.json.encode(recorded_runs, order="deterministic")
    MEASURED.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
