"""The forward passes of a prefill engine, and the requests that take part in them.

Every rank of the engine moves its slice of every block.  The leader knows which requests may take
part and says so as a pass begins; as it ends, a request has failed if it has at any rank.
"""

import functools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from dualpath.core.addresses import EngineAddress
from dualpath.core.request_messages import Release
from dualpath.engine.active_requests import ActiveRequests
from dualpath.engine.chunk_transfers import BlockHolder, ChunkTransfers
from dualpath.engine.layer_stream import LayerSettings, LayerStream
from dualpath.engine.rank import Rank
from dualpath.engine.step_transfers import PrefillChunk

RELEASED = "it was released"


class PassOrder(NamedTuple):
    """What the leader says as a pass begins.

    ``number`` is the pass's in the engine's work, ``request_ids`` are those that take part;
    ``peers`` are the decode engines that there are, None if they are those of the pass before.
    """

    number: int
    request_ids: tuple[str, ...]
    peers: tuple[EngineAddress, ...] | None


class PassOutcome(NamedTuple):
    """What a rank says as a pass ends: what failed and why, and whose transfers may still write."""

    failures: dict[str, str]
    late: tuple[str, ...]


def begin_stream(
    rank: Rank,
    number: int,
    chunks: Sequence[PrefillChunk],
    layers: LayerSettings,
    apart: Sequence[PrefillChunk] = (),
    before: LayerStream | None = None,
) -> LayerStream:
    """Return a rank's share in a pass, which has not begun.

    ``apart`` are chunks of the pass for which this rank moves nothing; ``before`` is a pass that
    may not be over.
    """
    shared = rank.shared_loads(_in_one_order((*chunks, *apart)), layers.buffers)
    return LayerStream(
        chunks, layers, rank.geometry, rank.movers, rank.counters, number, shared, before
    )


def _in_one_order(chunks: Sequence[PrefillChunk]) -> list[PrefillChunk]:
    return sorted(chunks, key=lambda chunk: chunk.prefill_transfer.request_id)


def end_stream(
    stream: LayerStream, holder: BlockHolder
) -> tuple[PassOutcome, list[ChunkTransfers]]:
    """Wait for a rank's share; return what became of it, and its chunks that may still write.

    Their HBM is held: ``holder`` lets go of it when they are still.
    """
    stream.finish()
    late = stream.late
    for chunk in late:
        holder.hold(chunk.chunk.hbm_blocks)
    return PassOutcome(dict(stream.failures), tuple(chunk.request_id for chunk in late)), late


class PrefillPasses:
    """Begins and ends passes; ``release`` carries out a release that had to wait for one.

    A request with a transfer that was given up stays in its pass until that is over, at all ranks:
    nobody gets its slots, here and at the DE, nor its HBM, which ``holder`` keeps.
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
        self._told: tuple[EngineAddress, ...] = ()

    def begin(
        self,
        chunks: Sequence[PrefillChunk],
        layers: LayerSettings,
        before: LayerStream | None = None,
    ) -> LayerStream:
        """Start the transfers of a pass; requests released by now take no part and have failed.

        ``before`` is a pass that may not be over; passes end in the order in which they began.
        """
        refused = self._active.enter_stream(chunk.prefill_transfer.request_id for chunk in chunks)
        taking_part = [c for c in chunks if c.prefill_transfer.request_id not in refused]
        number = self._rank.work.begin()
        stream = begin_stream(self._rank, number, taking_part, layers, before=before)
        stream.failures.update(dict.fromkeys(refused, RELEASED))
        self._rank.group.broadcast(PassOrder(number, stream.request_ids, self._news()))
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
            chunk.when_still(
                functools.partial(self._late_over, chunk, stream.number, known_elsewhere)
            )
        return stream.failures

    def _late_over(self, chunk: ChunkTransfers, number: int, late_elsewhere: bool) -> None:
        self._holder.let_go(chunk.chunk.hbm_blocks)
        if late_elsewhere:
            self._leave_when_still(number, {chunk.request_id})
        else:
            self._leave([chunk.request_id])

    def _leave_when_still(self, number: int, request_ids: Set[str]) -> None:
        if request_ids:
            self._rank.work.when_still(number, functools.partial(self._leave, request_ids))

    def _leave(self, request_ids: Iterable[str]) -> None:
        for release in self._active.leave_stream(request_ids):
            self._release(release)

    def _news(self) -> tuple[EngineAddress, ...] | None:
        peers = self._rank.peers.known()
        if peers == self._told:
            return None
        self._told = peers
        return peers
