"""A prefill unit: engines that make forward passes together (§6.2)."""

from collections import deque
from typing import NamedTuple

from dualpath.model.sim.derived import Limits
from dualpath.model.sim.rules import chunk_limit_tokens, pass_s
from dualpath.model.sim.settings import PrefillCosts
from dualpath.policy.batching import AttentionGeometry, ComputeQuota, LayerTimeEstimate


class PrefillWork:
    """A loaded request at its PE; ``done_tokens`` have KV, of which hits came from storage."""

    __slots__ = ("done_tokens", "hit_tokens", "prompt_tokens", "round")

    def __init__(self, round_index: int, hit_tokens: int, prompt_tokens: int) -> None:
        self.round = round_index
        self.hit_tokens = hit_tokens
        self.prompt_tokens = prompt_tokens
        self.done_tokens = hit_tokens


class Chunk(NamedTuple):
    """Tokens of a request in one pass: ``bsz`` behind ``cached``."""

    engine: int
    work: PrefillWork
    cached: int
    bsz: int


class Pass(NamedTuple):
    """One forward pass: its chunks in order of engine and queue, and its computation time."""

    chunks: list[Chunk]
    compute_s: float
    attention_max_s: float
    attention_mean_s: float
    tokens: int


class PrefillUnit:
    """Queues of the engines ``first`` to ``first + count`` and the pass under way."""

    def __init__(
        self, first: int, count: int, costs: PrefillCosts, limits: Limits, block_tokens: int
    ) -> None:
        self.first = first
        self.queues: list[deque[PrefillWork]] = [deque() for _ in range(count)]
        self.busy = False
        self._left = 0
        self._costs = costs
        self._limits = limits
        # Attention is costed in seconds, so that one FLOP of the policy is one second here.
        self._quota = ComputeQuota(
            AttentionGeometry(
                pair_flops=costs.pair_s,
                token_flops=costs.attention_token_s,
                window_tokens=costs.window_tokens or None,
                index_pair_flops=costs.index_pair_s,
            ),
            LayerTimeEstimate(overhead_s=costs.attention_batch_s, flops_per_s=1.0),
            limits.compute_quota_s,
            block_tokens,
        )

    def add(self, engine: int, work: PrefillWork) -> None:
        """Let a request wait at its engine."""
        self.queues[engine - self.first].append(work)

    def leave(self, engines: int) -> None:
        """So many engines without work are gone; a pass is the work of those that are left."""
        self._left += engines

    def form_pass(self) -> Pass | None:
        """Pack the next pass, None without work."""
        chunks: list[Chunk] = []
        attention_max_s = attention_sum_s = 0.0
        for row, queue in enumerate(self.queues):
            if not queue:
                continue
            self._pack(self.first + row, queue, chunks)
            attention_s = self._quota.predicted_s
            attention_max_s = max(attention_max_s, attention_s)
            attention_sum_s += attention_s
        if not chunks:
            return None
        tokens = sum(chunk.bsz for chunk in chunks)
        costs, engines = self._costs, len(self.queues) - self._left
        compute_s = pass_s(
            attention_max_s,
            tokens / engines,
            costs.batch_s,
            costs.feed_forward_token_s,
            costs.exchange_token_s,
            costs.interleaved,
        )
        mean_s = attention_sum_s / engines
        return Pass(chunks, compute_s, attention_max_s, mean_s, tokens)

    def _pack(self, engine: int, queue: deque[PrefillWork], chunks: list[Chunk]) -> None:
        """Add requests in order while quota, cap and HBM allow; the last may be cut (§6.2)."""
        self._quota.reset()
        tokens_left = self._limits.batch_cap_tokens
        hbm_left = self._limits.prefill_hbm_tokens
        for work in queue:
            cached = work.done_tokens
            limit = chunk_limit_tokens(tokens_left, hbm_left, cached)
            if limit <= 0:
                break
            bsz = self._quota.admit(cached, work.prompt_tokens - cached, limit)
            if bsz == 0:
                break
            chunks.append(Chunk(engine, work, cached, bsz))
            tokens_left -= bsz
            hbm_left -= cached + bsz
            if self._quota.closed:
                break
