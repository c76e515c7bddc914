"""Toy engines of several ranks, which are threads, each with its slice of every block.

``RankedCluster`` is a ``ToyCluster`` in which the prefill and the decode engine are cut as a test
likes: blocks in buffers and storage are whole all the same.
"""

import functools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.core.blocks import BlockKey, PartSlice
from dualpath.core.cluster import Role
from dualpath.core.control import Message, PeerUp, Persist, Registered
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.engine.control.traffic_manager import TrafficManager
from dualpath.engine.passes.device import HostDevice
from dualpath.engine.passes.forward_pass import ForwardPass
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.passes.hbm_layout import HbmLayout, HbmPart
from dualpath.engine.passes.step_transfers import PrefillChunk, Replica
from dualpath.engine.ranks.follower import FollowedPass, Follower
from dualpath.engine.ranks.rank import RankPlace
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import LEAVE_S, OS_THREADS, TimeLimit
from dualpath.plan.counts import new_full_blocks
from dualpath.storage.contract import BlockStorage
from dualpath.transport.contract import Direction, PieceIndices, RegionInfo, Transport
from dualpath.transport.copy_transport import CopyTransfer
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath.transport.memory import allocate_registered
from dualpath_lab.emulated.ranks import ThreadRanks
from tests.engine_harness import (
    GEOMETRY,
    HeldBlocks,
    ToyCluster,
    ToyEngine,
    kv_bytes,
    memory_storage,
)
from tests.guard import GUARD_S
from tests.thread_ranks import on_every_rank

HBM_BLOCKS = 64
LAYER_BYTES = GEOMETRY.bytes_of(0)


class Cut(NamedTuple):
    """An engine of ``ranks`` that divide ``heads``; latent KV counts as one replicated head."""

    ranks: int = 1
    heads: int = 4

    @property
    def slices(self) -> int:
        return min(self.ranks, self.heads)

    @property
    def replicas(self) -> int:
        return self.ranks // self.slices


class CountingTransport(InProcessTransport):
    """Counts posted bytes by the agent at the other end and the direction."""

    def __init__(self, agent: str, fabric: InProcessFabric) -> None:
        super().__init__(agent, fabric)
        self.posted: Counter[tuple[str, Direction]] = Counter()

    def post(
        self,
        direction: Direction,
        local_region: str,
        local_pieces: PieceIndices,
        agent: str,
        remote_region: str,
        remote_pieces: PieceIndices,
        *,
        traffic_class: str = "kv",
    ) -> CopyTransfer:
        transfer = super().post(
            *(direction, local_region, local_pieces, agent, remote_region, remote_pieces),
            traffic_class=traffic_class,
        )
        self.posted[agent, direction] += transfer.bytes
        return transfer


class ThreadExchange:
    """``engine.shared_loads.LoadExchange`` between the ranks of a toy engine: bytes by queues."""

    def __init__(self, engine: "RankedEngine", rank: int) -> None:
        self._engine, self._rank = engine, rank

    def exchange(self, layer: int, blocks: Sequence[Sequence[int]]) -> None:
        replicas, hbm = self._engine.cut.replicas, self._engine.hbms[self._rank]
        region = hbm[layer % self._engine.regions]
        own = region[list(blocks[self._rank % replicas])].copy()
        given = self._engine.group.ends[self._rank].gather(own)
        first = self._rank - self._rank % replicas
        for replica, ids in enumerate(blocks):
            if first + replica != self._rank:
                region[list(ids)] = given[first + replica]


