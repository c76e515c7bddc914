"""Effect of the decisions that the paper leaves open, each changed separately.

Offline, 64K, DS 660B on 2P4D in two
groups per role, reference core.  Each variant replaces one function of the policy during a run;
equal commands give equal numbers.  Simulated.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np

from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath.policy import decode, prefill, read_side
from dualpath.policy.accounts import Column as TokenColumn
from dualpath.policy.accounts import IntArray
from dualpath.policy.accounts import Table as TokenTable
from dualpath.policy.decode import TwoPhaseDecodePlacer
from dualpath.policy.events import PE_LONG_QUEUE, PE_SHORT_QUEUE
from dualpath.report.model import Table
from dualpath.workload.columns.generator import DATASETS, generate_agents
from dualpath_sim.catalog.costs import load_model_costs
from dualpath_sim.catalog.load import load_cluster
from dualpath_sim.evaluation.runs import attention_balance, snic_balance, tail_begins_s
from dualpath_sim.harness.experiment import (
    Experiment,
    Page,
    Progress,
    RawData,
    Stage,
    one_stage,
)
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table
from dualpath_sim.simulator.result import SimulationResult
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup

Placed = tuple[IntArray, IntArray]

# The originals, which some variants call.
ALGORITHM_1 = prefill.assign_prefill
PHASE_1 = TwoPhaseDecodePlacer._drain_global_queue
PHASE_2 = decode.assign_decode


class DecisionSettings(Settings, frozen=True, kw_only=True):
    """The load."""

    agents: Annotated[int, Setting("agents", ge=1)] = 1024
    seed: Annotated[int, Setting("of the trajectories", ge=0)] = 0


class Variant(NamedTuple):
    """One changed decision: the replaced function and its replacement."""

    name: str
    module: object
    attribute: str
    replacement: Callable[..., object]


def classify_once(
    tok: Column,
    node: Column,
    read_q: Column,
    lengths: Column,
    cached_rows: Column,
    cached: TokenTable,
    worth: float,
    alpha_tokens: int,
    beta_tokens: int,
) -> Placed:
    """Algorithm 1 literally: an engine's category is fixed for the whole fetch."""
    load = list(tok)
    open_rows = [row for row in range(len(load)) if load[row] <= beta_tokens]
    second = [row for row in open_rows if read_q[node[row]] <= alpha_tokens]
    chosen = second or open_rows
    rows = []
    for length in lengths if chosen else ():
        row = min(chosen, key=lambda one: load[one])
        rows.append(row)
        load[row] += length
    reason = PE_SHORT_QUEUE if second else PE_LONG_QUEUE
    return np.array(rows, np.int64), np.full(len(rows), reason)


def least_tokens_only(
    tok: TokenColumn,
    node: TokenColumn,
    read_q: TokenColumn,
    *others: Any,  # noqa: ANN401 - passed on
) -> Placed:
    """Algorithm 1 without read queues: no preference of C2 over C3."""
    return ALGORITHM_1(tok, node, np.zeros(len(read_q), np.int64), *others)


def fewest_requests_by_order(
    tok: TokenColumn,
    seq: TokenColumn,
    *others: Any,  # noqa: ANN401 - passed on
) -> Placed:
    """Phase 2 with ties in request counts decided by lowest order, not by fewest tokens."""
    # Distinct ranks leave no ties.
    ranked = np.array([requests * len(seq) + row for row, requests in enumerate(seq)])
    return PHASE_2(tok, ranked, *others)


def drain_by_reported_tokens(placer: TwoPhaseDecodePlacer) -> None:
    """Phase 1 counting only engines' tokens, without those in private queues."""
    placer._private_tokens = dict.fromkeys(placer._private_tokens, 0)
    PHASE_1(placer)


VARIANTS = (
    Variant("categories fixed for a fetch", prefill, "assign_prefill", classify_once),
    Variant("no read queues in Algorithm 1", prefill, "assign_prefill", least_tokens_only),
    Variant("equal queues: always the PE", read_side, "pe_charged_less", lambda *_: True),
    Variant("equal queues: always the DE", read_side, "pe_charged_less", lambda *_: False),
    Variant("equal requests: lowest order", decode, "assign_decode", fewest_requests_by_order),
    Variant(
        "phase 1 without private queues",
        TwoPhaseDecodePlacer,
        "_drain_global_queue",
        drain_by_reported_tokens,
    ),
)


OURS = "ours"


def numbers_of(result: SimulationResult) -> Numbers:
    """Return JCT, TTFT and balance of a run."""
    busy_s = tail_begins_s(result, 0.5)
    return {
        "jct_s": result.jct_s,
        "ttft_s": float(np.nanmean(result.ttft_s())),
        "snic": snic_balance(result.links, 1.0).mean(busy_s) or 1.0,
        "attention": attention_balance(result.batches).mean(busy_s) or 1.0,
    }


def _stages(settings: DecisionSettings, progress: Progress) -> list[Stage[Variant | None, Numbers]]:
    cluster = msgspec.structs.replace(
        load_cluster("paper-660b"), prefill_nodes_per_group=1, decode_nodes_per_group=2
    )
    costs = load_model_costs("ds-v3.2", "hopper", cluster)
    setup = Setup(cluster=cluster, model=costs, mode=Mode.DUALPATH)

    def run(variant: Variant | None, number: int) -> Numbers:
        agents = generate_agents(DATASETS["64K"], settings.agents, settings.seed)
        changed = (
            patch.object(variant.module, variant.attribute, variant.replacement)
            if variant is not None
            else nullcontext()
        )
        with changed:
            return numbers_of(simulate(setup, agents, core="reference"))

    cells: dict[str, Variant | None] = {OURS: None}
    return one_stage(cells | {variant.name: variant for variant in VARIANTS}, run)


_COLUMNS = [
    Column("JCT, s", "jct_s", "{:.0f}", tolerance=0.0, any_machine=True),
    Column("mean TTFT, s", "ttft_s"),
    Column("SNIC max/avg", "snic"),
    Column("attention max/avg", "attention"),
]


def draw(raw: RawData[DecisionSettings, Numbers]) -> Page:
    """Draw every variant relative to ours."""
    table = number_table(raw, "Simulated: 2P4D in 2 + 2 groups, 64K", _COLUMNS, "decision")
    rows = []
    for name, jct, *others in table.rows:
        ratio = raw.ratio(name, OURS, lambda one: one["jct_s"])
        change = "" if ratio is None or name == OURS else f"{100 * (ratio - 1):+.1f} %"
        rows.append((name, jct, change, *others))
    columns = (*table.columns[:2], "relative to ours", *table.columns[2:])
    return Page(
        settings=(f"{raw.settings.agents} agents, seed {raw.settings.seed}.",),
        tables=(Table(table.title, columns, tuple(rows)),),
        results=tuple(key_results(raw, _COLUMNS)),
    )


OPEN_DECISIONS = Experiment(
    name="open-decisions",
    title="Decisions that the paper leaves open, each changed separately",
    settings=DecisionSettings(),
    result=Numbers,
    stages=_stages,
    draw=draw,
    summary=lambda found: f"{found['jct_s']:.0f} s",
)
