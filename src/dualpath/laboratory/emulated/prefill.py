"""A prefill engine without a model: forward passes that wait, compute for a time, write and send.

One thread is the GPU of the engine's first rank.  It decides what is computed and gives it to all
ranks, itself included (``passes``); the transfers are those of a vLLM engine
(``engine.forward_pass``).
"""

import logging
from collections import deque

from dualpath.core.cluster import Role
from dualpath.core.errors import EngineLostError
from dualpath.core.runs import HitRun
from dualpath.engine.forward_pass import PromptPart
from dualpath.engine.threads import Thread
from dualpath.laboratory.emulated.batch import Batch, BatchFormer, Chunk
from dualpath.laboratory.emulated.data_plane import DataPlane
from dualpath.laboratory.emulated.passes import PassPart, PassResult, PassWork, RankPasses
from dualpath.laboratory.emulated.requests import Answer, PrefillRequest
from dualpath.laboratory.emulated.verification import CheckedAt
from dualpath.plan.steps import chunk_of

log = logging.getLogger(__name__)


class PrefillEngine:
    """Takes prompts and answers with one token each; ``submit`` and ``abort`` from any thread."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._settings = plane.settings
        self._former = BatchFormer(plane.settings, plane.hbm)
        self._threads = plane.threads
        self._passes = RankPasses(plane)
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
        try:
            while (batch := self._next_batch()) is not None:
                self._settle(batch, self._forward(batch, self._wrong_in_buffer(batch)))
        except EngineLostError as error:
            log.error("no more passes: %s", error)  # and the traffic manager is broken

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
                        CheckedAt.PE_BUFFER, transfer.request_id, run.slots, seeds, self._read(run)
                    )
                    if found is not None:
                        wrong[transfer.request_id] = found
        return wrong

    def _read(self, run: HitRun) -> list[int]:
        """Return for each layer the first block of a run that was read in it."""
        geometry = self._plane.geometry
        layers = range(geometry.layers)
        return [run.windowless if geometry.is_window_layer(n) else 0 for n in layers]

    def _forward(self, batch: Batch, wrong: dict[str, str]) -> PassResult:
        """Have all ranks run a pass; return what came of it, with what they have found."""
        parts = tuple(self._part(chunk) for chunk in batch.chunks)
        work = PassWork(parts, batch.compute_s / self._settings.speedup, wrong)
        self._plane.group.broadcast(work)
        result, findings = self._passes.run(work)
        for rank, (found, counts) in enumerate(findings):
            self._plane.report_wrong(found.values())
            result.wrong.update(found)
            if rank:
                self._plane.verifier.add(counts)
        return result

    def _part(self, chunk: Chunk) -> PassPart:
        request = chunk.request
        blocks = chunk_of(chunk.cached, chunk.bsz, self._plane.geometry.block_tokens)
        part = PromptPart(request.prefill_transfer, blocks, request.hbm_blocks)
        return PassPart(part, request.prefix.seeds[: blocks.end])

    # ------------------------------------------------------------------ after the pass

    def _settle(self, batch: Batch, result: PassResult) -> None:
        for request, cached, bsz in batch.chunks:
            request.done_tokens = cached + bsz
            request_id = request.prefill_transfer.request_id
            failure = result.failures.get(request_id)
            complete = request.done_tokens == request.prefix.tokens
            with self._wake:
                self._in_pass.discard(request)
                if failure is None and not complete and not request.aborted:
                    continue
                self._leave(request)
            request.deliver(_answer(request, failure, result.wrong.get(request_id)))

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