class RankedEngine(ToyEngine):
    """A leader and its followers; ``ended`` are ranks that would have ended their process."""

    def __init__(
        self,
        role: Role,
        fabric: InProcessFabric,
        storage: BlockStorage,
        cut: Cut,
        *,
        layer_buffers: int = 0,
        transfer_deadline_s: float = GUARD_S,
        mode: Mode = Mode.DUALPATH,
        open_transport: Callable[[str], Transport] | None = None,
        share_loads: bool = False,
    ) -> None:
        self.cut = cut
        self._share_loads = share_loads
        self.regions = layer_buffers or GEOMETRY.layers
        name = "pe-0" if role is Role.PREFILL else "de-0"
        self.settings = EngineSettings(
            role=role,
            engine_id=name,
            router="tcp://unused:1",
            api_url="http://unused",
            storage="memory://toy",
            mode=mode,
            buffer_bytes=64 * GEOMETRY.full_block_bytes,
            staging_blocks=4,
            layer_buffers=layer_buffers,
            transfer_deadline_s=transfer_deadline_s,
        )
        self.epoch = "epoch-1"
        self.outbox: queue.Queue[Message] = queue.Queue()
        self.held = HeldBlocks()
        self.ended: list[int] = []
        self.group = ThreadRanks(cut.ranks)
        agents = [f"{name}-{self.epoch}-{rank}" for rank in range(cut.ranks)]
        self.transports = [CountingTransport(agent, fabric) for agent in agents]
        self._opened: list[Transport] = list(self.transports)
        if open_transport is not None:
            self._opened = [open_transport(agent) for agent in agents]
        self._memories = [
            allocate_registered(self.regions * HBM_BLOCKS * self.slice_bytes)
            for _ in range(cut.ranks)
        ]
        self.hbms: list[NDArray[np.uint8]] = [
            memory.array.reshape(self.regions, HBM_BLOCKS, self.slice_bytes)
            for memory in self._memories
        ]
        opened: list[Any] = on_every_rank(
            [
                functools.partial(self._leader, storage),
                *(functools.partial(self._follower, rank) for rank in range(1, cut.ranks)),
            ]
        )
        self.manager: TrafficManager = opened[0]
        self.followers: list[Follower] = opened[1:]
        self._kept: list[Message] = []
        self._seq = 0
        self._closed = threading.Event()
        self._ticks = threading.Thread(target=self._tick, daemon=True)
        self._ticks.start()

    @property
    def slice_bytes(self) -> int:
        return LAYER_BYTES // self.cut.slices

    def _tick(self) -> None:
        while not self._closed.wait(0.002):
            self.manager.tick(time.monotonic_ns())
            for follower in self.followers:
                follower.poll()

    def close(self) -> None:
        self._closed.set()
        self._ticks.join(GUARD_S)
        self.manager.close(TimeLimit(OS_THREADS, LEAVE_S))
        for follower in self.followers:
            follower.close()

    def _place(self, rank: int) -> RankPlace:
        replica = Replica(rank % self.cut.replicas, self.cut.replicas)
        exchange = ThreadExchange(self, rank) if self._share_loads else None
        return RankPlace(self.group.ends[rank], replica, exchange=exchange)

    def _layout(self, rank: int) -> HbmLayout:
        base, size = self._memories[rank].address, self.slice_bytes
        memories = tuple(
            RegionInfo(f"hbm.{i}", base + i * HBM_BLOCKS * size, size, size, HBM_BLOCKS)
            for i in range(self.regions)
        )
        part = PartSlice(rank // self.cut.replicas, self.cut.slices)
        layers = tuple(
            (HbmPart(memories[layer % self.regions], part),) for layer in range(GEOMETRY.layers)
        )
        return HbmLayout(memories, layers, HBM_BLOCKS * GEOMETRY.block_tokens)

    def _leader(self, storage: BlockStorage) -> TrafficManager:
        return TrafficManager(
            *(self.settings, GEOMETRY, storage, self._opened[0]),
            *(self._layout(0), self.outbox.put, HostDevice()),
            holder=self.held,
            place=self._place(0),
        )

    def _follower(self, rank: int) -> Follower:
        return Follower(
            *(self.settings, GEOMETRY, self._opened[rank], self._layout(rank)),
            *(self.held, self._place(rank), functools.partial(self._end, rank)),
        )

    def _end(self, rank: int) -> None:
        self.ended.append(rank)
        self.group.fail()

    def slice_of(self, rank: int, content: bytes) -> bytes:
        """The slice of a Layer Block of a rank."""
        first = rank // self.cut.replicas * self.slice_bytes
        return content[first : first + self.slice_bytes]

    def compute(self, rank: int, layer: int, block: int, content: bytes) -> None:
        """Write a rank's slice of a Layer Block into its HBM."""
        here = self.hbms[rank][layer % self.regions][block]
        here[:] = np.frombuffer(self.slice_of(rank, content), np.uint8)

    def holds(self, rank: int, layer: int, block: int, content: bytes) -> bool:
        """Whether a rank's HBM has its slice of a Layer Block."""
        here = self.hbms[rank][layer % self.regions][block]
        return bytes(here.tobytes()) == self.slice_of(rank, content)

    def begin_pass(self, rank: int, parts: Sequence[PrefillChunk]) -> ForwardPass | FollowedPass:
        """Begin a pass at one rank, on the thread of the rank."""
        if rank:
            return self.followers[rank - 1].begin_pass(parts)
        return ForwardPass(self.manager, self.outbox.put, parts)

    def mover(self, rank: int) -> TrafficManager | Follower:
        """The movers of a rank."""
        return self.followers[rank - 1] if rank else self.manager

    def on_ranks(self, call: Callable[[int], Any]) -> list[Any]:
        """Call something for each rank, all at the same time."""
        return on_every_rank([functools.partial(call, rank) for rank in range(self.cut.ranks)])


class RankedCluster(ToyCluster):
    """One PE and one DE with the given numbers of ranks."""

    def __init__(
        self,
        pe: Cut,
        de: Cut,
        *,
        layer_buffers: int = 2,
        transfer_deadline_s: float = GUARD_S,
        mode: Mode = Mode.DUALPATH,
        open_transport: Callable[[str], Transport] | None = None,
        share_loads: bool = False,
    ) -> None:
        self.fabric = InProcessFabric()
        self.geometry = GEOMETRY
        self.storage = memory_storage()
        self.prefill = RankedEngine(
            *(Role.PREFILL, self.fabric, self.storage, pe),
            layer_buffers=layer_buffers if mode.layerwise else 0,
            transfer_deadline_s=transfer_deadline_s,
            mode=mode,
            open_transport=open_transport,
            share_loads=share_loads,
        )
        self.serving = RankedEngine(
            *(Role.DECODE, self.fabric, self.storage, de),
            transfer_deadline_s=transfer_deadline_s,
            mode=mode,
            open_transport=open_transport,
        )
        self.pe, self.de, self.decode = self.prefill, self.serving, [self.serving]
        for engine, peer in ((self.pe, self.de), (self.de, self.pe)):
            engine.command(Registered())
            engine.command(PeerUp(peer.manager.address(peer.epoch)))

    def close(self) -> None:
        """Stop both engines."""
        self.prefill.close()
        self.serving.close()

    def pass_of(
        self,
        work: Sequence[tuple[PrefillTransfer, list[BlockKey], BlockRun, Sequence[int]]],
        at_layer: Callable[[int, int], None] = lambda rank, layer: None,
    ) -> list[dict[str, str]]:
        """Run one forward pass on all ranks; return the failures of each rank.

        They include each request that a rank computed without having its stored KV.
        """
        wrong: list[tuple[str, int, int]] = []
        parts = [PrefillChunk(transfer, chunk, tuple(hbm)) for transfer, _, chunk, hbm in work]

        def run(rank: int) -> dict[str, str]:
            engine = self.prefill
            stream = engine.begin_pass(rank, parts)
            for layer in range(GEOMETRY.layers):
                for _, keys, chunk, hbm in work:
                    for block in range(chunk.first, chunk.end):
                        content = kv_bytes(keys[block], layer)
                        engine.compute(rank, layer, hbm[block], content)
                stream.wait_loaded(layer)
                at_layer(rank, layer)
                for transfer, keys, chunk, hbm in work:
                    for block in range(chunk.first):
                        if not engine.holds(rank, layer, hbm[block], kv_bytes(keys[block], layer)):
                            wrong.append((transfer.request_id, rank, layer))
                stream.computed(layer)
            return stream.finish({})

        failures: list[dict[str, str]] = self.prefill.on_ranks(run)
        assert [each for each in wrong if each[0] not in failures[0]] == []
        return failures

    def hand_over(
        self, transfer: PrefillTransfer, keys: list[BlockKey], hbm: Sequence[int]
    ) -> list[str | None]:
        """Persist the prompt's new blocks and copy all into every rank's HBM; return errors."""
        full = new_full_blocks(0, transfer.prompt_tokens, GEOMETRY.block_tokens)
        self.de.command(Persist(transfer.request_id, transfer.hit_blocks, full))
        waiting = DecodeTransfer(transfer.request_id, transfer.prompt_tokens, transfer.de_slots)

        def fill(rank: int) -> str | None:
            over: queue.Queue[str | None] = queue.Queue()
            self.serving.mover(rank).fill_hbm(waiting, hbm, over.put)
            return over.get(timeout=GUARD_S)

        return self.serving.on_ranks(fill)

    def generate(self, blocks: Sequence[tuple[int, BlockKey]]) -> None:
        """Persist generated blocks (HBM block, key), computed by all ranks."""

        def persist(rank: int) -> None:
            for block, key in blocks:
                for layer in range(GEOMETRY.layers):
                    self.serving.compute(rank, layer, block, kv_bytes(key, layer))
            generated = [GeneratedBlock(block, key) for block, key in blocks]
            self.serving.mover(rank).persist_generated(generated)

        self.serving.on_ranks(persist)
