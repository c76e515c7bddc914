"""A prefill engine without a model: its passes load KV, compute for a time, write KV and send it.

One thread emulates the GPU of the engine's first rank.  It schedules passes and broadcasts them to
all ranks, itself included (``passes``).  The transfers are the same as in a vLLM engine
(``engine.forward_pass``).
"""

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dualpath.core.cluster import Role
from dualpath.core.errors import EngineLostError
from dualpath.core.runs import HitRun
from dualpath.engine.passes.attention_times import ATTENTION_TRACK
from dualpath.engine.passes.forward_pass import admit_chunk
from dualpath.engine.passes.prefill_passes import RELEASED
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.threads import Thread
from dualpath.plan.steps import chunk_of
from dualpath.policy.batching import (
    AttentionGeometry,
    ComputeQuota,
    LayerTimeEstimate,
    LoadBound,
)
from dualpath_lab.emulated.checkable_kv import CheckedAt
from dualpath_lab.emulated.data_plane import DataPlane, EmulatedHbm
from dualpath_lab.emulated.emulated_gpu import (
    PassPart,
    PassResult,
    PassWork,
    RankPasses,
    RunningPass,
)
from dualpath_lab.emulated.lock_step import LockStep, NoLockStep
from dualpath_lab.emulated.requests import Answer, PrefillRequest
from dualpath_lab.emulated.settings import EmulatedSettings
from dualpath_sim.simulator.derived import NO_QUOTA_S
from dualpath_sim.simulator.rules import pass_s
from dualpath_sim.simulator.settings import PrefillCosts

# ------------------------------------------------------------------------------------------- batch
# Selects the chunks of a forward pass (§6.2) and its compute time, as in the simulator.


class Chunk(NamedTuple):
    """Tokens of a request in one pass: ``bsz`` tokens after ``cached`` cached ones."""

    request: PrefillRequest
    cached: int
    bsz: int


class Batch(NamedTuple):
    """A forward pass; ``compute_s`` excludes waiting for KV, ``attention_s`` is part of it."""

    chunks: list[Chunk]
    compute_s: float
    attention_s: float


class BatchFormer:
    """Batches waiting requests of one engine in FIFO order, without lock step with other ranks."""

    def __init__(self, settings: EmulatedSettings, hbm: EmulatedHbm) -> None:
        engine = settings.engine
        limited = engine.mode.compute_quota and engine.compute_quota_s > 0
        self._costs = settings.costs.prefill
        self._cap_tokens = None if engine.mode.compute_quota else settings.batch_cap_tokens
        self._geometry = settings.geometry
        self._resident = settings.layer_regions >= settings.geometry.layers
        self._speedup = settings.speedup
        self._hbm = hbm
        self._quota = ComputeQuota(
            attention_seconds(self._costs),
            LayerTimeEstimate(overhead_s=self._costs.attention_batch_s, flops_per_s=1.0),
            engine.compute_quota_s if limited else NO_QUOTA_S,
            settings.geometry.block_tokens,
            LoadBound(0.0, self._costs.batch_s, self._costs.feed_forward_token_s),
        )

    def form(self, waiting: Iterable[PrefillRequest], load_token_s: float = 0.0) -> Batch | None:
        """Return the next pass, None if nothing can be computed now.

        HBM for the whole prompt is allocated when a request first enters a pass.  ``load_token_s``
        is how long the load of a token takes, 0 for loads without a bound.
        """
        # The quota has the times of the cost table, which computation is faster than by a factor.
        self._quota.reset(load_token_s * self._speedup)
        chunks: list[Chunk] = []
        left = self._cap_tokens
        for request in waiting:
            if left == 0 or not self._place(request):
                break
            cached = request.done_tokens
            bsz = admit_chunk(
                self._quota,
                request.prefill_transfer,
                cached,
                request.prefix.tokens - cached,
                left,
                block_tokens=self._geometry.block_tokens,
                resident=self._resident,
            )
            if bsz == 0:
                break
            chunks.append(Chunk(request, cached, bsz))
            left = None if left is None else left - bsz
            if self._quota.closed:
                break
        if not chunks:
            return None
        return Batch(chunks, self._compute_s(chunks), self._quota.predicted_s)

    def _place(self, request: PrefillRequest) -> bool:
        if not request.hbm_blocks:
            blocks = self._hbm.allocate(self._geometry.blocks_for(request.prefix.tokens))
            if blocks is None:
                return False
            request.hbm_blocks = blocks
        return True

    def _compute_s(self, chunks: list[Chunk]) -> float:
        costs = self._costs
        return pass_s(
            self._quota.predicted_s,
            sum(chunk.bsz for chunk in chunks),
            costs.batch_s,
            costs.feed_forward_token_s,
            costs.exchange_token_s,
            costs.interleaved,
        )


