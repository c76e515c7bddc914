"""The recorded comparisons with other stacks, with DualPath simulated in other settings.

    python -m dualpath_lab.benchmarks.peers.in_simulator RUNS [--handover hbm] …

``RUNS`` is a folder of the runs of ``matrix``, such as ``docs/evaluation/peers/cells``, or the file
of one comparison, such as ``docs/evaluation/lab/dram-peers.json``.  Flags are those of the cluster
of ``dualpath simulate``.  A row is a regime on one processor: the JCT of the fastest other stack
and of DualPath (``split``) as measured, of DualPath as simulated without and with the flags, and
the ratio to the other stack: measured, and measured times the simulated change.  Then, simulated
with the flags, of the turns behind each agent's first: TTFT (median and 99th percentile), and what
is read from storage.

Costs of computation were fitted to the measured runs.  The simulator charges copies within an
engine to its compute NIC, which the lab's do not use.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_lab.benchmarks.peers.comparison import (
    MIB,
    PeersSettings,
    Stack,
    published,
    session,
    stacks,
)
from dualpath_lab.benchmarks.peers.matrix import Raw, read_regimes
from dualpath_lab.models.random_models import KV_BYTES
from dualpath_sim.simulator.result import SimulationResult
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import (
    ClusterSettings,
    DecodeCosts,
    ModelCosts,
    PrefillCosts,
    Setup,
)

BLOCK_TOKENS = 64
MEASURED = "dualpath-split"
#: By a word of the processor's name: seconds of prefill per token and batch, of decode per step and
#: request.
COSTS = {"EPYC": (1 / 2500, 0.012, 0.008, 0.0015), "": (1 / 1400, 0.03, 0.015, 0.003)}


def main(argv: Sequence[str]) -> int:
    """Print a row per comparison, then how many DualPath wins, the worst ratio and the mean."""
    parser = argparse.ArgumentParser(prog="in_simulator", description=__doc__)
    parser.add_argument("runs", type=Path)
    add_settings(parser, ClusterSettings)
    args = parser.parse_args(argv)
    print(
        "| regime | best other | measured | simulated | with flags | ratio | with flags "
        "| TTFT p50 | p99 | MB read |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    ratios = []
    for name, raw in recorded(args.runs):
        other_s, own_s = measured_jct_s(stacks(raw.results))
        defaults = cluster_of(raw)
        plain = flag_settings(argparse.Namespace(), ClusterSettings, defaults=defaults)
        changed = flag_settings(args, ClusterSettings, defaults=defaults)
        before, after = (simulated(raw, cluster) for cluster in (plain, changed))
        ratios.append((own_s / other_s, own_s / other_s * after.jct_s / before.jct_s))
        times = " | ".join(f"{s:.1f}" for s in (other_s, own_s, before.jct_s, after.jct_s))
        p50_s, p99_s, read_mb = later_turns(after)
        processor = "EPYC" if _processor(raw) else "Xeon"
        print(
            f"| {name}, {processor} | {times} | {ratios[-1][0]:.2f} | {ratios[-1][1]:.2f} "
            f"| {p50_s:.2f} | {p99_s:.2f} | {read_mb:.0f} |",
            flush=True,
        )
    for title, column in zip(("measured", "with flags"), zip(*ratios, strict=True), strict=True):
        won, mean = sum(ratio <= 1 for ratio in column), math.fsum(map(math.log, column))
        print(
            f"{title}: {won} of {len(column)} won, worst {max(column):.2f}, "
            f"geometric mean {math.exp(mean / len(column)):.2f}"
        )
    return 0


def recorded(runs: Path) -> Iterator[tuple[str, Raw]]:
    """Yield the comparisons in a folder of regimes or in one file, each with its name."""
    if runs.is_file():
        yield runs.stem, published(msgspec.json.decode(runs.read_bytes())["data"])
        return
    for regime, found in read_regimes(runs).items():
        yield from ((regime.name, raw) for raw in found if raw.runs)


def measured_jct_s(found: Sequence[Stack]) -> tuple[float, float]:
    """Return the JCT of the fastest other stack and of DualPath."""
    own = next(stack for stack in found if stack.name == MEASURED)
    others = (stack.jct_s for stack in found if not stack.name.startswith("dualpath"))
    return min(others), own.jct_s


def simulated(raw: Raw, cluster: ClusterSettings) -> SimulationResult:
    """Simulate a comparison's agents on a cluster."""
    prefill_s, batch_s, step_s, request_s = COSTS[_processor(raw)]
    model = ModelCosts(
        name="lab",
        layers=4,
        kv_bytes_per_token=float(KV_BYTES),
        prefill=PrefillCosts(batch_s=batch_s, attention_token_s=prefill_s),
        decode=DecodeCosts(step_s=step_s, request_s=request_s),
        prefill_tokens_per_s=1 / prefill_s,
        computed_weight=1.0,
    )
    setup = Setup(cluster=cluster, model=model, mode=Mode.SPLIT)
    return simulate(setup, agents_of(raw.settings), core="reference")


