"""What a simulation leaves behind, as columns; times are virtual nanoseconds, -1 for never."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.settings import Setup

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

NS_PER_S = 1_000_000_000

Progress = Callable[[int, int, float], None]
"""Called now and then with (rounds finished, rounds in all, virtual seconds)."""


class TurnTimes(NamedTuple):
    """Per round, in the order of ``AgentTable``: when each stage was reached.

    submitted → assigned (PE, DE and read side known) → granted (buffers reserved, the read is
    queued) → loaded (hit KV in DRAM, ready at the PE) → prefill (its first chunk enters a batch)
    → first_token → decoding (KV in the DE's HBM) → second_token → finished.  A request that
    generates one token has no later token: its decoding and second_token equal first_token, and
    it is finished when its KV has reached the DE.
    """

    submitted_ns: IntArray
    assigned_ns: IntArray
    granted_ns: IntArray
    loaded_ns: IntArray
    prefill_ns: IntArray
    first_token_ns: IntArray
    decoding_ns: IntArray
    second_token_ns: IntArray
    finished_ns: IntArray


class Decisions(NamedTuple):
    """Assignments in the order they were made; engines by number, reasons by index.

    Cached tokens were expected in the engine's DRAM and are not read from storage.
    Reasons are places of ``PE_REASONS`` and ``DE_REASONS`` (``policy.events``), and of
    ``READ_REASONS`` (``policy.read_side``).
    """

    round: IntArray
    prefill_engine: IntArray
    decode_engine: IntArray
    prefill_read_tokens: IntArray
    decode_read_tokens: IntArray
    pe_reason: NDArray[np.int8]
    de_reason: NDArray[np.int8]
    read_reason: NDArray[np.int8]
    prefill_cached_tokens: IntArray
    decode_cached_tokens: IntArray


class Batches(NamedTuple):
    """Forward passes of prefill units in the order they started.

    ``attention_max_s`` and ``attention_mean_s`` over the engines of the unit (Fig. 14);
    ``tokens`` computed in all engines together.
    """

    start_ns: IntArray
    end_ns: IntArray
    unit: IntArray
    tokens: IntArray
    attention_max_s: FloatArray
    attention_mean_s: FloatArray


class LinkUse(NamedTuple):
    """Bytes per window of ``window_ns`` and node (W × nodes); the prefill nodes come first.

    Reads are spread over the time their SNIC served them.  CNIC bytes are those of the engine
    side: H2D, D2H and transfers between engines, both directions added up per node.
    """

    window_ns: int
    snic_read_bytes: FloatArray
    snic_write_bytes: FloatArray
    cnic_bytes: FloatArray


class RoleMove(NamedTuple):
    """A node that changed its role: decided, out of work in the old role, serving in the new one.

    A time is -1 where the run ended before.  ``reason`` is that of ``policy.rebalance.Move``.
    """

    node: int
    from_role: Role
    to_role: Role
    reason: str
    decided_ns: int
    drained_ns: int
    joined_ns: int


class SimulationResult(NamedTuple):
    """One run.

    ``end_ns`` is when the last event happened; ``stopped`` if ``until_s`` ended the run
    with rounds unfinished.  ``events`` counts events of the kernel.  ``decisions`` is None
    unless recording was asked for.  ``moves`` are in the order in which they were decided.
    """

    setup: Setup
    agents: AgentTable
    turns: TurnTimes
    batches: Batches
    links: LinkUse
    decisions: Decisions | None
    end_ns: int
    stopped: bool
    events: int
    dram_tier_hit_tokens: int = 0
    moves: tuple[RoleMove, ...] = ()

    @property
    def jct_s(self) -> float:
        """Job completion time: when the last round finished."""
        return float(self.turns.finished_ns.max()) / NS_PER_S

    def ttft_s(self) -> FloatArray:
        """Time to first token per round, NaN where there was none."""
        return _between_s(self.turns.submitted_ns, self.turns.first_token_ns)

    def ttst_s(self) -> FloatArray:
        """Time from first to second token per round, NaN where there was none."""
        one = self.agents.generated_tokens < 2
        times = _between_s(self.turns.first_token_ns, self.turns.second_token_ns)
        times[one] = np.nan
        return times

    def tpot_s(self) -> FloatArray:
        """Mean time per token after the first, per round; NaN for rounds of one token."""
        later = np.maximum(self.agents.generated_tokens - 1, 1)
        whole_s = _between_s(self.turns.first_token_ns, self.turns.finished_ns)
        times: FloatArray = whole_s / later
        times[self.agents.generated_tokens < 2] = np.nan
        return times

    def agent_jct_s(self) -> FloatArray:
        """Completion time per agent from its first submission; NaN where unfinished."""
        first, last = self.agents.first_round[:-1], self.agents.first_round[1:] - 1
        return _between_s(self.turns.submitted_ns[first], self.turns.finished_ns[last])


def _between_s(start_ns: IntArray, end_ns: IntArray) -> FloatArray:
    reached = (start_ns >= 0) & (end_ns >= 0)
    times: FloatArray = np.where(reached, (end_ns - start_ns) / NS_PER_S, np.nan)
    return times
