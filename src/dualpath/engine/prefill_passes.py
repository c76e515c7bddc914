"""The forward passes of a prefill engine, and the requests that take part in them."""

import functools
from collections.abc import Callable, Iterable, Sequence

from dualpath.core.blocks import BlockGeometry
from dualpath.core.control import Release
from dualpath.engine.active_requests import ActiveRequests
from dualpath.engine.chunk_transfers import BlockHolder, ChunkTransfers
from dualpath.engine.counters import Counters
from dualpath.engine.layer_stream import LayerSettings, LayerStream
from dualpath.engine.movers import Movers
from dualpath.engine.step_transfers import PrefillChunk

RELEASED = "it was released"


class PrefillPasses:
    """Begins and ends passes; ``release`` carries out a release that had to wait for one.

    A request with a transfer that was given up stays in its pass until that is over: nobody gets
    its slots, here and at the DE, nor its HBM, which ``holder`` keeps.
    """

    def __init__(
        self,
        geometry: BlockGeometry,
        movers: Movers,
        counters: Counters,
        active: ActiveRequests,
        holder: BlockHolder,
        release: Callable[[Release], None],
    ) -> None:
        self._geometry = geometry
        self._movers = movers
        self._counters = counters
        self._active = active
        self._holder = holder
        self._release = release

    def begin(self, chunks: Sequence[PrefillChunk], layers: LayerSettings) -> LayerStream:
        """Start the transfers of a pass; requests released by now take no part and have failed."""
        refused = self._active.enter_stream(chunk.prefill_transfer.request_id for chunk in chunks)
        taking_part = [c for c in chunks if c.prefill_transfer.request_id not in refused]
        stream = LayerStream(taking_part, layers, self._geometry, self._movers, self._counters)
        stream.failures.update(dict.fromkeys(refused, RELEASED))
        stream.begin()
        return stream

    def end(self, stream: LayerStream) -> dict[str, str]:
        """Wait for the last transfers of a pass; return failed requests with reasons."""
        stream.finish()
        self._active.passed(stream.request_ids, stream.pass_ns, stream.waited_ns)
        late = stream.late
        for chunk in late:
            self._holder.hold(chunk.chunk.hbm_blocks)
        self._leave(set(stream.request_ids) - {chunk.request_id for chunk in late})
        for chunk in late:
            chunk.when_still(functools.partial(self._late_over, chunk))
        return stream.failures

    def _late_over(self, chunk: ChunkTransfers) -> None:
        self._holder.let_go(chunk.chunk.hbm_blocks)
        self._leave([chunk.request_id])

    def _leave(self, request_ids: Iterable[str]) -> None:
        for release in self._active.leave_stream(request_ids):
            self._release(release)
