"""The traffic manager of one engine (§4, §5): every KV byte in or out of it passes here.

It owns the PE or DE buffer and its reservations, the storage reader and writer, and the transfers.
Commands come from the router as control messages (``handle``), work comes from the engine
(``begin_prefill``, ``fill_hbm``, ``persist_generated``).  It knows no model and no engine
framework; the vLLM connector and the emulated engine use it alike.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.addresses import EngineAddress
from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import HostProcess, Role
from dualpath.core.control import (
    Assign,
    EngineMessage,
    Failed,
    Gone,
    IsGone,
    Lookup,
    PeerDown,
    PeerUp,
    Persist,
    PrefillDone,
    Read,
    Release,
    Released,
    Report,
    Reserved,
    Retain,
    RouterMessage,
    Sync,
    Synced,
    Welcome,
)
from dualpath.core.errors import BadRequestError, BufferTooSmallError, DualPathError
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.active_requests import ActiveRequests
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.chunk_transfers import BlockHolder, NoHolder
from dualpath.engine.device import Device, HostDevice
from dualpath.engine.dram_tier import DramTier
from dualpath.engine.generated import GeneratedBlock, GeneratedBlocks
from dualpath.engine.hbm_layout import HbmBlock, HbmLayout
from dualpath.engine.layer_stream import LayerSettings, LayerStream
from dualpath.engine.lookups import Lookups
from dualpath.engine.persister import Persister
from dualpath.engine.prefill_passes import PrefillPasses
from dualpath.engine.rank import ALONE, Rank, RankPlace
from dualpath.engine.ranks import RankGroup
from dualpath.engine.read_queue import ReadQueue, ReadTask
from dualpath.engine.retention import Retention
from dualpath.engine.served_prompts import ServedPrompts
from dualpath.engine.session_doubts import Doubts, SessionDoubts
from dualpath.engine.settings import EngineSettings
from dualpath.engine.slots import Grant
from dualpath.engine.step_transfers import PrefillChunk
from dualpath.engine.threads import OS_THREADS, Threads, TimeLimit
from dualpath.plan.steps import run_reads
from dualpath.storage.contract import BlockStorage
from dualpath.storage.host_process import is_gone
from dualpath.storage.remembering import RememberingStorage
from dualpath.transport.contract import Transport

log = logging.getLogger(__name__)


_NS_PER_S = 1_000_000_000
#: Longest that ``close`` waits for what is under way, all in all.
CLOSE_S = 5.0


class TrafficManager:
    """See the module's docstring; all public methods may be called from any thread.

    ``holder`` keeps HBM blocks from reuse that a late transfer may still write.
    """

    def __init__(
        self,
        settings: EngineSettings,
        geometry: BlockGeometry,
        storage: BlockStorage,
        transport: Transport,
        hbm: HbmLayout,
        send: Callable[[EngineMessage], None],
        device: Device | None = None,
        threads: Threads = OS_THREADS,
        is_gone: Callable[[HostProcess], bool] = is_gone,
        holder: BlockHolder | None = None,
        place: RankPlace = ALONE,
    ) -> None:
        self.settings = settings
        holder = holder or NoHolder()
        self._device = device or HostDevice()
        self._rank = rank = Rank(
            *(settings, geometry, transport, hbm, self._device, holder, threads, place)
        )
        self.geometry = geometry
        self.counters = counters = rank.counters
        self.trace = trace = rank.trace
        self._send = send
        self._threads = threads
        self._storage = storage = RememberingStorage(storage, threads.now_ns)
        self._transport = transport
        self._hbm = hbm
        self._active = ActiveRequests(threads)
        slots = settings.buffer_slots(geometry)
        self._buffer = BlockBuffer(geometry, slots, self._granted, threads, rank.memory.buffer)
        staging = settings.staging_blocks
        self._staging = BlockBuffer(
            geometry, staging, lambda grant: None, threads, rank.memory.staging
        )
        self._tier = DramTier(self._buffer, counters, send)
        self._passes = PrefillPasses(rank, self._active, holder, self._release)
        self._reader = ReadQueue(
            storage,
            self._buffer,
            counters,
            trace,
            send,
            settings.parallel_reads,
            rank.health,
            # A PE may yet compute again what a DE has read: the DE's slots are whole later.
            keeps=settings.role is Role.PREFILL,
        )
        self._retention = Retention(self._buffer, self._reader.fetch)
        blank = None if settings.mode.moves_bytes else memoryview(bytes(geometry.full_block_bytes))
        self._persister = Persister(
            storage, counters, trace, blank, settings.parallel_writes, rank.health
        )
        self._generated = GeneratedBlocks(
            rank, self._staging, self._persister, self._buffer.keep_copy
        )
        self._lookups = Lookups(storage, self._persister.pending, self.counters, send, threads)
        self._prompts = ServedPrompts(
            *(rank, self._active, self._buffer, self._persister, send),
            moves_bytes=settings.mode.moves_bytes,
        )
        self._doubts = SessionDoubts(
            settings.role, self._active, self._buffer, rank.peers, self._reader.cancel
        )
        self._is_gone = is_gone
        self._assign_seq = 0
        self._report_seq = 0
        self._free_hbm_tokens = hbm.capacity_tokens

    # ------------------------------------------------------------------ what others need to know

    def address(self, epoch: str, process: HostProcess | None = None) -> EngineAddress:
        """Return how other engines reach this one."""
        return EngineAddress(
            engine_id=self.settings.engine_id,
            epoch=epoch,
            role=self.settings.role,
            agents=self._rank.agents,
            process=msgspec.structs.replace(
                process or HostProcess(), ranks=self._rank.other_processes
            ),
        )

    @property
    def buffer(self) -> BlockBuffer:
        """The DRAM buffer, for an engine that looks at what lies in it."""
        return self._buffer

    @property
    def buffer_tokens(self) -> int:
        """Capacity of the DRAM buffer in tokens."""
        return self._buffer.capacity * self.geometry.block_tokens

    @property
    def hbm_tokens(self) -> int:
        """Capacity of the engine's KV memory in tokens."""
        return self._hbm.capacity_tokens

    def report(self) -> Report:
        """Return the current load (§6.1)."""
        self._report_seq += 1
        assign_seq = self._assign_seq
        unfinished_requests, unfinished_tokens = self._active.load()
        return Report(
            report_seq=self._report_seq,
            assign_seq=assign_seq,
            unfinished_requests=unfinished_requests,
            unfinished_tokens=unfinished_tokens,
            read_queue_tokens=self._reader.tokens(),
            free_hbm_tokens=self._free_hbm_tokens,
            free_buffer_tokens=self._buffer.free * self.geometry.block_tokens,
            counters=self.counters.snapshot() | self._tier.totals(),
            unhealthy=self.health(),
            kept_buffer_tokens=self._buffer.resting * self.geometry.block_tokens,
        )

    def set_free_hbm_tokens(self, tokens: int) -> None:
        """Note how much KV memory the engine's scheduler has free."""
        self._free_hbm_tokens = tokens

    @property
    def ranks(self) -> RankGroup:
        """The engine's ranks, with a limit for every wait; for the thread that computes."""
        return self._rank.group

    @property
    def broken(self) -> str | None:
        """Why this engine cannot go on in this process, None if it can."""
        return self._rank.health.broken

    def fail(self, reason: str) -> None:
        """This engine cannot go on in this process: it is ``broken``; the first reason stays."""
        self._rank.health.fail(reason)

    def health(self) -> str | None:
        """Return why no request should come here now, None if KV moves (``engine.health``)."""
        if (complaint := self._rank.complaint()) is not None:
            return complaint
        unwell = self._rank.memory.board.unwell()
        return f"ranks {unwell} of this engine are unwell; see their log" if unwell else None

    # ------------------------------------------------------------------ commands from the router

    def handle(self, message: RouterMessage) -> None:
        """Carry out a command; answers go through ``send``.  Never raises for a bad command."""
        request_id = getattr(message, "request_id", "")
        try:
            self._dispatch(message)
        except DualPathError as error:
            log.warning("%s %s failed: %s", type(message).__name__, request_id, error)
            reason = str(error)
        except Exception as error:  # a defect in one command must not take the others down
            log.exception("%s %s failed", type(message).__name__, request_id)
            reason = repr(error)
        else:
            return
        if request_id:
            self._send(Failed(request_id=request_id, reason=reason))

    def end_session(self, reason: str) -> None:
        """Drop every request: the router has forgotten them, or will (``session_doubts``)."""
        self._tier.end_session()
        self._retention.end_session()
        self._doubts.end_session(reason)
        self._lookups.drop()
        self._assign_seq = 0

    def doubts(self) -> Doubts:
        """Return what sessions before have left in doubt, for the next ``Hello``."""
        return self._doubts.named()

    def tick(self, now_ns: int) -> None:
        """Let time pass: reads and look-ups beyond their deadline are answered.

        What has waited for the engine's other ranks goes on, and the router hears what is kept.
        """
        self._rank.look()
        self._reader.expire(now_ns)
        self._lookups.expire(now_ns)
        self._retention.expire(now_ns)
        self._tier.tell()

    def _dispatch(self, message: RouterMessage) -> None:
        match message:
            case Welcome():
                self._begin_session(message)
            case PeerUp():
                self._rank.peer_up(message.address)
            case PeerDown():
                self._rank.peers.down(message)
            case IsGone():
                if self._is_gone(message.writer.process):
                    self._send(Gone(message.writer))
            case Lookup():
                self._lookups.begin(message)
            case Sync():
                self._send(Synced(call_id=message.call_id))
            case Assign():
                self._assign(message)
            case Read():
                self._read(message)
            case Persist():
                self._prompts.persist(message)
            case Release():
                if self._active.ask_release(message):
                    self._release(message)
            case Retain():
                self._retention.order(message, self.trace.now_ns())

    def _begin_session(self, message: Welcome) -> None:
        self._tier.begin_session(keeps=message.keep_blocks)
        self._rank.peers.only(message.peers)
        for peer in message.peers:
            self._rank.peer_up(peer)
        for request_id in self._doubts.settled_since():
            self._send(Released(request_id=request_id))

    def _assign(self, message: Assign) -> None:
        if self._active.is_known(message.request_id) or self._buffer.holds(message.request_id):
            raise BadRequestError(
                f"request {message.request_id}: an earlier request of this name has not left the "
                "engine; send it under another id"
            )
        self._active.add(message.request_id, message.tokens, self.trace.now_ns())
        self._assign_seq = max(self._assign_seq, message.assign_seq)
        if message.reserve_blocks == 0:
            return
        try:
            self._buffer.request(message.request_id, message.reserve_blocks, message.keys)
        except BufferTooSmallError:
            self._active.drop(message.request_id)
            raise

    def _granted(self, grant: Grant) -> None:
        asked_ns = self._active.asked_ns(grant.request_id)
        if asked_ns is None:  # released while waiting
            self._buffer.release(grant.request_id)
            return
        wait_s = (self.trace.now_ns() - asked_ns) / _NS_PER_S
        self._tier.granted(grant)
        self._send(Reserved(grant.request_id, grant.slots, wait_s, grant.kept))

    def _read(self, message: Read) -> None:
        reads, now_ns = run_reads(self.geometry, message.run), self.trace.now_ns()
        self._reader.add(
            ReadTask(
                message.request_id, reads, message.keys, now_ns, message.deadline_s, message.parent
            )
        )

    def _release(self, message: Release) -> None:
        self._reader.cancel(message.request_id)
        self._active.drop(message.request_id)
        if message.writer_certain:
            self._buffer.end_quarantine(message.request_id)
        else:
            self._buffer.quarantine(message.request_id)
        self._buffer.release(message.request_id)
        self._send(Released(request_id=message.request_id))

    def is_active(self, request_id: str) -> bool:
        """Whether a request is assigned to this engine and not about to leave it."""
        return self._active.is_active(request_id)

    def decode_agents(self, engine_id: str, epoch: str) -> tuple[str, ...]:
        """Return a DE's transport agents; raises ``TransportError`` if it is not connected."""
        return self._rank.peers.agents_of(engine_id, epoch)

    def begin_prefill(self, chunks: Sequence[PrefillChunk], layers: LayerSettings) -> LayerStream:
        """Start the transfers of one forward pass (PE); ``end_prefill`` must follow.

        Requests released by now take no part: nothing is moved for them and they count as failed.
        """
        return self._passes.begin(chunks, layers)

    def end_prefill(self, stream: LayerStream) -> dict[str, str]:
        """Wait for the last transfers of a forward pass; return failed requests with reasons."""
        return self._passes.end(stream)

    def sent(self, request_id: str, failure: str | None) -> PrefillDone:
        """Return the message that ends a prefill, with the times of its forward passes."""
        pass_ns, waited_ns = self._active.pass_times_ns(request_id)
        return PrefillDone(
            request_id=request_id,
            failure=failure,
            forward_s=pass_ns / _NS_PER_S,
            transfer_s=waited_ns / _NS_PER_S,
        )

    def fill_hbm(
        self,
        decode_transfer: DecodeTransfer,
        hbm_blocks: Sequence[HbmBlock],
        done: Callable[[str | None], None],
    ) -> None:
        """Copy a prompt's KV from the DE buffer to HBM (labels 8-9), then give the buffer back.

        ``done`` gets None or why it failed, on whatever thread ends the copy.
        """
        self._prompts.fill_hbm(decode_transfer, hbm_blocks, done)

    def persist_generated(self, blocks: Sequence[GeneratedBlock]) -> None:
        """Store full blocks; returns when their HBM is not needed."""
        if self.settings.mode.moves_bytes:
            self._generated.persist(blocks)
        else:
            self._generated.persist_keys([block.key for block in blocks])

    def drain(self, timeout_s: float) -> bool:
        """Wait until all queued blocks are persisted; False after the timeout."""
        return self._persister.drain(timeout_s)

    def close(self) -> None:
        """Finish writes, stop all threads and give memory back, in ``CLOSE_S``; idempotent."""
        limit = TimeLimit(self._threads, CLOSE_S)
        self._rank.close(limit)
        self._persister.close(limit)
        self._lookups.close(limit)
        self._reader.close(limit)
        self._transport.close()
        self._device.close()
        self._storage.close()
        self.trace.write()
