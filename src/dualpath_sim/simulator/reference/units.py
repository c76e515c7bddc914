"""Units: the engines that make forward passes or decode steps together (§6.2)."""

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from dualpath.core.cluster import Role
from dualpath.policy.batching import (
    NO_LOAD_BOUND,
    AttentionGeometry,
    ComputeQuota,
    LayerTimeEstimate,
    LoadBound,
)
from dualpath_sim.simulator.derived import ClusterLayout, Limits, load_bound
from dualpath_sim.simulator.reference.machine import EventQueue
from dualpath_sim.simulator.rules import (
    chunk_limit_tokens,
    decode_context_tokens,
    decode_step_ns,
    joining_step,
    pass_s,
    seen_tokens,
    steps_ns,
)
from dualpath_sim.simulator.settings import DecodeCosts, PrefillCosts, Setup


class PrefillWork:
    """A loaded request at its PE; ``done_tokens`` of its prompt have KV, hits included."""

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
        self,
        first: int,
        count: int,
        costs: PrefillCosts,
        limits: Limits,
        block_tokens: int,
        loads: LoadBound = NO_LOAD_BOUND,
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
            loads,
        )

    def add(self, engine: int, work: PrefillWork) -> None:
        """Let a request wait at its engine."""
        self.queues[engine - self.first].append(work)

    def leave(self, engines: int) -> None:
        """Remove so many idle engines; the others make the passes."""
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


Finished = Callable[[int], None]


class DecodeUnit:
    """Lock-step decoding of ``engines`` engines.

    ``_tokens`` is the virtual time: how many tokens a request would have got that was there from
    the beginning.  A request that joins waits for the end of the current step.  The step time
    follows from the unit's requests and their contexts and is constant between joins and leaves.
    While the unit computes an append (``stall``) the virtual time stands still: it continues at
    ``_since_ns``, which is in the future until then.
    """

    def __init__(
        self, events: EventQueue, engines: int, costs: DecodeCosts, finished: Finished
    ) -> None:
        self._events = events
        self._engines = engines
        self._costs = costs
        self._finished = finished
        self._tokens = 0.0
        self._since_ns = 0
        self._step_ns = 1
        self._ends: list[tuple[float, int, int, int]] = []
        self._joined = 0
        self._version = 0
        self._context_tokens = 0
        self._window_tokens = 0

    def join(self, round_index: int, prompt_tokens: int, generated_tokens: int) -> int:
        """Let a request decode its second token onwards; return when the second is due."""
        self._advance()
        first = joining_step(self._tokens)
        context = decode_context_tokens(prompt_tokens, generated_tokens)
        self._count(context)
        end = float(first + generated_tokens - 1)
        heapq.heappush(self._ends, (end, self._joined, round_index, context))
        self._joined += 1
        self._expect_next()
        return self._since_ns + steps_ns(first + 1 - self._tokens, self._step_ns)

    def stall(self, duration_ns: int) -> None:
        """Compute an append for ``duration_ns``; all requests wait for it."""
        self._advance()
        self._since_ns += duration_ns
        self._expect_next()

    @property
    def running_step_ns(self) -> int:
        """The duration of a step, 0 without requests."""
        return self._step_ns if self._ends else 0

    def leave(self, engines: int) -> None:
        """Remove so many idle engines; the steps of the others take longer."""
        self._advance()
        self._engines -= engines
        if self._engines:
            self._expect_next()

    def _advance(self) -> None:
        now_ns = self._events.now_ns
        if now_ns < self._since_ns:
            return
        if self._ends:
            self._tokens += (now_ns - self._since_ns) / self._step_ns
        self._since_ns = now_ns

    def _count(self, context_tokens: int, sign: int = 1) -> None:
        self._context_tokens += sign * context_tokens
        self._window_tokens += sign * seen_tokens(context_tokens, self._costs.window_tokens)

    def _expect_next(self) -> None:
        costs = self._costs
        self._version += 1
        self._step_ns = decode_step_ns(
            len(self._ends),
            self._window_tokens,
            self._context_tokens,
            self._engines,
            costs.step_s,
            costs.request_s,
            costs.pair_s,
            costs.index_pair_s,
        )
        if self._ends:
            wait_ns = steps_ns(self._ends[0][0] - self._tokens, self._step_ns)
            self._events.at(self._since_ns + wait_ns, self._end_next, self._version)

    def _end_next(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._tokens = max(self._tokens, self._ends[0][0])
        ended = []
        while self._ends and self._ends[0][0] <= self._tokens:
            _, _, round_index, context = heapq.heappop(self._ends)
            self._count(context, -1)
            ended.append(round_index)
        self._expect_next()
        for round_index in ended:
            self._finished(round_index)


class Units:
    """All units, and the unit of each engine; units without engines stay in the lists."""

    def __init__(
        self,
        setup: Setup,
        limits: Limits,
        layout: ClusterLayout,
        events: EventQueue,
        finished: Finished,
    ) -> None:
        self._setup = setup
        self._limits = limits
        self._events = events
        self._finished = finished
        self.prefill: list[PrefillUnit] = []
        self.decode: list[DecodeUnit] = []
        self.prefill_of: dict[int, int] = {}
        self.decode_of: dict[int, int] = {}
        for unit in layout.prefill_units:
            self._add(unit, Role.PREFILL)
        for unit in layout.decode_units:
            self._add(unit, Role.DECODE)

    def leave(self, engines: range, role: Role) -> None:
        """Remove idle engines from their units."""
        for engine in engines:
            if role is Role.PREFILL:
                self.prefill[self.prefill_of.pop(engine)].leave(1)
            else:
                self.decode[self.decode_of.pop(engine)].leave(1)

    def join(self, engines: range, role: Role) -> None:
        """Add a node's engines to a role: as one unit with lock-step, else as one unit each."""
        if self._setup.cluster.lockstep:
            self._add(engines, role)
        else:
            for engine in engines:
                self._add(range(engine, engine + 1), role)

    def _add(self, engines: range, role: Role) -> None:
        setup, count = self._setup, len(engines)
        if role is Role.PREFILL:
            self.prefill_of.update(dict.fromkeys(engines, len(self.prefill)))
            block_tokens = setup.cluster.block_tokens
            unit = PrefillUnit(
                engines[0],
                count,
                setup.model.prefill,
                self._limits,
                block_tokens,
                load_bound(setup),
            )
            self.prefill.append(unit)
        else:
            self.decode_of.update(dict.fromkeys(engines, len(self.decode)))
            costs_of_step = setup.model.decode
            self.decode.append(DecodeUnit(self._events, count, costs_of_step, self._finished))
