"""Small simulated clusters with round numbers, for tests of both cores."""

from collections.abc import Sequence

import numpy as np

from dualpath.core.modes import Mode
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.result import Decisions, SimulationResult
from dualpath_sim.simulator.settings import (
    ClusterSettings,
    DecodeCosts,
    ModelCosts,
    PrefillCosts,
    Setup,
)

#: (prompt, hit, generated) tokens of a round.
RoundLengths = tuple[int, int, int]


def agents_of(
    *agents: Sequence[RoundLengths],
    start_s: Sequence[float] | None = None,
    start_after_round: Sequence[int] | None = None,
    delay_s: float = 0.0,
) -> AgentTable:
    """Return a table of agents given by their rounds."""
    rounds = np.array([row for agent in agents for row in agent], np.int32).reshape(-1, 3)
    return AgentTable(
        first_round=np.cumsum([0, *(len(agent) for agent in agents)]).astype(np.int64),
        start_s=np.array(start_s or [0.0] * len(agents)),
        start_after_round=np.array(start_after_round or [-1] * len(agents), np.int64),
        prompt_tokens=rounds[:, 0].copy(),
        hit_tokens=rounds[:, 1].copy(),
        generated_tokens=rounds[:, 2].copy(),
        delay_s=np.full(len(rounds), delay_s, np.float32),
    )


def growing_agent(turns: int, first: int, append: int, generated: int) -> list[RoundLengths]:
    """Return the rounds of an agent with a context that grows by pure appends."""
    rounds, context = [], 0
    for turn in range(turns):
        prompt = context + (first if turn == 0 else append)
        hit = min(max(context - 1, 0), prompt - 1) // 64 * 64
        rounds.append((prompt, hit, generated))
        context = prompt + generated
    return rounds


def small_setup(mode: Mode = Mode.DUALPATH, **changes: object) -> Setup:
    """Return one PE node and one DE node of one GPU each, unless ``changes`` say otherwise.

    1,000 KV bytes per token in 10 layers; storage 1 MB/s, so 1,000 tokens per second; prefill
    1 ms per token; 10 ms per decoded token.
    """
    cluster = {
        "prefill_nodes": 1,
        "decode_nodes": 1,
        "gpus_per_node": 1,
        "prefill_nodes_per_group": 1,
        "decode_nodes_per_group": 1,
        "snic_bytes_per_s": 1e6,
        "snic_write_bytes_per_s": 1e9,
        "cnic_bytes_per_s": 1e9,
        "dram_bytes_per_s": 1e12,
        "fetch_interval_s": 0.01,
        "compute_quota_s": 10.0,
        **changes,
    }
    return Setup(
        cluster=ClusterSettings(**cluster),  # type: ignore[arg-type]  # checked by msgspec's fields
        model=small_model(),
        mode=mode,
    )


def decisions_of(result: SimulationResult) -> Decisions:
    """Return the decisions of a run with a decision log."""
    assert result.decisions is not None
    return result.decisions


def small_model(**changes: object) -> ModelCosts:
    """Return a model with round numbers."""
    fields = {
        "name": "small",
        "layers": 10,
        "kv_bytes_per_token": 1000.0,
        "prefill": PrefillCosts(attention_token_s=1e-3),
        "decode": DecodeCosts(step_s=0.01),
        "prefill_tokens_per_s": 10_000.0,
        **changes,
    }
    return ModelCosts(**fields)  # type: ignore[arg-type]  # checked by msgspec's fields
