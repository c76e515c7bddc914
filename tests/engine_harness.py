"""Engines without a model, for tests: real traffic managers, real buffers, checkable bytes.

``ToyEngine`` is a traffic manager with an HBM of its own.  KV bytes are a function of (block key,
layer), so a test can say of any byte anywhere whether it is right.  ``ToyPrefill.forward`` behaves
like an engine's forward pass: before a layer is computed it checks that all KV before the chunk
is in HBM, then it writes the chunk's own.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from dualpath.core.blocks import BlockGeometry, BlockKey, StoreNamespace, block_keys
from dualpath.core.cluster import Role
from dualpath.core.control import (
    Assign,
    Message,
    PeerUp,
    Persist,
    Read,
    ReadDone,
    Registered,
    Release,
    Released,
    Report,
    Reserved,
    RouterMessage,
)
from dualpath.core.errors import BufferTooSmallError
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.engine.control.traffic_manager import TrafficManager
from dualpath.engine.passes.device import Device, HostDevice
from dualpath.engine.passes.hbm_layout import shared_layers
from dualpath.engine.passes.layer_stream import LayerSettings, LayerStream
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import LEAVE_S, OS_THREADS, Threads, TimeLimit
from dualpath.plan.counts import new_full_blocks
from dualpath.storage.contract import BlockStorage
from dualpath.storage.memory import MemoryStorage
from dualpath.transport.contract import RegionInfo
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath.transport.memory import allocate_registered
from tests.guard import GUARD_S

GEOMETRY = BlockGeometry.uniform(layers=5, block_tokens=4, layer_block_bytes=256)

M = TypeVar("M", bound=Message)


def kv_bytes(key: BlockKey, layer: int, size: int = GEOMETRY.bytes_of(0)) -> bytes:
    """The one right content of a Layer Block."""
    return hashlib.shake_128(key + layer.to_bytes(2, "big")).digest(size)


def full_block(key: BlockKey, geometry: BlockGeometry = GEOMETRY) -> bytes:
    """The one right content of a Full Block."""
    layers = range(geometry.layers)
    return b"".join(kv_bytes(key, layer, geometry.bytes_of(layer)) for layer in layers)


def is_seen(geometry: BlockGeometry, layer: int, block: int, next_token: int) -> bool:
    """Whether a token, or one after it, attends to a block: computed token by token."""
    window = geometry.layer_windows[layer] if geometry.layer_windows else 0
    tokens = range(block * geometry.block_tokens, (block + 1) * geometry.block_tokens)
    return not window or any(next_token - token < window for token in tokens)


def prompt_keys(tokens: int, salt: str = "s") -> list[BlockKey]:
    """Keys of a prompt's blocks; a partial last block gets one of its own for its content."""
    ids = list(range(tokens))
    keys = block_keys(ids, GEOMETRY.block_tokens, cache_salt=salt)
    if tokens % GEOMETRY.block_tokens:
        keys.append(hashlib.sha256(f"partial {salt} {tokens}".encode()).digest())
    return keys


def memory_storage(geometry: BlockGeometry = GEOMETRY) -> MemoryStorage:
    """An empty storage for toy blocks."""
    return MemoryStorage(StoreNamespace(model="toy", dtype="u8", layout="toy", geometry=geometry))


class HeldBlocks:
    """HBM blocks to which a late transfer may still write."""

    def __init__(self) -> None:
        self.now: set[int] = set()
        self.changed = threading.Condition()

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        with self.changed:
            self.now |= set(hbm_blocks)

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        with self.changed:
            self.now -= set(hbm_blocks)
            self.changed.notify_all()

    def wait_for_none(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: not self.now, GUARD_S)


