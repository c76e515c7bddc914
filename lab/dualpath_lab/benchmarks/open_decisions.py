"""Effect of the decisions that the paper leaves open, each changed separately.

Run: ``python -m dualpath_lab.benchmarks.open_decisions``.  Offline, 64K, DS 660B on 2P4D in two
groups per role, reference core.  Each variant replaces one function of the policy during a run;
equal commands give equal numbers.  Simulated.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np

from dualpath.core.modes import Mode
from dualpath.policy import decode, prefill, read_side
from dualpath.policy.accounts import Column, IntArray
from dualpath.policy.accounts import Table as TokenTable
from dualpath.policy.decode import TwoPhaseDecodePlacer
from dualpath.policy.events import PE_LONG_QUEUE, PE_SHORT_QUEUE
from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath.workload.columns.generator import DATASETS, generate_agents
from dualpath_sim.catalog.costs import load_model_costs
from dualpath_sim.catalog.load import load_cluster
from dualpath_sim.evaluation.runs import attention_balance, snic_balance, tail_begins_s
from dualpath_sim.simulator.result import SimulationResult
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup

Placed = tuple[IntArray, IntArray]

# The originals, which some variants call.
ALGORITHM_1 = prefill.assign_prefill
PHASE_1 = TwoPhaseDecodePlacer._drain_global_queue
PHASE_2 = decode.assign_decode


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
    tok: Column,
    node: Column,
    read_q: Column,
    *others: Any,  # noqa: ANN401 - passed on
) -> Placed:
    """Algorithm 1 without read queues: no preference of C2 over C3."""
    return ALGORITHM_1(tok, node, np.zeros(len(read_q), np.int64), *others)


def fewest_requests_by_order(
    tok: Column,
    seq: Column,
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


def row(name: str, result: SimulationResult, base_s: float) -> tuple[str, ...]:
    """Return a run's row, with its JCT relative to ``base_s``."""
    busy_s = tail_begins_s(result, 0.5)
    snic = snic_balance(result.links, 1.0).mean(busy_s)
    attention = attention_balance(result.batches).mean(busy_s)
    change = f"{100 * (result.jct_s / base_s - 1):+.1f} %" if base_s else ""
    print(f"{name}: {result.jct_s:.0f} s", file=sys.stderr, flush=True)
    numbers = (np.nanmean(result.ttft_s()), snic, attention)
    return (name, f"{result.jct_s:.0f}", change, *(f"{number:.2f}" for number in numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cluster = msgspec.structs.replace(
        load_cluster("paper-660b"), prefill_nodes_per_group=1, decode_nodes_per_group=2
    )
    setup = Setup(
        cluster=cluster,
        model=load_model_costs("ds-v3.2", "hopper", cluster),
        mode=Mode.DUALPATH,
    )
    agents = generate_agents(DATASETS["64K"], args.agents, args.seed)
    ours = simulate(setup, agents, core="reference")
    rows = [row("ours", ours, 0.0)]
    for variant in VARIANTS:
        with patch.object(variant.module, variant.attribute, variant.replacement):
            result = simulate(setup, agents, core="reference")
        rows.append(row(variant.name, result, ours.jct_s))
    columns = (
        *("decision", "JCT, s", "relative to ours", "mean TTFT, s"),
        *("SNIC max/avg", "attention max/avg"),
    )
    title = f"Simulated: 2P4D in 2 + 2 groups, {args.agents} agents, 64K, seed {args.seed}"
    print(markdown.table(Table(title, columns, tuple(rows))))


if __name__ == "__main__":
    main()
