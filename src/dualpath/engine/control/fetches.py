"""Prompts that a decode engine fetches from the buffer of another one, because it decodes them.

The other DE, the *source*, has received the prompt's KV from its PE and has stored its new blocks;
nothing writes to its slots any more.  This DE reads them, whole Full Blocks, into slots of its own,
block by block with few bytes under way (``passes.hbm_copy.MAX_BYTES``), as no step waits for them.
Blocks at the prompt's head that this DE caches are not fetched.

Slots are granted at once or not at all.  A request that waited for slots here would hold those of
the source meanwhile, and another one may hold slots here and wait for slots of the source.

A slot that is fetched into is pinned until its transfer is over, whatever happens to the request:
it is not reused while a late byte may still arrive.  The source's slots are the router's concern:
it releases them once ``FetchDone`` has arrived, or the session of this DE has ended.  A fetch that
goes on after that reads what may be of another request, and is not used.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable

from dualpath.core.control import Assign, EngineMessage, Fetch, FetchDone
from dualpath.core.errors import BadRequestError, DualPathError, TransportError
from dualpath.core.runs import BlockRun
from dualpath.engine.buffer.block_buffer import BlockBuffer, Grant
from dualpath.engine.counters import Counter
from dualpath.engine.passes.hbm_copy import MAX_BYTES
from dualpath.engine.passes.pump import Completion
from dualpath.engine.ranks.rank import Rank
from dualpath.plan.order import Executed
from dualpath.plan.steps import Step, move_steps

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000


class _Fetching:
    """A fetch under way from ``agent``; ``over`` once it is answered or cancelled."""

    def __init__(
        self, grant: Grant, fetch: Fetch, agent: str, steps: Iterable[Step], now_ns: int
    ) -> None:
        self.grant, self.fetch, self.agent = grant, fetch, agent
        #: Steps that are not posted yet, each with the source's slot.
        self.waiting = deque(zip(steps, fetch.slots[grant.cached :], strict=True))
        self.left = len(self.waiting)
        self.moving_bytes = 0
        self.deadline_ns = now_ns + int(fetch.deadline_s * _NS_PER_S)
        self.executed: list[tuple[str, Executed]] = []
        self.over = False


class Fetches:
    """The fetches of one DE; public methods may be called from any thread.

    ``granted`` is called with each grant of slots.  All ranks of an engine share its buffer, so
    that the first rank fetches for all of them.
    """

    def __init__(
        self,
        rank: Rank,
        buffer: BlockBuffer,
        send: Callable[[EngineMessage], None],
        granted: Callable[[Grant], None],
    ) -> None:
        self._geometry, self._peers = rank.geometry, rank.peers
        self._movers, self._counters, self._trace = rank.movers, rank.counters, rank.trace
        self._buffer, self._send, self._granted = buffer, send, granted
        self._lock = rank.health.threads.lock()
        self._open: dict[str, _Fetching] = {}

    def begin(self, request: Assign) -> None:
        """Begin the fetch of an assigned request; ``FetchDone`` follows, with the reason if not."""
        try:
            fetching = self._begun(request)
        except DualPathError as error:
            log.info("request %s is not fetched: %s", request.request_id, error)
            self._send(FetchDone(request.request_id, failure=str(error)))
            return
        if not fetching.left:
            self._finish(fetching, None)
            return
        with self._lock:
            self._open[request.request_id] = fetching
        self._movers.pump.call(lambda: self._advance(fetching))

    def cancel(self, request_id: str) -> None:
        """Post nothing more of a request, and send no answer; unknown requests are ignored."""
        with self._lock:
            fetching = self._open.get(request_id)
        if fetching is not None:
            self._end(fetching)

    def expire(self, now_ns: int) -> None:
        """Answer fetches that are past their deadline."""
        with self._lock:
            late = [fetching for fetching in self._open.values() if now_ns > fetching.deadline_ns]
        for fetching in late:
            self._movers.stalled.add(fetching.agent)
            self._finish(
                fetching,
                f"{fetching.left} of {len(fetching.fetch.slots)} blocks have not arrived within "
                f"{fetching.fetch.deadline_s:g} s (read_deadline_s)",
            )

    def close(self) -> None:
        """Post nothing more."""
        with self._lock:
            requests = list(self._open)
        for request_id in requests:
            self.cancel(request_id)

    def _begun(self, request: Assign) -> _Fetching:
        """Return a fetch with pinned slots.  Raises ``DualPathError`` with the reason if not."""
        fetch, blocks = request.fetch, request.reserve_blocks
        assert fetch is not None, "it is a fetch"
        if len(fetch.slots) != blocks:
            raise BadRequestError(
                f"{len(fetch.slots)} slots of engine {fetch.engine_id} for {blocks} blocks; run "
                "the same dualpath version on router and engines"
            )
        # An engine of several ranks has its buffer at each of them.
        agent, *_ = self._peers.agents_of(fetch.engine_id, fetch.epoch)
        stalled = self._movers.stalled
        if stalled.is_avoided(agent):
            raise TransportError(f"transfers with engine {fetch.engine_id} stalled a moment ago")
        stalled.tried(agent)
        shared = request.keys[: request.shared_blocks]
        grant = self._buffer.grant_now(request.request_id, blocks, shared)
        if grant is None:
            raise TransportError(
                f"{self._buffer.free} of the {self._buffer.capacity} blocks of its buffer are free "
                f"for {blocks}, or requests wait for them; raise buffer_bytes"
            )
        self._granted(grant)
        slots = grant.slots[grant.cached :]
        self._buffer.pin(slots)
        steps = move_steps(self._geometry, BlockRun(grant.cached, len(slots)), slots)
        return _Fetching(grant, fetch, agent, steps, self._trace.now_ns())

    def _advance(self, fetching: _Fetching) -> None:
        """Post as much as may be under way; on the pump's thread."""
        while (post := self._next(fetching)) is not None:
            self._post(fetching, *post)

    def _next(self, fetching: _Fetching) -> tuple[Step, int] | None:
        with self._lock:
            if not fetching.waiting:
                return None
            size_bytes = fetching.waiting[0][0].bytes
            if fetching.moving_bytes and fetching.moving_bytes + size_bytes > MAX_BYTES:
                return None
            fetching.moving_bytes += size_bytes
            return fetching.waiting.popleft()

    def _post(self, fetching: _Fetching, step: Step, source_slot: int) -> None:
        start_ns, stalled = self._trace.now_ns(), self._movers.stalled

        def ended(completion: Completion) -> None:
            stalled.ended(fetching.agent)
            self._step_over(fetching, step, start_ns, completion.error, settled=completion.settled)
            self._advance(fetching)

        try:
            transfer = self._movers.transfers.fetch(step, source_slot, fetching.agent)
        except DualPathError as error:
            self._step_over(fetching, step, start_ns, str(error), settled=True)
        except Exception as error:  # a defect: the transfer may be posted, so its slot stays pinned
            log.exception("request %s: a fetch cannot be posted", fetching.grant.request_id)
            reason = f"a fetch cannot be posted: {error}"
            self._step_over(fetching, step, start_ns, reason, settled=False)
        else:
            stalled.posted(fetching.agent)
            self._movers.pump.watch(transfer, ended)

    def _step_over(
        self, fetching: _Fetching, step: Step, start_ns: int, error: str | None, *, settled: bool
    ) -> None:
        """A block has arrived or failed; after the last one, or the first failure, answer."""
        with self._lock:
            fetching.moving_bytes -= step.bytes
            fetching.left -= error is None
            if error is None:
                done = Executed(step, start_ns, self._trace.now_ns())
                fetching.executed.append((fetching.grant.request_id, done))
            left = fetching.left
        if settled:
            self._buffer.unpin(step.slots)
        if error is not None or not left:
            self._finish(fetching, error)

    def _finish(self, fetching: _Fetching, failure: str | None) -> None:
        """Answer, unless it is answered or cancelled; ``failure`` None: all blocks are here."""
        if not self._end(fetching):
            return
        request_id, grant = fetching.grant.request_id, fetching.grant
        self._trace.moved(fetching.executed, request=request_id)
        if failure is None:
            self._send(FetchDone(request_id, grant.slots, grant.cached))
            return
        log.warning("request %s: its fetch has failed: %s", request_id, failure)
        self._counters.add(Counter.TRANSFER_FAILURES, 1)
        self._send(FetchDone(request_id, failure=failure))

    def _end(self, fetching: _Fetching) -> bool:
        """Post nothing more; return False if it has ended before."""
        with self._lock:
            if fetching.over:
                return False
            fetching.over = True
            self._open.pop(fetching.grant.request_id, None)
            unposted, fetching.waiting = fetching.waiting, deque()
        self._buffer.unpin([slot for step, _ in unposted for slot in step.slots])
        return True