class ToyHbm(HeldBlocks):
    """Allocates HBM blocks, for requests that the engine has not got yet as well."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        super().__init__()
        self.blocks = blocks
        self._block_tokens = block_tokens
        self._reserved: dict[str, tuple[int, ...]] = {}
        self._owned: dict[str, tuple[int, ...]] = {}
        self._waiting: dict[str, tuple[int, Callable[[tuple[int, ...]], None]]] = {}
        self.takes_free_hbm = True

    @property
    def free(self) -> set[int]:
        """The blocks that a request could get now."""
        used = {b for taken in (self._reserved, self._owned) for of in taken.values() for b in of}
        return set(range(self.blocks)) - used - self.now

    def check(self, request_id: str, prompt_tokens: int, new_tokens: int) -> None:
        most = self.blocks * self._block_tokens
        if prompt_tokens + new_tokens > most:
            raise BufferTooSmallError(f"{prompt_tokens + new_tokens} tokens, at most {most} fit")

    def reserve(
        self,
        request_id: str,
        prompt_tokens: int,
        new_tokens: int,
        granted: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._waiting[request_id] = -(-(prompt_tokens + new_tokens) // self._block_tokens), granted
        self._grant()

    def end_reservation(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._reserved.pop(request_id, None)
        self._grant()

    def hand_over(self, request_id: str) -> None:
        self._owned[request_id] = self._reserved.pop(request_id)

    def end(self, request_id: str) -> None:
        """The engine's own request is over."""
        del self._owned[request_id]
        self._grant()

    def _grant(self) -> None:
        for request_id, (count, granted) in list(self._waiting.items()):
            if count > len(free := sorted(self.free, reverse=True)):
                return
            del self._waiting[request_id]
            self._reserved[request_id] = tuple(free[:count])
            granted(self._reserved[request_id])


class ToyEngine:
    """A traffic manager, its HBM, and the messages it sends to the router."""

    def __init__(
        self,
        role: Role,
        engine_id: str,
        fabric: InProcessFabric,
        storage: BlockStorage,
        *,
        buffer_blocks: int = 64,
        hbm_blocks: int = 64,
        layer_buffers: int = 0,
        mode: Mode = Mode.DUALPATH,
        trace_out: str = "",
        parallel_reads: int = 2,
        transfer_deadline_s: float = GUARD_S,
        threads: Threads = OS_THREADS,
        geometry: BlockGeometry = GEOMETRY,
        open_device: Callable[[], Device] = HostDevice,
    ) -> None:
        self.regions = layer_buffers or geometry.layers
        size = max(map(geometry.bytes_of, range(geometry.layers)))
        self._memory = allocate_registered(self.regions * hbm_blocks * size)
        self.hbm = self._memory.array.reshape(self.regions, hbm_blocks, size)
        regions = tuple(
            RegionInfo(
                name=f"hbm.{index}",
                base_address=self._memory.address + index * hbm_blocks * size,
                stride_bytes=size,
                piece_bytes=size,
                pieces=hbm_blocks,
            )
            for index in range(self.regions)
        )
        layout = shared_layers(regions, geometry, hbm_blocks * geometry.block_tokens)
        self.settings = EngineSettings(
            role=role,
            engine_id=engine_id,
            router="tcp://unused:1",
            api_url="http://unused",
            storage="memory://toy",
            mode=mode,
            buffer_bytes=buffer_blocks * geometry.full_block_bytes,
            staging_blocks=4,
            layer_buffers=layer_buffers,
            trace_out=trace_out,
            parallel_reads=parallel_reads,
            transfer_deadline_s=transfer_deadline_s,
        )
        self.epoch = "epoch-1"
        self.outbox: queue.Queue[Message] = queue.Queue()
        transport = InProcessTransport(f"{engine_id}-{self.epoch}", fabric)
        self.pool = ToyHbm(hbm_blocks, geometry.block_tokens)
        self.held: HeldBlocks = self.pool
        self.manager = TrafficManager(
            self.settings,
            geometry,
            storage,
            transport,
            layout,
            self.outbox.put,
            open_device(),
            threads=threads,
            holder=self.held,
            hbm_pool=self.pool,
        )
        self._kept: list[Message] = []

    def command(self, message: RouterMessage) -> None:
        """Give the traffic manager a command of the router."""
        self.manager.handle(message)

    def answer(self, kind: type[M], request_id: str | None = None) -> M:
        """Return the first message of a kind (for a request); others stay in the queue."""

        def fits(message: Message) -> bool:
            same = request_id is None or getattr(message, "request_id", None) == request_id
            return isinstance(message, kind) and same

        for message in self._kept:
            if fits(message):
                self._kept.remove(message)
                assert isinstance(message, kind)
                return message
        while True:
            message = self.outbox.get(timeout=GUARD_S)
            if fits(message):
                assert isinstance(message, kind)
                return message
            self._kept.append(message)

    def answers(self, kind: type[Message]) -> list[Message]:
        """Return the messages of a kind that have arrived, without waiting."""
        while not self.outbox.empty():
            self._kept.append(self.outbox.get_nowait())
        return [m for m in self._kept if isinstance(m, kind)]

    def assign(
        self, request_id: str, tokens: int, blocks: int, keys: Sequence[BlockKey] = ()
    ) -> None:
        """Assign a request with these keys and ask for buffer."""
        self.command(Assign(request_id, tokens, blocks, tuple(keys)))

    def report(self) -> Report:
        """Return the current load."""
        return self.manager.report()

    def slot_bytes(self, slot: int) -> bytes:
        """Return a buffer slot's content."""
        return bytes(self.manager.buffer.view(slot))


