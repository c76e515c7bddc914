"""Statistics of a workload over all turns and over trajectories, to compare with Table 2."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.workload.columns.agent_table import AgentTable, IntArray

FloatArray = NDArray[np.float64]


class RoundMeans(msgspec.Struct, frozen=True):
    """Mean tokens of a round; ``hit_rate`` is 0 to 1."""

    append_tokens: float
    generated_tokens: float
    context_tokens: float
    prompt_tokens: float
    hit_rate: float


class WorkloadStatistics(msgspec.Struct, frozen=True):
    """Statistics of a workload.

    ``trajectories`` counts conversations, including sub-agents.  ``total_tokens`` is the mean
    context after the last round.  ``per_turn`` averages over all rounds, with the hit rate of all
    prompt tokens; ``per_trajectory`` averages the trajectories' own means, as in Table 2.
    The context is the part of a prompt that repeats earlier rounds, append is the rest.
    """

    trajectories: int
    sub_agents: int
    rounds: int
    turns: float
    turns_p50: float
    turns_p99: float
    turns_max: int
    total_tokens: float
    largest_context_tokens: int
    delay_s: float
    per_turn: RoundMeans
    per_trajectory: RoundMeans


def describe(table: AgentTable, block_tokens: int = 64) -> WorkloadStatistics:
    """Return the statistics of ``table``; its hits are multiples of ``block_tokens``."""
    turns = np.diff(table.first_round)
    last = table.first_round[1:] - 1
    ends = table.prompt_tokens.astype(np.int64) + table.generated_tokens
    p50, p99 = np.percentile(turns, [50, 99])
    return WorkloadStatistics(
        trajectories=table.agents,
        sub_agents=int((table.start_after_round >= 0).sum()),
        rounds=table.rounds,
        turns=float(turns.mean()),
        turns_p50=float(p50),
        turns_p99=float(p99),
        turns_max=int(turns.max()),
        total_tokens=float(ends[last].mean()),
        largest_context_tokens=int(ends.max()),
        delay_s=float(table.delay_s.mean(dtype=np.float64)),
        per_turn=_means(table, block_tokens, np.asarray([0], np.int64)),
        per_trajectory=_means(table, block_tokens, table.first_round[:-1]),
    )


def context_tokens(table: AgentTable, block_tokens: int = 64) -> IntArray:
    """Return how many tokens of every prompt repeat earlier rounds.

    If the hit covers the previous round's full blocks, this is the previous round's prompt and
    answer, otherwise the hit itself: a repeated part of a block is not visible in full blocks.
    """
    ends = table.prompt_tokens.astype(np.int64) + table.generated_tokens
    before = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    before[table.first_round[:-1]] = 0
    prompt = table.prompt_tokens.astype(np.int64)
    hit = table.hit_tokens.astype(np.int64)
    continues = (before <= prompt) & (hit + block_tokens >= before)
    return np.where(continues, np.maximum(before, hit), hit)


def _means(table: AgentTable, block_tokens: int, starts: IntArray) -> RoundMeans:
    """Return the means of the parts that begin at ``starts``, averaged over the parts."""
    counts = np.diff(np.append(starts, table.rounds))
    prompt = table.prompt_tokens.astype(np.int64)
    context = context_tokens(table, block_tokens)

    def sums(values: IntArray) -> FloatArray:
        return np.add.reduceat(values.astype(np.float64), starts)

    def mean(values: IntArray) -> float:
        return float((sums(values) / counts).mean())

    return RoundMeans(
        append_tokens=mean(prompt - context),
        generated_tokens=mean(table.generated_tokens.astype(np.int64)),
        context_tokens=mean(context),
        prompt_tokens=mean(prompt),
        hit_rate=float((sums(table.hit_tokens.astype(np.int64)) / sums(prompt)).mean()),
    )
