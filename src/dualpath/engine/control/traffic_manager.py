"""The traffic manager of one engine (§4, §5): every KV byte in or out of it passes here.

It owns the PE or DE buffer with its reservations, the queue of storage reads, the storage writer,
and the transfers.  The router sends commands as control messages (``handle``), the engine calls
``passes.begin``, ``fill_hbm`` and ``persist_generated``.  It is independent of models and engine
frameworks; the vLLM connector and the emulated engine both use it.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry, BlockKey
from dualpath.core.cluster import EngineAddress, HostProcess, Role
from dualpath.core.control import (
    Assign,
    ConfirmedDead,
    EngineMessage,
    Failed,
    GrantRead,
    LivenessProbe,
    Load,
    Lookup,
    NodeDramShare,
    PeerDown,
    PeerUp,
    Persist,
    PrefillDone,
    Read,
    Registered,
    Release,
    Released,
    Report,
    ReservationWaits,
    Reserved,
    ReserveThird,
    Retain,
    RouterMessage,
    Sync,
    Synced,
    ThirdRefused,
)
from dualpath.core.errors import BadRequestError, BufferTooSmallError, DualPathError
from dualpath.core.runs import HitRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.engine.block_events import BlockEvents, Medium
from dualpath.engine.buffer.block_buffer import BlockBuffer, Grant
from dualpath.engine.buffer.dram_tier import DramTier, Retention
from dualpath.engine.buffer.engine_memory import EngineMemory
from dualpath.engine.buffer.hbm_reservations import HbmPool, HbmReservations
from dualpath.engine.control.assigned_requests import (
    ActiveRequests,
    HbmWanted,
    InDoubt,
    ServedPrompts,
    SessionTeardown,
)
from dualpath.engine.control.fetches import Fetches
from dualpath.engine.io.lookups import Lookups
from dualpath.engine.io.persister import ChainWrites, Persister, WriteShare
from dualpath.engine.io.read_queue import ReadQueue, ReadTask
from dualpath.engine.passes.attention_times import AttentionTimes
from dualpath.engine.passes.device import Device, HostDevice
from dualpath.engine.passes.generated import GeneratedBlock, GeneratedBlocks
from dualpath.engine.passes.hbm_layout import HbmBlock, HbmLayout
from dualpath.engine.passes.pass_transfers import BlockHolder, NoHolder
from dualpath.engine.passes.prefill_passes import PrefillPasses
from dualpath.engine.ranks.rank import ALONE, Rank, RankPlace
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import OS_THREADS, Threads, TimeLimit
from dualpath.node.host_process import has_exited
from dualpath.plan.steps import run_reads
from dualpath.storage.contract import BlockStorage
from dualpath.storage.node_dram import NodeDram, NodeDramStorage
from dualpath.storage.wrapping import LookupCachingStorage
from dualpath.transport.contract import Transport

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000
_NAME_IN_USE = "an earlier request of this name has not left the engine"


class _PlannedRead:
    """A read that begins when the slots of an assignment with these ``keys`` are granted."""

    def __init__(self, read: GrantRead, keys: Sequence[BlockKey]) -> None:
        self.read, self.keys = read, keys
        self.announced = read.announced


class TrafficManager:
    """See the module's docstring; all public methods may be called from any thread.

    ``active`` are the requests of this engine; ``passes`` begins and ends forward passes (PE);
    ``peers`` are the connected engines; ``persister`` writes to storage; ``buffer`` is the DRAM
    buffer and ``staging`` the slots of generated blocks that are being written.  ``ranks`` is the
    group of the engine's ranks, for the engine's thread; ``block_events`` collects where blocks are
    now, if it is enabled.

    ``has_exited`` returns whether a process of this machine has ended; ``holder`` holds HBM blocks
    back from reuse while a late transfer may still write to them; ``node_dram`` is the DRAM cache
    that engines of the node share.  ``hbm_pool`` reserves a DE's HBM for prompts that PEs send
    there, None if they may not.
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
        has_exited: Callable[[HostProcess], bool] = has_exited,
        holder: BlockHolder | None = None,
        place: RankPlace = ALONE,
        node_dram: NodeDram | None = None,
        hbm_pool: HbmPool | None = None,
    ) -> None:
        self.settings = settings
        self._send, self._has_exited = send, has_exited
        holder = holder or NoHolder()
        self._device = device or HostDevice()
        self._rank = rank = Rank(
            *(settings, geometry, transport, hbm, self._device, holder, threads, place),
            reserves_hbm=hbm_pool is not None,
        )
        self.geometry = geometry
        self.counters = counters = rank.counters
        self.trace = trace = rank.trace
        #: Predicted and measured attention times of this engine's passes.
        self.attention = AttentionTimes(trace, threads)
        self._threads = threads
        if node_dram is not None:
            storage = NodeDramStorage(storage, node_dram)
        self._storage = storage = LookupCachingStorage(storage, threads.now_ns)
        self._transport = transport
        share = WriteShare(settings.storage_write_share, threads)
        self._node_dram = node_dram
        self.active = ActiveRequests(threads)
        self.block_events = BlockEvents(threads)
        slots = settings.buffer_slots(geometry)
        self.buffer = BlockBuffer(geometry, slots, self._granted, threads, rank.memory.buffer)
        #: Assignments with a read that waits for their slots, and whether the router knows that.
        self._grant_reads: dict[str, _PlannedRead] = {}
        self._grant_lock = threads.lock()
        #: HBM reserved for prompts that PEs send there.
        self.reserved_hbm = HbmReservations(hbm_pool, threads)
        self._tier = DramTier(self.buffer, counters, send, node_dram, self.block_events)
        self._reader = ReadQueue(
            storage,
            self.buffer,
            counters,
            trace,
            send,
            settings.parallel_reads,
            rank.health,
            # A PE may recompute blocks that a DE has read: a DE caches them when it persists.
            caches=settings.role is Role.PREFILL,
            share=share,
        )
        self._retention = Retention(self.buffer, self._reader.fetch, self._reader.cancel_fetch)
        self._fetches = Fetches(rank, self.buffer, send, self._tier.granted)
        self._teardown = SessionTeardown(
            *(settings.role, self.active, self.buffer, self.reserved_hbm, rank.peers, self._cancel)
        )
        staging = settings.staging_blocks
        self.staging = BlockBuffer(
            geometry, staging, lambda grant: None, threads, rank.memory.staging
        )
        self.ranks, self.peers = rank.group, rank.peers
        self.passes = PrefillPasses(rank, self.active, holder, self._release)
        blank = None if settings.mode.moves_bytes else memoryview(bytes(geometry.full_block_bytes))
        self.persister = Persister(
            *(storage, counters, trace, blank, settings.parallel_writes, rank.health, share),
            stored=functools.partial(self.block_events.stored, Medium.STORAGE),
        )
        self._chains = ChainWrites(send, threads)
        self._generated = GeneratedBlocks(
            rank, self.staging, self.persister, self.buffer.cache_copy, holder, self._chains
        )
        self._lookups = Lookups(storage, self.persister.pending, self.counters, send, threads)
        self._prompts = ServedPrompts(
            *(rank, self.active, self.buffer, self.persister, send, self.reserved_hbm),
            *(self._leave_hbm, holder, self._chains),
            moves_bytes=settings.mode.moves_bytes,
        )
        self._report_seq = 0
        #: Capacities of the DRAM buffer and of the engine's KV memory.
        self.buffer_tokens = self.buffer.capacity * geometry.block_tokens
        self.hbm_tokens = hbm.capacity_tokens
        #: The memory of buffer and staging once nothing reads or writes it any more, else None.
        self.unused_memory: EngineMemory | None = None
        #: Free KV memory of the engine's scheduler, which sets it for reports.
        self.free_hbm_tokens = hbm.capacity_tokens

    # ------------------------------------------------------------------ state of the engine

    def address(self, epoch: str, process: HostProcess | None = None) -> EngineAddress:
        """Return the address of this engine for other engines."""
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
    def hbm_refusal(self) -> str:
        """Why it takes no part in hand-overs in HBM, empty if it does."""
        return self._rank.hbm_refusal

    @property
    def load_token_s(self) -> float:
        """How long passes have lately taken to load a token of KV; 0 before the first load."""
        token_bytes = self.geometry.full_block_bytes / self.geometry.block_tokens
        return self._rank.movers.load_times.seconds(token_bytes)

    @property
    def node_dram(self) -> NodeDramShare | None:
        """The DRAM cache that it shares with other engines of its node, None without one."""
        if (shared := self._node_dram) is None:
            return None
        return NodeDramShare(
            shared.directory_id, shared.capacity_blocks * self.geometry.block_tokens
        )

    def report(self) -> Report:
        """Return the current load (§6.1)."""
        self._report_seq += 1
        unfinished_requests, unfinished_tokens = self.active.load()
        return Report(
            report_seq=self._report_seq,
            load=Load(
                unfinished_requests=unfinished_requests,
                unfinished_tokens=unfinished_tokens,
                read_queue_tokens=self._reader.tokens(),
                free_hbm_tokens=self.free_hbm_tokens,
                free_buffer_tokens=self.buffer.free * self.geometry.block_tokens,
                cached_buffer_tokens=self.buffer.evictable * self.geometry.block_tokens,
                quarantined_buffer_tokens=(
                    self.buffer.quarantined_slots() * self.geometry.block_tokens
                ),
                unallocated_hbm_tokens=(
                    self.active.unallocated_tokens() if self.settings.role is Role.DECODE else 0
                ),
                quarantined_hbm_tokens=(
                    self.reserved_hbm.quarantined_blocks() * self.geometry.block_tokens
                ),
            ),
            counters=self.counters.snapshot() | self._tier.totals() | self.attention.totals(),
            unhealthy=self.health(),
            steps=self._rank.health.steps,
            called=self.active.called(),
        )

    @property
    def broken(self) -> str | None:
        """Why this engine cannot go on in this process, None if it can."""
        return self._rank.health.broken

    def fail(self, reason: str) -> None:
        """Mark this engine as permanently ``broken``; only the first reason is stored."""
        self._rank.health.fail(reason)

    def made_step(self) -> None:
        """The engine's core has begun or ended a step; called by the core's own thread."""
        self._rank.health.steps += 1

    def health(self) -> str | None:
        """Return why this engine should get no requests now, None if it is healthy."""
        if (problem := self._rank.problem()) is not None:
            return problem
        ranks = self._rank.memory.board.unhealthy()
        return f"ranks {ranks} of this engine are unhealthy; see their log" if ranks else None

    def wake_pump(self) -> None:
        """Have the pump poll transfers now."""
        self._rank.movers.pump.call(lambda: None)

    # ------------------------------------------------------------------ commands from the router

    def handle(self, message: RouterMessage) -> None:
        """Execute a command; answers go through ``send``.  Never raises for a bad command."""
        request_id = getattr(message, "request_id", "")
        try:
            self._dispatch(message)
        except DualPathError as error:
            log.warning("%s %s failed: %s", type(message).__name__, request_id, error)
            reason = str(error)
        except Exception as error:  # a defect in one command must not affect the others
            log.exception("%s %s failed", type(message).__name__, request_id)
            reason = repr(error)
        else:
            return
        if request_id:
            self._send(Failed(request_id=request_id, reason=reason))

    def _dispatch(self, message: RouterMessage) -> None:
        match message:
            case Registered():
                self._begin_session(message)
            case PeerUp():
                self._rank.peer_up(message.address)
                if message.call_id:
                    self._send(Synced(call_id=message.call_id))
            case PeerDown():
                self.peers.down(message)
            case LivenessProbe():
                if self._has_exited(message.writer.process):
                    self._send(ConfirmedDead(message.writer))
            case Lookup():
                self._lookups.begin(message)
            case Sync():
                self._send(Synced(call_id=message.call_id))
            case Assign():
                self._assign(message)
            case ReserveThird():
                self._reserve_third(message)
            case Read():
                self._read(message)
            case Persist():
                self._prompts.persist(message)
            case Release():
                self._ask_release(message)
            case Retain():
                self._retention.apply(message, self.trace.now_ns())

    def _begin_session(self, message: Registered) -> None:
        self.active.begin_session(message.session)
        self._chains.clear()
        self._tier.begin_session(caching=message.enable_caching)
        self.peers.session_begins(self.trace.now_ns())
        for request_id in self._teardown.settled_since():
            self._send(Released(request_id=request_id))

    def _assign(self, message: Assign) -> None:
        """Count a request and queue its reservation of slots, or begin its fetch.

        ``_granted`` or ``FetchDone`` follows.

        Raises ``BadRequestError`` if an earlier request of this id is still here,
        ``BufferTooSmallError`` for more slots than the buffer has.
        """
        if message.peer is not None:
            self._rank.peer_up(message.peer)
        if self._is_here(message.request_id):
            raise BadRequestError(
                f"request {message.request_id}: {_NAME_IN_USE}; send it under another id"
            )
        wanted = HbmWanted(message.hbm_prompt_tokens, message.hbm_new_tokens)
        if wanted.prompt_tokens:
            self.reserved_hbm.check(message.request_id, *wanted)
        if used := message.keys[: message.used_blocks]:
            self._storage.used(used[-1])
        if self.settings.role is Role.DECODE:
            self._retention.assigned(message.keys)
        request_id, shared = message.request_id, message.keys[: message.shared_blocks]
        fetches, now_ns = message.fetch is not None, self.trace.now_ns()
        self.active.add(request_id, message.tokens, now_ns, message.keys, wanted, fetches=fetches)
        if fetches:
            self._fetches.begin(message)
            return
        if message.reserve_blocks == 0:
            if wanted.prompt_tokens:
                self._reserve_hbm(Grant(request_id, ()), wanted)
            return
        if (read := message.read) is not None:
            end = read.first_slot + read.run.blocks.count
            if end > min(message.reserve_blocks, len(message.keys)):
                self.active.drop(request_id)
                raise BadRequestError(
                    f"request {request_id}: {end} blocks are to be read and "
                    f"{message.reserve_blocks} to be reserved, with {len(message.keys)} keys; send "
                    "it through the router"
                )
            with self._grant_lock:
                self._grant_reads[request_id] = _PlannedRead(read, message.keys)
        try:
            self.buffer.request(request_id, message.reserve_blocks, shared)
        except BufferTooSmallError:
            self.active.drop(request_id)
            self._cancel_reads(request_id)
            raise
        with self._grant_lock:
            if (waiting := self._grant_reads.get(request_id)) is not None:
                waiting.announced = True
                self._send(ReservationWaits(request_id))

    def _is_here(self, request_id: str) -> bool:
        """Whether an earlier request of this name has not left the engine."""
        known = (self.active.is_known, self.buffer.has_request, self.reserved_hbm.has_request)
        return any(here(request_id) for here in known)

    def _reserve_third(self, message: ReserveThird) -> None:
        """Lease slots to a request of other engines, or refuse it; nothing waits."""
        request_id = message.request_id
        leased = (
            _NAME_IN_USE
            if self._is_here(request_id)
            else self.buffer.lease_spare(
                request_id, message.keys, message.cached_blocks, message.spare_blocks
            )
        )
        if isinstance(leased, str):
            self._send(ThirdRefused(request_id, leased))
            return
        self.active.add_third(request_id, self.trace.now_ns(), message.keys)
        self._tier.granted(leased)
        self._send(Reserved(request_id, leased.slots, 0.0, leased.cached))

    def _granted(self, grant: Grant) -> None:
        with self._grant_lock:
            begun = self._grant_reads.pop(grant.request_id, None)
        if (wanted := self.active.hbm_wanted(grant.request_id)) is None:  # released while waiting
            self.buffer.release(grant.request_id)
            return
        self._tier.granted(grant)
        if wanted.prompt_tokens:
            self._reserve_hbm(grant, wanted)
            return
        run = None if begun is None else begun.read.behind(grant.cached)
        if begun is None or run is None or begun.announced:
            self._reserved(grant, ())
        if begun is not None and run is not None:
            self._read_granted(grant, begun, run)

    def _read_granted(self, grant: Grant, begun: "_PlannedRead", run: HitRun) -> None:
        """Begin the read of an assignment whose slots are granted; ``ReadDone`` follows."""
        read = begun.read
        first = read.first_slot + run.blocks.first - read.run.blocks.first
        end = first + run.blocks.count
        self._reader.add(
            ReadTask(
                grant.request_id,
                run_reads(self.geometry, run.with_slots(grant.slots[first:end])),
                begun.keys[first:end],
                self.trace.now_ns(),
                read.deadline_s,
                begun.keys[first - 1] if first else read.parent,
                (grant, self._wait_s(grant) or 0.0),
            )
        )

    def _reserve_hbm(self, grant: Grant, wanted: HbmWanted) -> None:
        """Reserve HBM for a request that has its slots.

        Slots come first: what holds HBM then waits for no slots, while requests that receive KV in
        the buffer hold slots and wait for HBM.
        """
        request_id, prompt_blocks = grant.request_id, self.geometry.blocks_for(wanted.prompt_tokens)

        def granted(blocks: tuple[int, ...]) -> None:
            if self.reserved_hbm.takes_free_hbm:
                self.active.hbm_allocated(request_id)
            self._reserved(grant, blocks[:prompt_blocks])

        self.reserved_hbm.request(request_id, *wanted, granted)

    def _reserved(self, grant: Grant, hbm_blocks: tuple[int, ...]) -> None:
        wait_s = self._wait_s(grant)
        if wait_s is None:  # released meanwhile, which has freed everything
            return
        self._send(Reserved(grant.request_id, grant.slots, wait_s, grant.cached, hbm_blocks))

    def _wait_s(self, grant: Grant) -> float | None:
        """Return for how long a request has waited; None if it was released meanwhile."""
        assigned_ns = self.active.assigned_ns(grant.request_id)
        return None if assigned_ns is None else (self.trace.now_ns() - assigned_ns) / _NS_PER_S

    def _cancel_reads(self, request_id: str) -> None:
        """Read nothing more for a request, from storage or from another DE."""
        self._fetches.cancel(request_id)
        with self._grant_lock:
            self._grant_reads.pop(request_id, None)
        self._reader.cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        """Drop what a request waits for: its reads, and its load into HBM."""
        self._cancel_reads(request_id)
        self._prompts.released(request_id)

    def _leave_hbm(self, new: Sequence[GeneratedBlock], hits: Sequence[GeneratedBlock]) -> None:
        """Write a prompt's new blocks to storage; hits leave HBM only for the DRAM cache."""
        missing = {*self.buffer.missing([hit.key for hit in hits])} if self.buffer.caches else ()
        self._generated.persist_prompt(new, [hit for hit in hits if hit.key in missing])

    def _read(self, message: Read) -> None:
        """Queue the storage reads of a run of blocks; ``ReadDone`` follows."""
        first, count = message.first_key, message.run.blocks.count
        keys = self.active.keys_of(message.request_id)[first : first + count]
        if len(keys) < count:
            raise BadRequestError(
                f"request {message.request_id}: {count} blocks are to be read, of which its "
                f"assignment here has {len(keys)} keys; send it through the router"
            )
        reads, now_ns = run_reads(self.geometry, message.run), self.trace.now_ns()
        self._reader.add(
            ReadTask(message.request_id, reads, keys, now_ns, message.deadline_s, message.parent)
        )

    def _ask_release(self, message: Release) -> None:
        """Release a request, at once or after the forward pass that it is part of."""
        if self.active.ask_release(message):
            self._release(message)

    def _release(self, message: Release) -> None:
        """Release a request that is in no forward pass; ``Released`` follows."""
        self._free(message)
        self._send(Released(request_id=message.request_id))

    def _free(self, message: Release) -> None:
        self._cancel_reads(message.request_id)
        self._chains.drop(message.request_id)
        self.active.drop(message.request_id)
        self._prompts.released(message.request_id)
        for memory in (self.buffer, self.reserved_hbm):
            if message.writer_certain:
                memory.end_quarantine(message.request_id)
            else:
                memory.quarantine(message.request_id)
            memory.release(message.request_id)

    def end_session(self, reason: str) -> None:
        """Drop the requests that do not decode yet, as the router does (``assigned_requests``).

        A request does not need the router once its KV is in HBM.  It goes on while the client of
        its HTTP call is connected, and counts in the load until ``active.ended``.
        """
        self._tier.end_session()
        self._retention.end_session()
        self._teardown.end_session(reason)
        self._chains.clear()
        self._lookups.drop()

    def in_doubt(self) -> InDoubt:
        """Return the in-doubt requests of earlier sessions, for the next ``Register``."""
        return self._teardown.in_doubt()

    def tick(self, now_ns: int) -> None:
        """Answer reads, fetches and look-ups past their deadline; called periodically.

        Also runs callbacks that waited for the engine's other ranks, and reports changes of the
        DRAM cache to the router.
        """
        self._rank.poll()
        self.peers.expire(now_ns)
        self._reader.expire(now_ns)
        self._fetches.expire(now_ns)
        self._retention.expire(now_ns)
        self._lookups.expire(now_ns)
        self._tier.send_changes()

    # ------------------------------------------------------------------ work from the engine

    def take_call(self, transfer: PrefillTransfer) -> bool:
        """Take the assignment that a request's call brings, if it does; return whether it is here.

        A request that was released, of which the session is over or the prefill has been reported
        is not here: its slots may have other owners.
        """
        if transfer.assignment is not None:
            now_ns = self.trace.now_ns()
            self.active.add_called(transfer.request_id, transfer.assignment, now_ns)
        return self.active.is_active(transfer.request_id)

    def sent(self, request_id: str, failure: str | None) -> PrefillDone:
        """Return the message that ends a prefill, with the times of its forward passes.

        Without a failure the request is released here, as the router expects after this message:
        its last transfer is over.
        """
        pass_ns, waited_ns = self.active.pass_times_ns(request_id)
        done = PrefillDone(
            request_id=request_id,
            failure=failure,
            forward_s=pass_ns / _NS_PER_S,
            transfer_s=waited_ns / _NS_PER_S,
        )
        if failure is None:
            release = Release(request_id=request_id, reason="prefill done")
            if self.active.ask_release(release):
                self._free(release)
        return done

    def ended(self, request_id: str) -> None:
        """A DE's own request has ended, finished or not; the router is notified if it is over."""
        if self.active.ended(request_id):
            self._prompts.over(request_id)

    def fill_hbm(
        self,
        decode_transfer: DecodeTransfer,
        hbm_blocks: Sequence[HbmBlock],
        done: Callable[[str | None], None],
    ) -> None:
        """Copy a prompt's KV from the DE buffer to HBM (labels 8-9), then free its slots.

        ``done`` gets None or the error, on the thread that ends the copy.  If the PE has sent KV
        into reserved HBM, ``hbm_blocks`` are those of ``reserved_hbm``, and the engine's request
        owns all of the reservation once ``done`` gets None.
        """
        self._prompts.fill_hbm(decode_transfer, hbm_blocks, done)

    def persist_generated(self, blocks: Sequence[GeneratedBlock]) -> None:
        """Persist full blocks; returns when their HBM is no longer needed."""
        if self.settings.mode.moves_bytes:
            self._generated.persist(blocks)
        else:
            self._generated.persist_keys(blocks)

    def close(self, limit: TimeLimit) -> bool:
        """Finish writes, stop all threads and free memory, within the limit; idempotent.

        Return whether the threads that move bytes have ended, and no PE may write to HBM.
        """
        self._fetches.close()
        self._generated.close(limit)
        moved = self._rank.close(limit)
        written = self.persister.close(limit)
        self._lookups.close(limit)
        read = self._reader.close(limit)
        # Other ranks map the memory of an engine of several, and would have to agree.
        alone = self._rank.group.size == 1
        if alone and moved and written and read and not self.buffer.quarantined():
            self.unused_memory = self._rank.memory
        # The next data plane of this process may have the same HBM, to which a PE may still write.
        moved = moved and not self.reserved_hbm.quarantined()
        self._transport.close()
        self._device.close()
        self._storage.close()
        self.trace.write()
        return moved
