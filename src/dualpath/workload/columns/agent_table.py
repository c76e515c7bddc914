"""The simulator's input: all rounds of all agents as arrays, known before a run starts."""

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import TraceError

IntArray = NDArray[np.int64]


class AgentTable(NamedTuple):
    """N agents with R rounds in total; the rounds of an agent are consecutive.

    ``first_round`` (N + 1) delimits each agent's rounds.  ``start_s`` (N) is the arrival time of an
    agent.  An agent with ``start_after_round`` (N) ≥ 0 is a sub-agent: it starts ``start_s`` after
    the end of that round (an index into all rounds) of another agent.  Arrays of size R: tokens of
    the prompt, leading prompt tokens that are stored when the round is submitted, tokens to
    generate (≥ 1), and the tool delay before the round.
    """

    first_round: IntArray
    start_s: NDArray[np.float64]
    start_after_round: IntArray
    prompt_tokens: NDArray[np.int32]
    hit_tokens: NDArray[np.int32]
    generated_tokens: NDArray[np.int32]
    delay_s: NDArray[np.float32]

    @property
    def agents(self) -> int:
        """The number of agents, including sub-agents."""
        return self.start_s.size

    @property
    def rounds(self) -> int:
        """The number of rounds of all agents."""
        return self.prompt_tokens.size

    def check(self) -> None:
        """Raise ``TraceError`` for the first invalid agent or round."""
        if self.agents == 0 or self.rounds == 0:
            raise TraceError(
                f"the workload has {self.agents} agents with {self.rounds} rounds; "
                "it needs at least one agent with one round"
            )
        empty = np.flatnonzero(np.diff(self.first_round) < 1)
        if empty.size:
            raise TraceError(f"agent {empty[0]} has no rounds; leave it out of the workload")
        wrong = np.flatnonzero(
            (self.prompt_tokens < 1)
            | (self.hit_tokens < 0)
            | (self.hit_tokens >= self.prompt_tokens)
            | (self.generated_tokens < 1)
            | ~(self.delay_s >= 0)
        )
        if wrong.size:
            row = int(wrong[0])
            agent = int(np.searchsorted(self.first_round, row, side="right")) - 1
            raise TraceError(
                f"round {row - self.first_round[agent]} of agent {agent} has "
                f"{self.prompt_tokens[row]} prompt, {self.hit_tokens[row]} hit and "
                f"{self.generated_tokens[row]} generated tokens and {self.delay_s[row]} s delay; "
                "it needs 0 ≤ hit < prompt, at least 1 generated token and a delay ≥ 0"
            )


# -------------------------------------------------------------------------------------- statistics
# Statistics of a workload, averaged over all turns and over trajectories (Table 2).

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
    """Return the statistics of ``table``, whose hits are multiples of ``block_tokens``."""
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
