"""The simulator's input: all rounds of all agents as arrays, known before a run starts."""

from typing import NamedTuple

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
