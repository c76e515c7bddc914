"""A follower: a rank of an engine that only moves its slice of every block.

It has no link to the router, no storage, and does not allocate slots.  It executes the same steps
of the engine as the leader; ``prefill_passes`` has the messages between them.  A rank that cannot
go on ends its process, and the engine ends with it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import EngineAddress
from dualpath.core.errors import EngineLostError, TransportError
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.control.surroundings import LIVE, Surroundings
from dualpath.engine.passes.device import Device, HostDevice
from dualpath.engine.passes.forward_pass import StreamedPass, layer_settings
from dualpath.engine.passes.generated import GeneratedBlock, StagingOrder
from dualpath.engine.passes.hbm_copy import BlockOut
from dualpath.engine.passes.hbm_layout import HbmBlock, HbmLayout
from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.engine.passes.pass_transfers import BlockHolder, ChunkTransfers
from dualpath.engine.passes.prefill_passes import PassOrder, begin_stream, end_stream
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.ranks.rank import Rank, RankPlace
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import LEAVE_S, OS_THREADS, Threads, TimeLimit
from dualpath.plan.steps import PromptLayout, decode_steps, generated_steps
from dualpath.transport.contract import Transport

log = logging.getLogger(__name__)

_POLL_S = 0.05


class Follower:
    """Created while the leader creates its traffic manager; ``end_process`` ends its process."""

    def __init__(
        self,
        settings: EngineSettings,
        geometry: BlockGeometry,
        transport: Transport,
        hbm: HbmLayout,
        holder: BlockHolder,
        place: RankPlace,
        end_process: Callable[[], None],
        device: Device | None = None,
        threads: Threads = OS_THREADS,
    ) -> None:
        self._settings = settings
        self._geometry = geometry
        self._transport = transport
        self._device = device or HostDevice()
        self._holder = holder
        self._end_process = end_process
        self._threads = threads
        self.rank = Rank(settings, geometry, transport, hbm, self._device, holder, threads, place)
        self._closing = threads.event()

    def watch(self, watch: Callable[[], None] = lambda: None) -> None:
        """Poll this rank several times a second on a thread of its own.

        ``watch`` is called on that thread as well, for other conditions that end this process.
        """

        def run() -> None:
            while not self._closing.wait(_POLL_S):
                watch()
                self.poll()

        self._threads.start(f"{self._settings.engine_id}-rank", run)

    def poll(self) -> None:
        """Report the health of this rank; end its process if it cannot go on."""
        self.rank.poll()
        reason = self.rank.health.broken
        if reason is not None:
            log.critical("engine %s ends itself: %s", self._settings.engine_id, reason)
            self._end_process()
        self.rank.memory.board.write_unhealthy(unhealthy=self.rank.problem() is not None)

    # ------------------------------------------------------------------ one engine step

    def begin_pass(self, parts: Sequence[PrefillChunk]) -> "FollowedPass":
        """Start this rank's transfers of a forward pass; ``finish`` must follow."""
        if not self._settings.mode.moves_bytes:
            return FollowedPass(self, None)
        order: PassOrder = self.rank.group.broadcast(None)
        self._check_number(self.rank.work.begin(), order.number)
        if order.peers is not None:
            self._set_peers(order.peers)
        failures: dict[str, str] = {}
        chunks, not_moved = [], []
        for part in parts:
            if part.transfer.request_id in order.request_ids:
                try:
                    chunks.append(part.connected(self.rank.peers.agents_of))
                except TransportError as error:
                    failures[part.transfer.request_id] = str(error)
                    not_moved.append(part.without_peers())
        layers = layer_settings(self._settings, self._geometry)
        stream = begin_stream(self.rank, order.number, chunks, layers, not_moved)
        stream.failures.update(failures)
        stream.begin()
        return FollowedPass(self, stream)

    def _set_peers(self, peers: Sequence[EngineAddress]) -> None:
        """Connect to exactly these peers; known peers stay connected."""
        self.rank.peers.only(peers)
        known = self.rank.peers.known()
        for peer in peers:
            if peer not in known:
                self.rank.peer_up(peer)

    def end_pass(self, stream: LayerStream) -> None:
        """Wait for this rank's last transfers and report their outcome to all ranks."""
        outcome, late = end_stream(stream, self._holder)
        self.rank.group.gather(outcome)
        left = len(late)
        lock = self._threads.lock()

        def late_over(chunk: ChunkTransfers) -> None:
            nonlocal left
            self._holder.unhold(chunk.chunk.hbm_blocks)
            with lock:
                left -= 1
                last = left == 0
            if last:
                self.rank.work.ended(stream.number)

        if not late:
            self.rank.work.ended(stream.number)
        for chunk in late:
            chunk.when_idle(lambda chunk=chunk: late_over(chunk))  # type: ignore[misc]

    def fill_hbm(
        self,
        decode_transfer: DecodeTransfer,
        hbm_blocks: Sequence[HbmBlock],
        done: Callable[[str | None], None],
    ) -> None:
        """Copy this rank's slice of a prompt from the buffer, where the leader has pinned it."""
        if not self._settings.mode.moves_bytes:
            done(None)
            return
        number = self.rank.work.begin()

        def copied(error: str | None) -> None:
            self.rank.work.ended(number)
            done(error)

        slots = decode_transfer.slots
        prompt = PromptLayout(self._geometry, decode_transfer.prompt_tokens, de_slots=slots)
        steps = decode_steps(prompt)
        self.rank.copier.into_hbm(decode_transfer.request_id, steps, hbm_blocks, copied)

    def persist_generated(self, blocks: Sequence[GeneratedBlock]) -> None:
        """Copy this rank's slice of generated blocks out of HBM into the leader's staging slots."""
        if not self._settings.mode.moves_bytes:
            return
        order: StagingOrder = self.rank.group.broadcast(None)
        self.rank.copier.out_of_hbm(
            [
                self._staged(*taken, block.hbm_block)
                for taken, block in zip(order, blocks, strict=True)
                if taken is not None
            ]
        )

    def _staged(self, slot: int, number: int, hbm_block: HbmBlock) -> BlockOut:
        work = self.rank.work
        self._check_number(work.begin(), number)

        def copied(error: str | None) -> None:
            if error is None:
                work.staged(number, slot)
            else:
                log.warning("a generated block is not persisted: %s", error)
            work.ended(number)

        copies = generated_steps(self._geometry, slot)[:-1]
        return BlockOut(copies, hbm_block, copied)

    def _check_number(self, own: int, leaders: int) -> None:
        if own != leaders:
            self.rank.health.fail(
                f"ranks disagree: work item {own} of this rank is {leaders} at the leader"
            )
            raise EngineLostError("the ranks of this engine do not do the same work")

    def close(self) -> bool:
        """Stop all threads and free memory; idempotent.

        Return whether the threads that move bytes have ended.
        """
        if self._closing.is_set():
            return True
        self._closing.set()
        moved = self.rank.close(TimeLimit(self._threads, LEAVE_S))
        self._transport.close()
        self._device.close()
        return moved


