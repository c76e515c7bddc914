"""A decode engine without a model: H2D copies of prompts, then steps that yield tokens.

One thread emulates the GPU of the engine's first rank: it broadcasts steps to all ranks, itself
included (``decode_steps``).  Another thread verifies the DE buffer before a prompt is copied to
HBM, and HBM after the copy.  A request joins the next step when all ranks have its KV.  That step
computes all of its tokens without KV: the append, if this engine computes it, else one token.
"""

import functools
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator

from dualpath.core.blocks import chain_root
from dualpath.core.errors import EngineLostError
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.threads import Thread
from dualpath_lab.emulated.checkable_kv import CheckedAt
from dualpath_lab.emulated.data_plane import DataPlane
from dualpath_lab.emulated.emulated_gpu import (
    ComputeClock,
    DecodeStep,
    Fill,
    Filled,
    NewToken,
    RankSteps,
)
from dualpath_lab.emulated.prefill import WAITING_S, attention_seconds
from dualpath_lab.emulated.requests import Answer, DecodeRequest
from dualpath_sim.simulator.rules import decode_step_s, pass_s

log = logging.getLogger(__name__)


class DecodeEngine:
    """Generates tokens after prompts; ``submit`` and ``abort`` may be called from any thread."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._costs = plane.settings.costs.decode
        self._append_costs = plane.settings.costs.prefill
        self._append_attention = attention_seconds(self._append_costs)
        self._threads = plane.threads
        self._clock = ComputeClock(plane.now_s, plane.threads.sleep)
        self._wake = self._threads.condition()
        #: Requests that wait for HBM.
        self._waiting: dict[DecodeRequest, None] = {}
        self._filling: deque[DecodeRequest] = deque()
        self._fills: dict[int, _RunningFill] = {}
        self._numbers = itertools.count()
        self._joining: deque[DecodeRequest] = deque()
        self._running: list[DecodeRequest] = []
        self._closing = False
        self._steps = RankSteps(plane)
        self._thread: Thread | None = None
        plane.on_rank_event = self._on_filled
        plane.hbm.on_freed = plane.hbm_changed

    def start(self) -> None:
        """Begin to serve."""
        self._thread = self._threads.start("decode", self._run)

    def close(self) -> None:
        """Stop after the current step; unfinished requests get no final answer."""
        with self._wake:
            self._closing = True
            waiting, self._waiting = self._waiting, {}
            self._wake.notify()
        for request in waiting:
            self._plane.hbm.cancel(request)
        if self._thread is not None:
            self._thread.join()
        self._steps.close()

    def submit(self, request: DecodeRequest) -> None:
        """Queue a prompt; HBM is allocated in FIFO order, if it is not reserved for it already."""
        if request.decode_transfer.in_hbm:
            self._use_reserved(request)
            return
        with self._wake:
            self._waiting[request] = None
            self._wake.notify()
        needed = self._plane.geometry.blocks_for(request.capacity_tokens)
        self._plane.hbm.request(request, needed, functools.partial(self._placed, request))

    def abort(self, request: DecodeRequest) -> None:
        """Abort a request; its HBM is freed as soon as no transfer writes to it."""
        with self._wake:
            request.aborted = True
            self._waiting.pop(request, None)
            self._wake.notify()
        self._plane.hbm.cancel(request)

    def _placed(self, request: DecodeRequest, blocks: tuple[int, ...]) -> None:
        """Start the H2D copy of a request that has got HBM."""
        request.hbm_blocks += blocks
        with self._wake:
            self._waiting.pop(request, None)
        self._steps.soon(functools.partial(self._compare_buffer, request))
        self._plane.hbm_changed()

    def _use_reserved(self, request: DecodeRequest) -> None:
        """Start the load of a request for which HBM is reserved; it fails if it is not any more.

        Behind another proxy the answer may be longer than the reservation: more HBM is allocated.
        """
        request_id = request.decode_transfer.request_id
        reserved = self._plane.manager.reserved_hbm.blocks_of(request_id)
        if not reserved:
            log.warning("request %s: no HBM is reserved for it any more", request_id)
            self._end(request, Answer(finish_reason="error"))
            return
        request.hbm_blocks, request.reserved_blocks = reserved, len(reserved)
        missing = self._plane.geometry.blocks_for(request.capacity_tokens) - len(reserved)
        if missing > 0:
            with self._wake:
                self._waiting[request] = None
            self._plane.hbm.request(request, missing, functools.partial(self._placed, request))
        else:
            self._steps.soon(functools.partial(self._compare_buffer, request))

    # ------------------------------------------------------------------ decode transfers

    def _compare_buffer(self, request: DecodeRequest) -> None:
        if request.aborted:
            self._end(request, Answer(finish_reason="abort"))
            return
        transfer = request.decode_transfer
        geometry, last_token = self._plane.geometry, transfer.prompt_tokens - 1
        seen_from = [geometry.seen_from(layer, last_token) for layer in range(geometry.layers)]
        for run in transfer.in_buffer:
            wrong = self._plane.verify_buffer(
                CheckedAt.DE_BUFFER,
                transfer.request_id,
                run.slots,
                request.prefix.seeds[run.blocks.first :],
                [max(first - run.blocks.first, 0) for first in seen_from],
            )
            if wrong is not None:
                self._end(request, Answer(finish_reason="error", error=wrong))
                return
        with self._wake:
            self._filling.append(request)
            self._wake.notify()

    def _on_filled(self, rank: int, event: object) -> None:
        """Record that a rank has ended its share of a fill; after all ranks, start decoding."""
        assert isinstance(event, Filled)
        with self._wake:
            fill = self._fills[event.number]
            fill.results[rank] = event
            if len(fill.results) < self._plane.place.group.size:
                return
            del self._fills[event.number]
        self._filled(fill.request, fill.results)

    def _filled(self, request: DecodeRequest, results: dict[int, Filled]) -> None:
        in_order = [(rank, results[rank]) for rank in sorted(results)]
        errors = [f"rank {rank}: {result.error}" for rank, result in in_order if result.error]
        if errors:
            # Wrong KV is not reported, because other ranks may have read reused slots.
            log.warning("request %s: %s", request.decode_transfer.request_id, "; ".join(errors))
            self._end(request, Answer(finish_reason="error"))
            return
        request.reserved_blocks = 0
        for rank, filled in results.items():
            if rank:
                self._plane.verifier.add(filled.counts)
        if found := [result.wrong for _, result in in_order if result.wrong]:
            self._plane.report_wrong(found)
            self._end(request, Answer(finish_reason="error", error=found[0]))
            return
        for token in request.prior_tokens:
            request.prefix.append(token)
        with self._wake:
            self._joining.append(request)
            self._wake.notify()

    # ------------------------------------------------------------------ the GPU's thread

    def _run(self) -> None:
        try:
            while self._gather():
                if self._running:
                    self._clock.work(self._step_s() / self._plane.settings.speedup)
                self._step()
        except EngineLostError as error:
            log.error("no more steps: %s", error)  # The traffic manager has failed, too.

    def _gather(self) -> bool:
        """Wait until there is work; return False when the engine closes."""
        if not self._running:
            self._await_work()
            self._clock.begin()
        with self._wake:
            self._running += self._joining
            self._joining.clear()
            aborted = [request for request in self._running if request.aborted]
            self._running = [request for request in self._running if not request.aborted]
            closing = self._closing
        for request in aborted:
            self._end(request, Answer(finish_reason="abort"))
        return not closing

    def _await_work(self) -> None:
        with self._wake:
            while not (self._joining or self._filling or self._closing):
                waits = bool(self._fills or self._waiting)
                if not self._wake.wait(WAITING_S if waits else None):
                    self._plane.manager.made_step()  # It waits for HBM or for a copy into it.

    def _step_s(self) -> float:
        costs = self._costs
        contexts = [request.computed_tokens + 1 for request in self._running]
        window = costs.window_tokens
        attended = sum(min(c, window) for c in contexts) if window else sum(contexts)
        return self._appends_s() + decode_step_s(
            len(contexts),
            attended,
            sum(contexts),
            1,
            costs.step_s,
            costs.request_s,
            costs.pair_s,
            costs.index_pair_s,
        )

    def _appends_s(self) -> float:
        """Return what the appends of the next step add to it: a forward pass of a PE over them."""
        chunks = [
            (request.computed_tokens, request.prefix.tokens - request.computed_tokens)
            for request in self._running
        ]
        appends = [(cached, tokens) for cached, tokens in chunks if tokens > 1]
        if not appends:
            return 0.0
        costs = self._append_costs
        return pass_s(
            costs.attention_batch_s + sum(self._append_attention.flops(*one) for one in appends),
            sum(tokens for _, tokens in appends),
            costs.batch_s,
            costs.feed_forward_token_s,
            costs.exchange_token_s,
            costs.interleaved,
        )

    def _step(self) -> None:
        """Generate a token of every request; full blocks are persisted before answers are sent."""
        tokens = tuple(token for request in self._running for token in self._uncomputed(request))
        full = tuple(block for request in self._running for block in self._computed(request))
        step = DecodeStep(tokens, full, tuple(self._begin_fills()))
        self._plane.group.broadcast(step)
        self._steps.run(step)
        self._plane.manager.made_step()
        unfinished = []
        for request in self._running:
            token = request.prefix.next_token
            request.remaining_tokens -= 1
            if request.remaining_tokens == 0:
                self._end(request, Answer((token,), "length"))
                continue
            request.prefix.append(token)
            request.deliver(Answer((token,)))
            unfinished.append(request)
        with self._wake:
            self._running = unfinished

    def _uncomputed(self, request: DecodeRequest) -> Iterator[NewToken]:
        """Yield where the KV of a request's tokens without KV is written."""
        for token in range(request.computed_tokens, request.prefix.tokens):
            block, place = divmod(token, self._plane.geometry.block_tokens)
            yield NewToken(request.hbm_blocks[block], place, request.prefix.seeds[block, place])

    def _computed(self, request: DecodeRequest) -> Iterator[GeneratedBlock]:
        """Count all tokens of a request as computed; yield its blocks that are now full."""
        block_tokens, keys = self._plane.geometry.block_tokens, request.prefix.keys
        in_buffer = request.decode_transfer.prompt_tokens
        first = max(request.computed_tokens, in_buffer) // block_tokens
        request.computed_tokens = request.prefix.tokens
        for block in range(first, request.computed_tokens // block_tokens):
            parent = keys[block - 1] if block else chain_root()
            transfer, hbm_block = request.decode_transfer, request.hbm_blocks[block]
            yield GeneratedBlock(
                hbm_block, keys[block], parent, transfer.tenant, transfer.request_id
            )

    def _begin_fills(self) -> Iterable[Fill]:
        """Yield the prompts that are copied from this step on."""
        with self._wake:
            requests = list(self._filling)
            self._filling.clear()
            numbered = [(next(self._numbers), request) for request in requests]
            self._fills.update((n, _RunningFill(request)) for n, request in numbered)
        for number, request in numbered:
            transfer = request.decode_transfer
            loaded = transfer.loaded_blocks(self._plane.geometry.block_tokens)
            seeds = request.prefix.seeds[:loaded]
            yield Fill(number, transfer, request.hbm_blocks, seeds)

    def _end(self, request: DecodeRequest, answer: Answer) -> None:
        self._plane.manager.ended(request.decode_transfer.request_id)
        self._plane.hbm.free(request.hbm_blocks[request.reserved_blocks :])
        request.hbm_blocks, request.reserved_blocks = (), 0
        self._plane.hbm_changed()
        request.deliver(answer)


class _RunningFill:
    """A request while its prompt is copied, and the results of ranks that have finished."""

    def __init__(self, request: DecodeRequest) -> None:
        self.request = request
        self.results: dict[int, Filled] = {}