class ToyCluster:
    """One PE and one or more (``decode_engines``) connected DEs."""

    def __init__(
        self,
        storage: BlockStorage | None = None,
        *,
        layer_buffers: int = 2,
        mode: Mode = Mode.DUALPATH,
        buffer_blocks: int = 64,
        trace_out: str = "",
        decode_engines: int = 1,
        transfer_deadline_s: float = GUARD_S,
        threads: Threads = OS_THREADS,
        geometry: BlockGeometry = GEOMETRY,
        open_device: Callable[[], Device] = HostDevice,
    ) -> None:
        self.fabric = InProcessFabric()
        self.geometry = geometry
        self.storage = storage if storage is not None else memory_storage(geometry)
        self.mode = mode
        buffers = layer_buffers if mode.layerwise else 0
        self.layers = LayerSettings(buffers=buffers or geometry.layers, overlap=mode.layerwise)
        self.pe = ToyEngine(
            Role.PREFILL,
            "pe-0",
            self.fabric,
            self.storage,
            layer_buffers=buffers,
            mode=mode,
            buffer_blocks=buffer_blocks,
            trace_out=trace_out,
            transfer_deadline_s=transfer_deadline_s,
            threads=threads,
            geometry=geometry,
            open_device=open_device,
        )
        self.decode = [
            ToyEngine(
                Role.DECODE,
                f"de-{number}",
                self.fabric,
                self.storage,
                mode=mode,
                buffer_blocks=buffer_blocks,
                trace_out=trace_out and f"{trace_out}.de{number or ''}",
                transfer_deadline_s=transfer_deadline_s,
                threads=threads,
                geometry=geometry,
                open_device=open_device,
            )
            for number in range(decode_engines)
        ]
        self.de = self.decode[0]
        self.pe.command(Registered())
        for de in self.decode:
            de.command(Registered())
            for engine, peer in ((self.pe, de), (de, self.pe)):
                engine.command(PeerUp(peer.manager.address(peer.epoch)))

    def close(self) -> None:
        """Stop both engines."""
        for engine in (self.pe, *self.decode):
            engine.manager.close(TimeLimit(OS_THREADS, LEAVE_S))

    def store(self, keys: Sequence[BlockKey]) -> None:
        """Put right blocks into storage."""
        self.storage.write(keys, [memoryview(full_block(key, self.geometry)) for key in keys])

    def load(
        self,
        request_id: str,
        keys: list[BlockKey],
        prompt_tokens: int,
        pe_hits: int,
        de_hits: int,
        decode: int = 0,
    ) -> PrefillTransfer:
        """Reserve, read the first ``pe_hits`` blocks on the PE and the next on the DE."""
        de = self.decode[decode]
        blocks = self.geometry.blocks_for(prompt_tokens)
        full = new_full_blocks(0, prompt_tokens, self.geometry.block_tokens)
        de.assign(request_id, prompt_tokens, blocks, keys[:full])
        de_slots = de.answer(Reserved, request_id).slots
        hits: list[HitRun] = []
        whole_from = self.geometry.whole_from(pe_hits + de_hits)
        self.pe.assign(request_id, prompt_tokens, pe_hits, keys[:pe_hits])
        if pe_hits:
            slots = self.pe.answer(Reserved, request_id).slots
            run = HitRun(Role.PREFILL, BlockRun(0, pe_hits), slots)
            hits.append(run.whole_behind(whole_from))
            self._read(self.pe, request_id, hits[-1])
        if de_hits:
            slots = de_slots[pe_hits : pe_hits + de_hits]
            run = HitRun(Role.DECODE, BlockRun(pe_hits, de_hits), slots)
            hits.append(run.whole_behind(whole_from))
            de_slots = self._read(de, request_id, hits[-1]).slots
        hit_blocks = pe_hits + de_hits
        return PrefillTransfer(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            hit_blocks=hit_blocks,
            hit_key_tail=keys[hit_blocks - 1] if hit_blocks else b"",
            hits=tuple(hits),
            decode_engine=f"de-{decode}",
            decode_epoch=de.epoch,
            de_slots=de_slots,
        )

    def _read(self, engine: ToyEngine, request_id: str, run: HitRun) -> ReadDone:
        engine.command(Read(request_id, run, run.blocks.first, GUARD_S))
        done = engine.answer(ReadDone, request_id)
        assert done.good_blocks == run.blocks.count, done
        return done

    def forward(
        self,
        work: Sequence[tuple[PrefillTransfer, list[BlockKey], BlockRun, Sequence[int]]],
        at_layer: Callable[[int, LayerStream], None] = lambda layer, stream: None,
    ) -> dict[str, str]:
        """Run one forward pass; per request (transfer, keys, chunk, HBM blocks)."""
        chunks = [
            PrefillChunk(prefill_transfer, chunk, tuple(hbm)).connected(
                self.pe.manager.peers.agents_of
            )
            for prefill_transfer, _, chunk, hbm in work
        ]
        stream = self.pe.manager.passes.begin(chunks, self.layers)
        for layer in range(self.geometry.layers):
            size = self.geometry.bytes_of(layer)
            region = self.pe.hbm[layer % self.pe.regions][:, :size]
            for _, keys, chunk, hbm in work:  # new KV is written before anything is waited for
                for block in range(chunk.first, chunk.end):
                    new = kv_bytes(keys[block], layer, size)
                    region[hbm[block]] = np.frombuffer(new, np.uint8)
            stream.wait_loaded(layer)
            at_layer(layer, stream)
            for prefill_transfer, keys, chunk, hbm in work:
                if prefill_transfer.request_id in stream.failures:
                    continue
                next_token = chunk.first * self.geometry.block_tokens
                for block in range(chunk.first):
                    if not is_seen(self.geometry, layer, block, next_token):
                        continue
                    found = region[hbm[block]].tobytes()
                    assert found == kv_bytes(keys[block], layer, size), (layer, block)
            stream.computed(layer)
        return self.pe.manager.passes.end(stream)

    def hand_to_decode(
        self, prefill_transfer: PrefillTransfer, keys: list[BlockKey], hbm: Sequence[int]
    ) -> str | None:
        """Persist the prompt's new blocks and copy everything to the DE's HBM."""
        full = new_full_blocks(0, prefill_transfer.prompt_tokens, GEOMETRY.block_tokens)
        self.de.command(Persist(prefill_transfer.request_id, prefill_transfer.hit_blocks, full))
        decode_transfer = DecodeTransfer(
            request_id=prefill_transfer.request_id,
            prompt_tokens=prefill_transfer.prompt_tokens,
            slots=prefill_transfer.de_slots,
        )
        return self.fill(decode_transfer, hbm)

    def fill(self, decode_transfer: DecodeTransfer, hbm: Sequence[int]) -> str | None:
        """Copy everything to the DE's HBM; return why it failed."""
        over = threading.Event()
        errors: list[str | None] = []

        def done(error: str | None) -> None:
            errors.append(error)
            over.set()

        self.de.manager.fill_hbm(decode_transfer, hbm, done)
        assert over.wait(GUARD_S)
        return errors[0]

    def release(self, request_id: str) -> None:
        """End the request on both engines."""
        for engine in (self.pe, self.de):
            engine.command(Release(request_id=request_id, reason="finished"))
            engine.answer(Released, request_id)