class FollowedPass(StreamedPass):
    """A follower's share in a forward pass; see ``forward_pass.ForwardPass``."""

    def __init__(self, follower: Follower, stream: LayerStream | None) -> None:
        self._follower = follower
        super().__init__(stream)

    def failed(self, request_id: str) -> bool:
        """Whether a request's loaded KV is unusable: also if the request takes no part."""
        if self._stream is None:
            return False
        return super().failed(request_id) or request_id not in self._stream.request_ids

    def finish(self, wrong: Mapping[str, str]) -> dict[str, str]:
        """Wait for this rank's last transfers; return failed requests of this rank with reasons.

        ``wrong`` are requests with wrong KV found by this rank, and why.
        """
        if self._stream is None:
            return dict(wrong)
        self._stream.failures.update(wrong)
        self._follower.end_pass(self._stream)
        return self._stream.failures


def open_follower(
    settings: EngineSettings,
    geometry: BlockGeometry,
    hbm: HbmLayout,
    holder: BlockHolder,
    place: RankPlace,
    device: Device,
    surroundings: Surroundings = LIVE,
) -> Follower:
    """Return a follower on the machine's network, in a process of its own."""
    agent = f"{settings.engine_id}-{surroundings.new_epoch()}-{place.group.rank}"
    transport = surroundings.open_transport(agent, settings, device)
    return Follower(
        *(settings, geometry, transport, hbm, holder, place),
        surroundings.end_process,
        device,
        surroundings.threads,
    )