def attention_seconds(costs: PrefillCosts) -> AttentionGeometry:
    """Return the attention geometry in seconds: one FLOP of the policy stands for one second."""
    return AttentionGeometry(
        pair_flops=costs.pair_s,
        token_flops=costs.attention_token_s,
        window_tokens=costs.window_tokens or None,
        index_pair_flops=costs.index_pair_s,
    )


log = logging.getLogger(__name__)

#: How often a core that cannot begin the work that waits reports that it is alive.
WAITING_S = 0.25
#: Track of the GPU's thread in traces.
ENGINE_TRACK = "engine"


class StartedPass(NamedTuple):
    """A pass that has started: its batch and its transfers."""

    batch: Batch
    running: RunningPass


class PrefillEngine:
    """Prefills prompts and samples one token each; ``submit`` and ``abort`` from any thread.

    If KV moves layer by layer, the next pass starts during the last layers of a pass if requests
    are waiting, and a second thread ends passes in order, so that the GPU does not wait for
    either.  An engine of several ranks ends each pass before it starts the next.

    ``lock_step`` is that of its data-parallel group, set before the first request.
    """

    def __init__(self, plane: DataPlane) -> None:
        self.lock_step: LockStep = NoLockStep()
        self._plane = plane
        self._settings = plane.settings
        self._former = BatchFormer(plane.settings, plane.hbm)
        self._threads = plane.threads
        self._passes = RankPasses(plane)
        mode = plane.settings.engine.mode
        streams = mode.layerwise or not mode.moves_bytes
        self._overlaps = streams and plane.settings.tensor_parallel_size == 1
        self._wake = self._threads.condition()
        self._waiting: deque[PrefillRequest] = deque()
        self._computed: deque[StartedPass] = deque()
        self._ending = 0
        self._closing = False
        self._gpu_ended = False
        self._thread: Thread | None = None
        self._ender: Thread | None = None
        plane.hbm.on_freed = self._hbm_freed

    def start(self) -> None:
        """Begin to serve."""
        self._thread = self._threads.start("prefill", self._run)
        self._ender = self._threads.start("prefill-ends", self._end_passes)

    def close(self) -> None:
        """Stop after the running passes; waiting requests are not answered."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self.lock_step.close()
        for thread in (self._thread, self._ender):
            if thread is not None:
                thread.join()

    def submit(self, request: PrefillRequest) -> None:
        """Queue a prompt; its hits were checked to match its keys."""
        hit_blocks = request.prefill_transfer.hit_blocks
        request.done_tokens = hit_blocks * self._plane.geometry.block_tokens
        with self._wake:
            self._waiting.append(request)
            self._wake.notify_all()

    def abort(self, request: PrefillRequest) -> None:
        """Abort a request; it ends after its running passes."""
        with self._wake:
            request.aborted = True
            if request in self._waiting:
                self._waiting.remove(request)
                if not request.passes:
                    self._leave(request)

    def _hbm_freed(self) -> None:
        with self._wake:
            self._wake.notify_all()
        self._plane.hbm_changed()

    # ------------------------------------------------------------------ the GPU's thread

    def _run(self) -> None:
        try:
            self._compute_passes()
        except EngineLostError as error:
            log.error("no more passes: %s", error)  # The traffic manager has failed, too.
        except Exception as error:  # A bug: without failing the engine, requests would hang.
            self._defect(error)
        with self._wake:
            self._gpu_ended = True
            self._wake.notify_all()

    def _compute_passes(self) -> None:
        before: StartedPass | None = None
        given: StartedPass | None = None
        while True:
            if was_idle := given is None:
                if (batch := self._next_batch()) is None:
                    return
                given = self._begin(batch, before)
            assert given is not None
            following: list[StartedPass] = []
            self._enter(given)
            with self._timed("pass", compute_s=given.running.work.compute_s, was_idle=was_idle):
                start_next = functools.partial(self._begin_next, given, following)
                start_ns = self._plane.manager.trace.now_ns()
                self._passes.compute(given.running, start_next, was_idle=was_idle)
                self._trace_attention(given.batch, start_ns)
            self._hand_over(given)
            before = given if self._overlaps else None
            given = following[0] if following else None

    def _enter(self, given: StartedPass) -> None:
        """Wait for the other ranks of the group; the pass takes as long as that of the slowest."""
        work = given.running.work
        group_s = self.lock_step.enter(work.compute_s)
        given.running.work = work._replace(compute_s=group_s)

    def _trace_attention(self, batch: Batch, start_ns: int) -> None:
        """Record the attention time of a pass; that of an emulated GPU is as predicted."""
        trace, attention_s = self._plane.manager.trace, batch.attention_s / self._settings.speedup
        times = {"predicted_s": attention_s, "measured_s": attention_s}
        trace.record("pass", ATTENTION_TRACK, start_ns, trace.now_ns(), **times)

    def _next_batch(self) -> Batch | None:
        """Return the next pass; None when the engine closes."""
        with self._wake:
            while not self._closing:
                if (batch := self._form()) is not None:
                    return batch
                self.lock_step.idle()
                if not self._wake.wait(WAITING_S if self._waiting else None):
                    self._plane.manager.made_step()  # It waits for HBM.
        return None

    def _form(self) -> Batch | None:
        batch = self._former.form(self._waiting, self._plane.manager.load_token_s)
        if batch is None:
            return None
        for request, cached, bsz in batch.chunks:
            request.passes += 1
            request.done_tokens = cached + bsz
            if request.done_tokens == request.prefix.tokens:
                self._waiting.remove(request)
        return batch

    def _begin_next(self, before: StartedPass, following: list[StartedPass]) -> None:
        """Start the next pass while ``before`` is computed, if requests are waiting."""
        if not self._overlaps or following:
            return
        with self._wake:
            batch = None if self._closing else self._form()
        if batch is not None:
            following.append(self._begin(batch, before))

    def _begin(self, batch: Batch, before: StartedPass | None) -> StartedPass:
        """Start a pass on all ranks; the pass ``before``, if given, may still be running."""
        self._plane.hbm_changed()
        with self._timed("compare"):
            wrong = self._verify_buffer(batch)
        parts = tuple(self._part(chunk) for chunk in batch.chunks)
        work = PassWork(parts, batch.compute_s / self._settings.speedup, wrong)
        self._plane.group.broadcast(work)
        running = self._passes.begin(work, None if before is None else before.running)
        return StartedPass(batch, running)

    def _hand_over(self, given: StartedPass) -> None:
        """Let the second thread end a pass; wait for its end if passes must not overlap."""
        with self._wake:
            self._computed.append(given)
            self._ending += 1
            self._wake.notify_all()
            if not self._overlaps:
                self._wake.wait_for(lambda: not self._ending or self._closing)

    @contextlib.contextmanager
    def _timed(self, what: str, **args: object) -> Iterator[None]:
        """Record a span of this thread in the trace."""
        trace = self._plane.manager.trace
        start_ns = trace.now_ns()
        yield
        trace.record(what, ENGINE_TRACK, start_ns, trace.now_ns(), **args)

    def _verify_buffer(self, batch: Batch) -> dict[str, str]:
        """Verify the blocks that the PE has read from storage, once per request.

        Return messages by request id for wrong ones.
        """
        wrong: dict[str, str] = {}
        for request, cached, _ in batch.chunks:
            transfer = request.prefill_transfer
            if cached != transfer.hit_blocks * self._plane.geometry.block_tokens:
                continue
            for run in transfer.hits:
                if run.is_at(Role.PREFILL):
                    seeds = request.prefix.seeds[run.blocks.first :]
                    found = self._plane.verify_buffer(
                        CheckedAt.PE_BUFFER, transfer.request_id, run.slots, seeds, self._read(run)
                    )
                    if found is not None:
                        wrong[transfer.request_id] = found
        return wrong

    def _read(self, run: HitRun) -> list[int]:
        """Return for each layer the first block of a run that was read for it."""
        geometry = self._plane.geometry
        layers = range(geometry.layers)
        return [run.windowless if geometry.is_window_layer(n) else 0 for n in layers]

    def _part(self, chunk: Chunk) -> PassPart:
        request = chunk.request
        blocks = chunk_of(chunk.cached, chunk.bsz, self._plane.geometry.block_tokens)
        part = PrefillChunk(request.prefill_transfer, blocks, request.hbm_blocks)
        return PassPart(part, request.prefix.seeds[: blocks.end])

    # ------------------------------------------------------------------ the thread that ends passes

    def _end_passes(self) -> None:
        try:
            while (given := self._next_computed()) is not None:
                self._settle(given.batch, self._end(given.running))
                with self._wake:
                    self._ending -= 1
                    self._wake.notify_all()
            return
        except EngineLostError as error:
            log.error("no more passes: %s", error)  # The traffic manager has failed, too.
        except Exception as error:  # A bug, as in ``_run``.
            self._defect(error)
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def _defect(self, error: Exception) -> None:
        log.exception("no more passes")
        self._plane.manager.fail(f"forward passes have ended: {error}")

    def _next_computed(self) -> StartedPass | None:
        with self._wake:
            self._wake.wait_for(lambda: bool(self._computed) or self._gpu_ended)
            return self._computed.popleft() if self._computed else None

    def _end(self, running: RunningPass) -> PassResult:
        """Return the result of a pass on all ranks, including their findings.

        Findings about a request that was released in mid-pass are dropped: the slots from which
        other ranks loaded its KV may have been reused (``ForwardPass.failed``).
        """
        result, findings = self._passes.end(running)
        for rank, (everything, counts) in enumerate(findings):
            found = {
                request_id: message
                for request_id, message in everything.items()
                if result.failures.get(request_id) != RELEASED
            }
            self._plane.report_wrong(found.values())
            result.wrong.update(found)
            if rank:
                self._plane.verifier.add(counts)
        return result

    def _settle(self, batch: Batch, result: PassResult) -> None:
        for request, cached, bsz in batch.chunks:
            request_id = request.prefill_transfer.request_id
            with self._wake:
                request.passes -= 1
                request.failure = request.failure or result.failures.get(request_id)
                request.wrong = request.wrong or result.wrong.get(request_id)
                fails = request.failure is not None or request.aborted
                if fails and request in self._waiting:
                    self._waiting.remove(request)
                if request.passes or not (fails or cached + bsz == request.prefix.tokens):
                    continue
                self._leave(request)
            request.deliver(_answer(request))

    def _leave(self, request: PrefillRequest) -> None:
        if request.hbm_blocks:
            self._plane.hbm.free(request.hbm_blocks)
            request.hbm_blocks = ()
            self._wake.notify_all()  # Requests may be waiting for HBM.
        self._plane.hbm_changed()


def _answer(request: PrefillRequest) -> Answer:
    if request.failure is None:
        return Answer((request.prefix.next_token,), "length")
    return Answer(finish_reason="error", error=request.wrong)
