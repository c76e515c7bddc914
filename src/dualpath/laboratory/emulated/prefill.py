"""A prefill engine without a model: forward passes that wait, compute for a time, write and send.

One thread is the GPU.  Per layer it waits for stored KV, compares it, computes for its share of
the pass, writes the chunk's new KV and hands the layer to the traffic manager; the transfers are
those of a vLLM engine (``engine.forward_pass``).
"""

from collections import deque

from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun
from dualpath.engine.forward_pass import ForwardPass, PromptPart
from dualpath.engine.threads import Thread
from dualpath.laboratory.emulated.batch import Batch, BatchFormer, Chunk
from dualpath.laboratory.emulated.clock import ComputeClock
from dualpath.laboratory.emulated.data_plane import DataPlane
from dualpath.laboratory.emulated.requests import Answer, PrefillRequest
from dualpath.laboratory.emulated.verification import CheckedAt
from dualpath.plan.steps import chunk_of


class PrefillEngine:
    """Takes prompts and answers with one token each; ``submit`` and ``abort`` from any thread."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._settings = plane.settings
        self._former = BatchFormer(plane.settings, plane.hbm)
        self._threads = plane.threads
        self._clock = ComputeClock(plane.now_s, plane.threads.sleep)
        self._wake = self._threads.condition()
        self._waiting: deque[PrefillRequest] = deque()
        self._in_pass: set[PrefillRequest] = set()
        self._closing = False
        self._thread: Thread | None = None
        plane.hbm.freed = self._hbm_freed

    def start(self) -> None:
        """Begin to serve."""
        self._thread = self._threads.start("prefill", self._run)

    def close(self) -> None:
        """Stop after the pass under way; requests that wait are not answered."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def submit(self, request: PrefillRequest) -> None:
        """Queue a prompt, whose hits are known to be its own."""
        hit_blocks = request.prefill_transfer.hit_blocks
        request.done_tokens = hit_blocks * self._plane.geometry.block_tokens
        with self._wake:
            self._waiting.append(request)
            self._wake.notify()

    def abort(self, request: PrefillRequest) -> None:
        """The client left: drop the request, after the pass it is in."""
        with self._wake:
            request.aborted = True
            if request not in self._in_pass and request in self._waiting:
                self._leave(request)

    def _hbm_freed(self) -> None:
        with self._wake:
            self._wake.notify()
        self._plane.hbm_changed()

    # ------------------------------------------------------------------ the GPU's thread

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            wrong = self._wrong_in_buffer(batch)
            failures = self._forward(batch, wrong)
            self._settle(batch, failures, wrong)

    def _next_batch(self) -> Batch | None:
        """Return the next pass; None when the engine closes."""
        with self._wake:
            while not self._closing:
                if (batch := self._former.form(self._waiting)) is not None:
                    self._in_pass = {chunk.request for chunk in batch.chunks}
                    self._plane.hbm_changed()
                    return batch
                self._wake.wait()
        return None

    def _wrong_in_buffer(self, batch: Batch) -> dict[str, str]:
        """Compare what the PE has read from storage, once per request; return what is wrong."""
        wrong: dict[str, str] = {}
        for request, cached, _ in batch.chunks:
            transfer = request.prefill_transfer
            if cached != transfer.hit_blocks * self._plane.geometry.block_tokens:
                continue
            for run in transfer.hits:
                if run.side is Role.PREFILL:
                    seeds = request.prefix.seeds[run.blocks.first :]
                    found = self._plane.wrong_in_buffer(
                        CheckedAt.PE_BUFFER, transfer.request_id, run.slots, seeds
                    )
                    if found is not None:
                        wrong[transfer.request_id] = found
        return wrong

    def _forward(self, batch: Batch, wrong: dict[str, str]) -> dict[str, str]:
        """Run a pass, adding to ``wrong``; return failed requests with reasons."""
        parts = [
            PromptPart(
                chunk.request.prefill_transfer, self._blocks(chunk), chunk.request.hbm_blocks
            )
            for chunk in batch.chunks
        ]
        forward = ForwardPass(self._plane.manager, self._plane.membership.send, parts)
        layers = self._plane.geometry.layers
        layer_s = batch.compute_s / layers / self._settings.speedup
        self._clock.begin()
        if self._plane.moves_bytes:
            for layer in range(layers):
                self._one_layer(batch.chunks, forward, layer, layer_s, wrong)
        else:
            self._clock.work(layer_s * layers)
        return forward.finish(wrong)

    def _one_layer(
        self,
        chunks: list[Chunk],
        forward: ForwardPass,
        layer: int,
        layer_s: float,
        wrong: dict[str, str],
    ) -> None:
        since_s = self._clock.now()
        forward.wait_loaded(layer)
        self._clock.waited(since_s)
        for chunk in chunks:
            request_id = chunk.request.prefill_transfer.request_id
            if request_id not in wrong and not forward.failed(request_id):
                self._check_loaded(chunk, layer, wrong)
        self._clock.work(layer_s)
        for chunk in chunks:
            self._write_new(chunk, layer)
        since_s = self._clock.now()
        forward.computed(layer)
        self._clock.waited(since_s)

    def _blocks(self, chunk: Chunk) -> BlockRun:
        return chunk_of(chunk.cached, chunk.bsz, self._plane.geometry.block_tokens)

    def _check_loaded(self, chunk: Chunk, layer: int, wrong: dict[str, str]) -> None:
        blocks, request = self._blocks(chunk), chunk.request
        request_id = request.prefill_transfer.request_id
        found = self._plane.wrong_in_hbm(
            CheckedAt.PE_HBM,
            request_id,
            request.hbm_blocks[: blocks.first],
            request.prefix.seeds,
            (layer,),
        )
        if found is not None:
            wrong[request_id] = found

    def _write_new(self, chunk: Chunk, layer: int) -> None:
        blocks, request = self._blocks(chunk), chunk.request
        self._plane.hbm.write_blocks(
            layer,
            request.hbm_blocks[blocks.first : blocks.end],
            request.prefix.seeds[blocks.first : blocks.end],
        )

    # ------------------------------------------------------------------ after the pass

    def _settle(self, batch: Batch, failures: dict[str, str], wrong: dict[str, str]) -> None:
        for request, cached, bsz in batch.chunks:
            request.done_tokens = cached + bsz
            request_id = request.prefill_transfer.request_id
            failure = failures.get(request_id)
            complete = request.done_tokens == request.prefix.tokens
            with self._wake:
                self._in_pass.discard(request)
                if failure is None and not complete and not request.aborted:
                    continue
                self._leave(request)
            request.deliver(_answer(request, failure, wrong.get(request_id)))

    def _leave(self, request: PrefillRequest) -> None:
        self._waiting.remove(request)
        if request.hbm_blocks:
            self._plane.hbm.give_back(request.hbm_blocks)
            request.hbm_blocks = ()
            self._wake.notify()  # one that waits for HBM may have it
        self._plane.hbm_changed()


def _answer(request: PrefillRequest, failure: str | None, wrong: str | None) -> Answer:
    if failure is None:
        return Answer((request.prefix.next_token,), "length")
    return Answer(finish_reason="error", error=wrong)
