"""A decode engine without a model: H2D of prompts, then steps that yield a token per request.

One thread is the GPU.  Another carries out decode transfers: it compares the DE buffer, has the
traffic manager copy it to HBM, compares that, and lets the request join the next step.
"""

import functools
from collections import deque

from dualpath.core.blocks import chain_root
from dualpath.engine.generated import GeneratedBlock
from dualpath.engine.threads import Thread, Workers
from dualpath.laboratory.emulated.clock import ComputeClock
from dualpath.laboratory.emulated.data_plane import DataPlane
from dualpath.laboratory.emulated.requests import Answer, DecodeRequest
from dualpath.laboratory.emulated.verification import CheckedAt
from dualpath.model.sim.rules import decode_step_s


class DecodeEngine:
    """Streams tokens after prompts; ``submit`` and ``abort`` from any thread."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._costs = plane.settings.costs.decode
        self._threads = plane.threads
        self._clock = ComputeClock(plane.now_s, plane.threads.sleep)
        self._wake = self._threads.condition()
        self._waiting: deque[DecodeRequest] = deque()
        self._joining: deque[DecodeRequest] = deque()
        self._running: list[DecodeRequest] = []
        self._closing = False
        self._transfers = Workers(self._threads, "decode-transfer", 1)
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin to serve."""
        self._thread = self._threads.start("decode", self._run)

    def close(self) -> None:
        """Stop after the step under way; requests that are not done get no end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._transfers.close()

    def submit(self, request: DecodeRequest) -> None:
        """Queue a prompt for HBM, first come, first served."""
        with self._wake:
            self._waiting.append(request)
        self._place_waiting()

    def abort(self, request: DecodeRequest) -> None:
        """The client left: drop the request as soon as nothing moves into its HBM."""
        with self._wake:
            request.aborted = True
            if request in self._waiting:
                self._waiting.remove(request)
            self._wake.notify()
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Give HBM to waiting requests and start their H2D."""
        with self._wake:
            while self._waiting and not self._closing:
                request = self._waiting[0]
                room = self._plane.geometry.blocks_for(request.room_tokens)
                blocks = self._plane.hbm.take(room)
                if blocks is None:
                    break
                request.hbm_blocks = blocks
                self._waiting.popleft()
                self._transfers.submit(functools.partial(self._decode_transfer, request))
        self._plane.hbm_changed()

    # ------------------------------------------------------------------ decode transfers

    def _decode_transfer(self, request: DecodeRequest) -> None:
        if request.aborted:
            self._end(request, Answer(finish_reason="abort"))
            return
        transfer = request.decode_transfer
        wrong = self._plane.wrong_in_buffer(
            CheckedAt.DE_BUFFER, transfer.request_id, transfer.slots, request.prefix.seeds
        )
        if wrong is not None:
            self._end(request, Answer(finish_reason="error", error=wrong))
            return
        blocks = request.hbm_blocks[: len(transfer.slots)]
        self._plane.manager.fill_hbm(transfer, blocks, lambda error: self._copied(request, error))

    def _copied(self, request: DecodeRequest, error: str | None) -> None:
        self._transfers.submit(functools.partial(self._join, request, error))

    def _join(self, request: DecodeRequest, error: str | None) -> None:
        if error is not None:
            self._end(request, Answer(finish_reason="error"))
            return
        transfer = request.decode_transfer
        wrong = self._plane.wrong_in_hbm(
            CheckedAt.DE_HBM,
            transfer.request_id,
            request.hbm_blocks[: len(transfer.slots)],
            request.prefix.seeds,
            range(self._plane.geometry.layers),
        )
        if wrong is not None:
            self._end(request, Answer(finish_reason="error", error=wrong))
            return
        for token in request.prior_tokens:
            request.prefix.append(token)
        with self._wake:
            self._joining.append(request)
            self._wake.notify()

    # ------------------------------------------------------------------ the GPU's thread

    def _run(self) -> None:
        while self._gather():
            if self._running:
                self._clock.work(self._step_s() / self._plane.settings.speedup)
                self._step()

    def _gather(self) -> bool:
        """Wait until there is something to decode; False when the engine closes."""
        if not self._running:
            self._await_joining()
            self._clock.begin()
        with self._wake:
            self._running += self._joining
            self._joining.clear()
            gone = [request for request in self._running if request.aborted]
            self._running = [request for request in self._running if not request.aborted]
            closing = self._closing
        for request in gone:
            self._end(request, Answer(finish_reason="abort"))
        return not closing

    def _await_joining(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: bool(self._joining) or self._closing)

    def _step_s(self) -> float:
        costs = self._costs
        contexts = [request.computed_tokens + 1 for request in self._running]
        window = costs.window_tokens
        seen = sum(min(c, window) for c in contexts) if window else sum(contexts)
        return decode_step_s(
            len(contexts),
            seen,
            sum(contexts),
            1,
            costs.step_s,
            costs.request_s,
            costs.pair_s,
            costs.index_pair_s,
        )

    def _step(self) -> None:
        """Compute one token of every request; full blocks leave for storage before answers go."""
        full: list[GeneratedBlock] = []
        for request in self._running:
            full += self._compute(request)
        if full:
            self._plane.manager.persist_generated(full)
        going_on = []
        for request in self._running:
            token = request.prefix.next_token
            request.left_tokens -= 1
            if request.left_tokens == 0:
                self._end(request, Answer((token,), "length"))
                continue
            request.prefix.append(token)
            request.deliver(Answer((token,)))
            going_on.append(request)
        with self._wake:
            self._running = going_on

    def _compute(self, request: DecodeRequest) -> list[GeneratedBlock]:
        """Write the KV of a request's next token; return its block if it is full."""
        block, place = divmod(request.computed_tokens, self._plane.geometry.block_tokens)
        if self._plane.moves_bytes:
            self._plane.hbm.write_token(
                request.hbm_blocks[block], place, request.prefix.seeds[block, place]
            )
        known = request.computed_tokens < request.decode_transfer.prompt_tokens
        request.computed_tokens += 1
        if known or place + 1 < self._plane.geometry.block_tokens:
            return []
        keys = request.prefix.keys
        parent = keys[block - 1] if block else chain_root()
        return [GeneratedBlock(request.hbm_blocks[block], keys[block], parent)]

    def _end(self, request: DecodeRequest, answer: Answer) -> None:
        self._plane.hbm.give_back(request.hbm_blocks)
        request.hbm_blocks = ()
        self._place_waiting()
        request.deliver(answer)
