"""The traffic manager of one engine (§4, §5): every KV byte in or out of it passes here.

It owns the PE or DE buffer and its reservations, the storage reader and writer, and the transfers.
Commands come from the router as control messages (``handle``), work comes from the engine
(``begin_prefill``, ``fill_hbm``, ``persist_generated``).  It knows no model and no engine
framework; the vLLM connector and the emulated engine use it alike.

Slots of a request at the decode engine are freed when three things have happened: the KV was
handed to the HBM (or the router released the request), the router's ``Persist`` has arrived, so
that no new block is lost, and nobody has them pinned.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dualpath.core.blocks import BlockGeometry, BlockKey
from dualpath.core.cluster import Role
from dualpath.core.control import (
    Assign,
    EngineAddress,
    Failed,
    Handed,
    Lookup,
    LookupDone,
    Message,
    PeerDown,
    PeerUp,
    Persist,
    Read,
    ReadDone,
    Refused,
    RegionAddress,
    Release,
    Released,
    Report,
    Reserved,
    RouterMessage,
    TakeOver,
    Welcome,
)
from dualpath.core.errors import BufferTooSmallError, DualPathError, TransportError
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.hbm_copy import STAGING_REGION, HbmCopier, HbmLayout
from dualpath.engine.layer_stream import LayerSettings, LayerStream, PrefillChunk
from dualpath.engine.persister import Persister, WriteTask
from dualpath.engine.pump import TransferPump
from dualpath.engine.read_queue import ReadQueue, ReadTask
from dualpath.engine.settings import EngineSettings
from dualpath.engine.slots import Grant
from dualpath.engine.trace import TraceRecorder
from dualpath.storage.contract import BlockStorage
from dualpath.transport.contract import AgentInfo, RegionInfo, Transport

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000


class _Tenant:
    """A request on this engine: what it counts for and what keeps its slots."""

    def __init__(self, tokens: int, asked_ns: int) -> None:
        self.tokens = tokens
        self.asked_ns = asked_ns
        self.handed = False
        self.persist_seen = False
        self.revoked = False
        self.streams = 0
        self.release_waiting: Release | None = None


class TrafficManager:
    """See the module's docstring; all public methods may be called from any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        geometry: BlockGeometry,
        storage: BlockStorage,
        transport: Transport,
        hbm: HbmLayout,
        send: Callable[[Message], None],
    ) -> None:
        self.settings = settings
        self.geometry = geometry
        self.counters = Counters()
        self.trace = TraceRecorder(settings.trace_out or None, settings.engine_id)
        self._send = send
        self._storage = storage
        self._transport = transport
        self._hbm = hbm
        slots = settings.buffer_bytes // geometry.full_block_bytes
        self._buffer = BlockBuffer(geometry, slots, self._granted)
        self._staging = BlockBuffer(geometry, settings.staging_blocks, lambda grant: None)
        self._register(transport)
        self._agent = transport.info().agent
        self._pump = TransferPump(settings.engine_id)
        self._copier = HbmCopier(transport, self._pump, self.counters, hbm, self._agent)
        self._reader = ReadQueue(
            storage,
            self._buffer,
            self.counters,
            self.trace,
            self._read_done,
            settings.read_batch_blocks,
        )
        self._persister = Persister(storage, self.counters, self.trace)
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="lookup")
        self._lock = threading.RLock()
        self._tenants: dict[str, _Tenant] = {}
        self._peers: dict[str, EngineAddress] = {}
        self._writers_in_doubt: dict[str, set[str]] = {}
        self._assign_seq = 0
        self._report_seq = 0
        self._free_hbm_tokens = hbm.capacity_tokens
        self.refused: str | None = None
        self.welcomed = threading.Event()

    # ------------------------------------------------------------------ what others need to know

    def address(self, epoch: str) -> EngineAddress:
        """Return how other engines reach this one."""
        info = self._transport.info()
        return EngineAddress(
            engine_id=self.settings.engine_id,
            epoch=epoch,
            role=self.settings.role,
            agent=info.agent,
            agent_metadata=info.metadata,
            regions=tuple(RegionAddress(**msgspec.structs.asdict(r)) for r in info.regions),
        )

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
        with self._lock:
            self._report_seq += 1
            return Report(
                report_seq=self._report_seq,
                assign_seq=self._assign_seq,
                unfinished_requests=len(self._tenants),
                unfinished_tokens=sum(t.tokens for t in self._tenants.values()),
                read_queue_tokens=self._reader.tokens(),
                free_hbm_tokens=self._free_hbm_tokens,
                free_buffer_tokens=self._buffer.free * self.geometry.block_tokens,
                counters=self.counters.snapshot(),
            )

    def set_free_hbm_tokens(self, tokens: int) -> None:
        """The engine's scheduler tells how much KV memory is free."""
        self._free_hbm_tokens = tokens

    # ------------------------------------------------------------------ commands from the router

    def handle(self, message: RouterMessage) -> None:
        """Carry out a command; answers go through ``send``.  Never raises for a bad command."""
        try:
            self._dispatch(message)
        except DualPathError as error:
            request_id = getattr(message, "request_id", "")
            log.warning("%s for %s failed: %s", type(message).__name__, request_id, error)
            if request_id:
                self._send(Failed(request_id=request_id, reason=str(error)))

    def tick(self, now_ns: int) -> None:
        """Let time pass: reads beyond their deadline are answered."""
        self._reader.expire(now_ns)

    def _dispatch(self, message: RouterMessage) -> None:
        match message:
            case Welcome():
                for peer in message.peers:
                    self._peer_up(peer)
                self.welcomed.set()
            case Refused():
                self.refused = message.reason
                log.error("the router refuses this engine: %s", message.reason)
                self.welcomed.set()
            case PeerUp():
                self._peer_up(message.address)
            case PeerDown():
                self._peer_down(message)
            case Lookup():
                self._lookups.submit(self._look_up, message)
            case Assign():
                self._assign(message)
            case Read():
                self._read(message)
            case Persist():
                self._persist_prompt(message)
            case Release():
                self._release(message)

    def _peer_up(self, peer: EngineAddress) -> None:
        regions = tuple(RegionInfo(**msgspec.structs.asdict(region)) for region in peer.regions)
        info = AgentInfo(agent=peer.agent, metadata=peer.agent_metadata, regions=regions)
        if self.settings.mode.moves_bytes and self.settings.role is Role.PREFILL:
            self._transport.connect(info)  # the PE starts all transfers between engines
        with self._lock:
            self._peers[peer.engine_id] = peer

    def _peer_down(self, message: PeerDown) -> None:
        with self._lock:
            peer = self._peers.get(message.engine_id)
            if peer is not None and peer.epoch == message.epoch:
                del self._peers[message.engine_id]
                self._transport.disconnect(peer.agent)
            doubtful = (
                self._writers_in_doubt.pop(message.engine_id, set()) if message.certain else set()
            )
        for request_id in doubtful:
            self._buffer.end_quarantine(request_id)

    def _look_up(self, message: Lookup) -> None:
        hit_blocks = 0
        try:
            hit_blocks = self._storage.hit_blocks(message.keys)
        except DualPathError as error:
            log.warning("look-up of %d blocks failed: %s", len(message.keys), error)
        self._send(LookupDone(call_id=message.call_id, hit_blocks=hit_blocks))

    def _assign(self, message: Assign) -> None:
        with self._lock:
            self._assign_seq = max(self._assign_seq, message.assign_seq)
            self._tenants[message.request_id] = _Tenant(message.tokens, self.trace.now_ns())
        if message.reserve_blocks == 0:
            self._granted(Grant(request_id=message.request_id, slots=()))
            return
        try:
            self._buffer.request(message.request_id, message.reserve_blocks)
        except BufferTooSmallError:
            with self._lock:
                del self._tenants[message.request_id]
            raise

    def _granted(self, grant: Grant) -> None:
        with self._lock:
            tenant = self._tenants.get(grant.request_id)
        if tenant is None:  # released while waiting
            self._buffer.release(grant.request_id)
            return
        wait_s = (self.trace.now_ns() - tenant.asked_ns) / _NS_PER_S
        self._send(Reserved(request_id=grant.request_id, slots=grant.slots, wait_s=wait_s))

    def _read(self, message: Read) -> None:
        self._reader.add(
            ReadTask(
                message.request_id,
                message.first_slot,
                message.keys,
                self.trace.now_ns(),
                message.deadline_s,
            )
        )

    def _read_done(self, done: ReadDone) -> None:
        self._send(done)

    def _persist_prompt(self, message: Persist) -> None:
        with self._lock:
            tenant = self._tenants.get(message.request_id)
            slots = self._buffer.slots_of(message.request_id)
            slots = slots[message.first_slot : message.first_slot + len(message.keys)]
            if tenant is None or (
                self.settings.mode.moves_bytes and len(slots) < len(message.keys)
            ):
                self.counters.add(Counter.PERSIST_DROPPED_BLOCKS, len(message.keys))
                return
            self._buffer.pin(slots)
            tenant.persist_seen = True
        self._write(
            message.keys, [self._buffer.view(s) for s in slots], lambda: self._buffer.unpin(slots)
        )
        self._free_if_over(message.request_id)

    def _write(
        self, keys: Sequence[BlockKey], sources: Sequence[memoryview], then: Callable[[], None]
    ) -> None:
        if not self.settings.mode.moves_bytes:
            sources = [memoryview(b"")] * len(keys)
        if keys:
            self._persister.add(WriteTask(keys, sources, then))
        else:
            then()

    def _release(self, message: Release) -> None:
        with self._lock:
            tenant = self._tenants.get(message.request_id)
            if tenant is not None:
                tenant.revoked = True
                if tenant.streams > 0:
                    tenant.release_waiting = message
                    return
        self._finish_release(message)

    def _finish_release(self, message: Release) -> None:
        self._reader.cancel(message.request_id)
        with self._lock:
            self._tenants.pop(message.request_id, None)
            if message.writer_engine and not message.writer_certain:
                self._writers_in_doubt.setdefault(message.writer_engine, set()).add(
                    message.request_id
                )
                self._buffer.quarantine(message.request_id)
        self._buffer.release(message.request_id)
        self._send(Released(request_id=message.request_id))

    # ------------------------------------------------------------------ work from the engine

    def begin_prefill(self, chunks: Sequence[PrefillChunk], region: LayerSettings) -> LayerStream:
        """Start the transfers of one forward pass (PE).  Call ``end_prefill`` with the stream."""
        with self._lock:
            for chunk in chunks:
                if tenant := self._tenants.get(chunk.hand_over.request_id):
                    tenant.streams += 1
        stream = LayerStream(
            chunks,
            region,
            self.geometry,
            self._buffer,
            self._transport,
            self._pump,
            self.counters,
            self.trace,
            self._agent,
            lambda layer: self._hbm.region_of_layer[layer],
        )
        stream.begin()
        return stream

    def end_prefill(self, stream: LayerStream, chunks: Sequence[PrefillChunk]) -> dict[str, str]:
        """Wait for the last transfers of a forward pass; return failed requests with reasons."""
        stream.finish()
        waiting: list[Release] = []
        if stream.settled:
            with self._lock:
                for chunk in chunks:
                    tenant = self._tenants.get(chunk.hand_over.request_id)
                    if tenant is None:
                        continue
                    tenant.streams -= 1
                    if tenant.streams == 0 and tenant.release_waiting is not None:
                        waiting.append(tenant.release_waiting)
        for message in waiting:
            self._finish_release(message)
        return stream.failures

    def decode_agent(self, engine_id: str, epoch: str) -> str:
        """Return the transport agent of a decode engine.

        Raises ``TransportError`` if that engine, in that epoch, is not connected.
        """
        with self._lock:
            peer = self._peers.get(engine_id)
        if peer is None or peer.epoch != epoch:
            raise TransportError(
                f"decode engine {engine_id} (epoch {epoch}) is not connected; it is lost or restarted"
            )
        return peer.agent

    def may_prefill(self, request_id: str, slots: Sequence[int]) -> str | None:
        """Return None if a hand-over is still good here, else why it is not."""
        with self._lock:
            tenant = self._tenants.get(request_id)
            if tenant is None or tenant.revoked:
                return "the request was released"
            if slots and self._buffer.slots_of(request_id) != tuple(slots):
                self.counters.add(Counter.STALE_HAND_OVERS, 1)
                return "its buffer slots changed hands"
        return None

    def fill_hbm(
        self,
        take_over: TakeOver,
        hbm_blocks: Sequence[int],
        done: Callable[[str | None], None],
    ) -> None:
        """Copy a prompt's KV from the DE buffer to HBM (labels 8-9), then give the buffer back.

        ``done`` runs on the pump's thread with None or why it failed.
        """
        if not self.settings.mode.moves_bytes:
            self._handed(take_over.request_id, 0.0)
            done(None)
            return
        slots = take_over.slots
        with self._lock:
            stale = self._buffer.slots_of(take_over.request_id) != slots
            if not stale:
                self._buffer.pin(slots)
        if stale:
            self.counters.add(Counter.STALE_HAND_OVERS, 1)
            done(f"request {take_over.request_id}: its DE buffer slots changed hands")
            return
        start_ns = self.trace.now_ns()

        def copied(error: str | None) -> None:
            end_ns = self.trace.now_ns()
            self.trace.record("h2d", "h2d", start_ns, end_ns, request=take_over.request_id)
            self._buffer.unpin(slots)
            if error is None:
                self._handed(take_over.request_id, (end_ns - start_ns) / _NS_PER_S)
            done(error)

        self._copier.into_hbm(self._buffer, slots, hbm_blocks, copied)

    def _handed(self, request_id: str, h2d_s: float) -> None:
        with self._lock:
            if tenant := self._tenants.get(request_id):
                tenant.handed = True
        self._send(Handed(request_id=request_id, h2d_s=h2d_s))
        self._free_if_over(request_id)

    def _free_if_over(self, request_id: str) -> None:
        with self._lock:
            tenant = self._tenants.get(request_id)
            over = tenant is not None and tenant.handed and tenant.persist_seen
        if over:
            self._buffer.release(request_id)

    def persist_generated(self, blocks: Sequence[tuple[int, BlockKey]]) -> None:
        """Copy full blocks (engine block id, key) out of HBM and queue them for storage.

        Returns when the HBM is no longer needed.  With all staging slots in use a block is
        dropped and counted: the next turn recomputes it.
        """
        if not self.settings.mode.moves_bytes:
            self._write([key for _, key in blocks], [], lambda: None)
            return
        for block_id, key in blocks:
            slot = self._staging.take()
            if slot is None:
                self.counters.add(Counter.PERSIST_DROPPED_BLOCKS, 1)
                continue
            error = self._copier.out_of_hbm(block_id, self._staging, slot)
            if error is not None:
                log.warning("generated block is not persisted: %s", error)
                self.counters.add(Counter.PERSIST_DROPPED_BLOCKS, 1)
                self._staging.give_back(slot)
                continue
            self._write(
                [key],
                [self._staging.view(slot)],
                lambda slot=slot: self._staging.give_back(slot),  # type: ignore[misc]
            )

    # ------------------------------------------------------------------ life

    def drain(self, timeout_s: float) -> bool:
        """Wait until all queued blocks are persisted."""
        return self._persister.drain(timeout_s)

    def close(self) -> None:
        """Finish writes, stop all threads and give memory back; idempotent."""
        self._reader.close()
        self._persister.close()
        self._lookups.shutdown(wait=True, cancel_futures=True)
        self._pump.close()
        self._transport.close()
        self._storage.close()
        self.trace.write()

    def _register(self, transport: Transport) -> None:
        transport.register(self._buffer.region(), self._buffer.memory)
        staging = msgspec.structs.replace(self._staging.region(), name=STAGING_REGION)
        transport.register(staging, self._staging.memory)
        for region in self._hbm.regions:
            transport.register(region, self._hbm)
