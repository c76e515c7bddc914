"""The forward passes of a prefill engine, and the requests that take part in them.

Every rank of the engine moves its slice of every block.  The leader broadcasts the participating
requests when a pass begins; at its end a request has failed if it has failed at any rank.
"""

import functools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from dualpath.core.cluster import EngineAddress
from dualpath.core.control import Release
from dualpath.engine.control.assigned_requests import ActiveRequests
from dualpath.engine.passes.layer_stream import LayerSettings, LayerStream
from dualpath.engine.passes.pass_transfers import BlockHolder, ChunkTransfers
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.ranks.rank import Rank

RELEASED = "it was released"


class PassOrder(NamedTuple):
    """The leader's broadcast when a pass begins.

    ``number`` is that of the pass as a work item, ``request_ids`` are the requests that take part;
    ``peers`` are the connected decode engines, None if they are those of the pass before.
    """

    number: int
    request_ids: tuple[str, ...]
    peers: tuple[EngineAddress, ...] | None


class PassOutcome(NamedTuple):
    """A rank's report at the end of a pass: failures, and requests with late transfers."""

    failures: dict[str, str]
    late: tuple[str, ...]


def begin_stream(
    rank: Rank,
    number: int,
    chunks: Sequence[PrefillChunk],
    layers: LayerSettings,
    not_moved: Sequence[PrefillChunk] = (),
    before: LayerStream | None = None,
) -> LayerStream:
    """Return a rank's layer stream for a pass; it has not begun.

    ``not_moved`` are chunks of the pass for which this rank moves nothing; ``before`` is the pass
    before, if it may not be over.
    """
    shared = rank.shared_loads(_in_one_order((*chunks, *not_moved)), layers.buffers)
    return LayerStream(
        chunks, layers, rank.geometry, rank.movers, rank.counters, number, shared, before
    )


def _in_one_order(chunks: Sequence[PrefillChunk]) -> list[PrefillChunk]:
    return sorted(chunks, key=lambda chunk: chunk.transfer.request_id)


def end_stream(
    stream: LayerStream, holder: BlockHolder
) -> tuple[PassOutcome, list[ChunkTransfers]]:
    """Finish a rank's layer stream; return its outcome, and its chunks that may still write.

    ``holder`` holds the HBM blocks of these chunks; the caller has to ``unhold`` them.
    """
    stream.finish()
    late = stream.late
    for chunk in late:
        holder.hold(chunk.chunk.hbm_blocks)
    return PassOutcome(dict(stream.failures), tuple(chunk.request_id for chunk in late)), late


class PrefillPasses:
    """Begins and ends passes; ``release`` executes a release that had to wait for a pass.

    A request with an abandoned transfer stays in its pass until the transfer is over at all ranks:
    neither its slots, here and at the DE, nor its HBM, which ``holder`` holds, are reused before.
    """

    def __init__(
        self,
        rank: Rank,
        active: ActiveRequests,
        holder: BlockHolder,
        release: Callable[[Release], None],
    ) -> None:
        self._rank = rank
        self._active = active
        self._holder = holder
        self._release = release
        self._sent_peers: tuple[EngineAddress, ...] = ()

    def begin(
        self,
        chunks: Sequence[PrefillChunk],
        layers: LayerSettings,
        before: LayerStream | None = None,
    ) -> LayerStream:
        """Start the transfers of a pass; requests released by now fail and take no part.

        ``before`` is the pass before, if it may not be over; passes end in the order in which they
        began.
        """
        refused = self._active.enter_stream(chunk.transfer.request_id for chunk in chunks)
        taking_part = [c for c in chunks if c.transfer.request_id not in refused]
        number = self._rank.work.begin()
        stream = begin_stream(self._rank, number, taking_part, layers, before=before)
        stream.failures.update(dict.fromkeys(refused, RELEASED))
        self._rank.group.broadcast(PassOrder(number, stream.request_ids, self._changed_peers()))
        stream.begin()
        return stream

    def end(self, stream: LayerStream) -> dict[str, str]:
        """Wait for the last transfers of a pass; return failed requests with reasons."""
        outcome, late = end_stream(stream, self._holder)
        self._active.passed(stream.request_ids, stream.pass_ns, stream.waited_ns)
        elsewhere: set[str] = set()
        for rank, other in enumerate(self._rank.group.gather(outcome)):
            if rank != self._rank.group.rank:
                elsewhere.update(other.late)
                for request_id, reason in other.failures.items():
                    stream.failures.setdefault(request_id, f"rank {rank}: {reason}")
        late_here = set(outcome.late)
        self._leave(set(stream.request_ids) - late_here - elsewhere)
        self._leave_when_still(stream.number, elsewhere - late_here)
        for chunk in late:
            known_elsewhere = chunk.request_id in elsewhere
            chunk.when_idle(
                functools.partial(self._late_over, chunk, stream.number, known_elsewhere)
            )
        return stream.failures

    def _late_over(self, chunk: ChunkTransfers, number: int, late_elsewhere: bool) -> None:
        self._holder.unhold(chunk.chunk.hbm_blocks)
        if late_elsewhere:
            self._leave_when_still(number, {chunk.request_id})
        else:
            self._leave([chunk.request_id])

    def _leave_when_still(self, number: int, request_ids: Set[str]) -> None:
        if request_ids:
            self._rank.work.when_idle(number, functools.partial(self._leave, request_ids))

    def _leave(self, request_ids: Iterable[str]) -> None:
        for release in self._active.leave_stream(request_ids):
            self._release(release)

    def _changed_peers(self) -> tuple[EngineAddress, ...] | None:
        peers = self._rank.peers.known()
        if peers == self._sent_peers:
            return None
        self._sent_peers = peers
        return peers