def later_turns(result: SimulationResult) -> tuple[float, float, float]:
    """Return of turns that are no agent's first: TTFT (p50 and p99, in s), and MB read.

    Reads are those of all turns less the hits of the first, of which no node has any in DRAM.
    """
    first = result.agents.first_round[:-1]
    p50_s, p99_s = np.percentile(np.delete(result.ttft_s(), first), (50, 99))
    first_bytes = float(result.agents.hit_tokens[first].sum()) * KV_BYTES
    return p50_s, p99_s, (float(result.links.snic_read_bytes.sum()) - first_bytes) / 1e6


def cluster_of(raw: Raw) -> dict[str, Any]:
    """Return the settings of the simulated cluster of a comparison at 1P2D."""
    lab = raw.settings
    memory = {"buffer_bytes": float(lab.dram_mib * MIB), "hbm_bytes": float(lab.hbm_mib * MIB)}
    return {
        "prefill_nodes": 1,
        "decode_nodes": 2,
        "gpus_per_node": 1,
        "lockstep": False,
        "snic_bytes_per_s": lab.snic_mb_per_s * 1e6,
        "snic_write_bytes_per_s": 1e9,
        "cnic_bytes_per_s": lab.cnic_gbit_per_s * 1e9 / 8,
        "dram_bytes_per_s": 3e9,
        "dram_tier_bytes": 0.0,
        "compute_quota_s": 10.0,
        "fetch_interval_s": 0.01,
        "generated_reserve_tokens": 16,
        "request_overhead_s": 0.02,
        "decode_admission_s": 0.02,
        **{f"{role}_{name}": size for name, size in memory.items() for role in Role},
    }


def agents_of(lab: PeersSettings) -> AgentTable:
    """Return the agents; the history of each was stored before, so that its turn is a hit."""
    rounds: list[tuple[int, int, int, float]] = []
    first_round = [0]
    for number in range(lab.agents):
        context = 0
        for turn, one in enumerate(session(lab, number).trajectory.rounds):
            prompt = context + one.append_tokens
            stored = prompt if turn == 0 else context - 1
            hit = min(stored, prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            rounds.append((prompt, hit, one.generated_tokens, one.delay_s))
            context = prompt + one.generated_tokens
        first_round.append(len(rounds))
    prompt_tokens, hit_tokens, generated_tokens, delays = zip(*rounds, strict=True)
    return AgentTable(
        first_round=np.array(first_round, np.int64),
        start_s=np.zeros(lab.agents),
        start_after_round=np.full(lab.agents, -1, np.int64),
        prompt_tokens=np.array(prompt_tokens, np.int32),
        hit_tokens=np.array(hit_tokens, np.int32),
        generated_tokens=np.array(generated_tokens, np.int32),
        delay_s=np.array(delays, np.float32),
    )


def _processor(raw: Raw) -> str:
    """Return the key of a comparison's processor in ``COSTS``."""
    model = raw.machine.cpu_model if raw.machine is not None else ""
    return next(word for word in COSTS if word in model)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
