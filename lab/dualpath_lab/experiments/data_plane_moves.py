"""Layer Blocks between two processes: raw NIXL and forward passes of the traffic manager.

Both post the same transfers in the same order: per layer one of all hit blocks and one of all
computed blocks, with two layers in flight.
"""

import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import EngineAddress, Role
from dualpath.core.control import Assign, Message, PeerUp, Reserved
from dualpath.core.errors import EngineLostError, TransportError
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.control.traffic_manager import TrafficManager
from dualpath.engine.passes.hbm_layout import shared_layers
from dualpath.engine.passes.layer_stream import LayerSettings
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import LEAVE_S, OS_THREADS, TimeLimit
from dualpath.storage.memory import MemoryStorage
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import allocate_registered
from dualpath.transport.nixl import NixlTransport
from dualpath.transport.regions import check_pair
from dualpath_lab.experiments.raw_nixl import RawAgent, RawPeer
from dualpath_lab.experiments.settings import DataPlaneSettings, Leg, Mover, PostCost, Rate

# -------------------------------------------------------------------------------- data plane posts
# Cost of posting a transfer by its number of pieces.

#: Pieces of a region; larger transfers use some of them repeatedly.
_POOL_PIECES = 1000
#: Number of posts per size: about this many pieces in total, within these limits.
_PIECES_IN_ALL, _LEAST_POSTS, _MOST_POSTS = 5000, 5, 100


def measure_posts(settings: DataPlaneSettings) -> list[PostCost]:
    """Return the costs of WRITEs between two agents of this process, medians.

    Pieces are scattered at both ends, so that NIXL cannot merge any.
    """
    os.environ["UCX_TLS"] = settings.tls
    here, there = (
        RawAgent(f"posts-{end}", _POOL_PIECES, settings.layer_block_bytes, tuned=True)
        for end in ("here", "there")
    )
    here.connect(there.peer())
    scattered = np.random.default_rng(0).permutation(_POOL_PIECES)
    costs = [
        _cost(here, there, np.resize(scattered, pieces)) for pieces in settings.descriptor_counts
    ]
    here.close()
    there.close()
    return costs


def _cost(here: RawAgent, there: RawAgent, indices: NDArray[np.int64]) -> PostCost:
    """Time the steps of ``NixlTransport.post``."""
    own, others = here.peer().region, there.peer().region
    taken = []
    posts = min(_MOST_POSTS, max(_LEAST_POSTS, _PIECES_IN_ALL // len(indices)))
    for _ in range(posts + 1):
        start_s = time.perf_counter()
        checked, checked_there = check_pair(own, indices, others, indices)
        checked_s = time.perf_counter()
        handle = here.make("WRITE", checked.astype(np.int32), checked_there.astype(np.int32))
        made_s = time.perf_counter()
        here.post(handle)
        posted_s = time.perf_counter()
        here.finish(handle)
        taken.append((checked_s - start_s, made_s - checked_s, posted_s - made_s))
    check_s, make_s, post_s = (median(column) for column in zip(*taken[1:], strict=True))
    return PostCost(
        len(indices), check_s, make_s, post_s
    )  # the first post, which connects, is left out


#: Layers in flight, as with the default ``layer_buffers``.
LAYERS_IN_FLIGHT = 2
_DEADLINE_S = 60.0
_EPOCH = "one"
_REQUEST = "moved"


class _Initiator(Protocol):
    """The PE's side."""

    def connect(self, peer: Any) -> None:  # noqa: ANN401 - each mover has its own kind of peer
        """Connect to the DE."""
        ...

    def one_pass(self, leg: Leg) -> int:
        """Transfer all layers once; return the bytes."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class _RawInitiator:
    def __init__(self, settings: DataPlaneSettings, mover: Mover) -> None:
        self._settings = settings
        pieces = settings.layers * settings.blocks
        tuned = mover is Mover.NIXL
        self._agent = RawAgent("raw-pe", pieces, settings.layer_block_bytes, tuned=tuned)

    def connect(self, peer: RawPeer) -> None:
        self._agent.connect(peer)

    def one_pass(self, leg: Leg) -> int:
        """Post the transfers of a forward pass: a region is loaded once its last layer was sent."""
        hits, layers = _hits(self._settings, leg), self._settings.layers
        sends: list[Any] = []
        load = self._load(0, hits)
        for layer in range(layers):
            if layer + 1 < layers:
                if len(sends) == LAYERS_IN_FLIGHT - 1:
                    self._agent.finish(sends.pop(0))
                following = self._load(layer + 1, hits)
            if load is not None:
                self._agent.finish(load)
            sends.append(self._post("WRITE", layer, hits, self._settings.blocks))
            load = following
        for send in sends:
            self._agent.finish(send)
        return layers * self._settings.blocks * self._settings.layer_block_bytes

    def _load(self, layer: int, hits: int) -> Any:  # noqa: ANN401 - untyped library
        return self._post("READ", layer, 0, hits) if hits else None

    def _post(self, direction: str, layer: int, first: int, end: int) -> Any:  # noqa: ANN401 - as above
        settings = self._settings
        blocks = np.arange(first, end, dtype=np.int32)
        here = layer % LAYERS_IN_FLIGHT * settings.blocks + blocks
        handle = self._agent.make(direction, here, blocks * settings.layers + layer)
        self._agent.post(handle)
        return handle

    def close(self) -> None:
        self._agent.close()


class _Engine:
    """A traffic manager without a router; ``reported`` are the messages that it sends."""

    def __init__(self, settings: DataPlaneSettings, role: Role) -> None:
        geometry = settings.geometry
        size = settings.layer_block_bytes
        self._memory = allocate_registered(LAYERS_IN_FLIGHT * settings.blocks * size)
        self._memory.array[:] = 1
        regions = tuple(
            RegionInfo(
                f"hbm.{i}", self._memory.address + i * settings.blocks * size, *(size, size),
                pieces=settings.blocks,
            )
            for i in range(LAYERS_IN_FLIGHT)
        )  # fmt: skip
        engine = EngineSettings(
            role=role,
            engine_id=role.value,
            router="",
            api_url="",
            storage="",
            buffer_bytes=settings.blocks * geometry.full_block_bytes,
            staging_blocks=1,
            transport="nixl",
            ucx_tls=settings.tls,
        )
        storage = MemoryStorage(StoreNamespace("data-plane", "bytes", "none", geometry))
        self.reported: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.manager = TrafficManager(
            engine,
            geometry,
            storage,
            NixlTransport(f"{role.value}-{os.getpid()}", tls=settings.tls),
            shared_layers(regions, geometry, settings.blocks * geometry.block_tokens),
            self.reported.put,
        )

    def close(self) -> None:
        self.manager.close(TimeLimit(OS_THREADS, LEAVE_S))


class _DecodeEngine(_Engine):
    def __init__(self, settings: DataPlaneSettings) -> None:
        super().__init__(settings, Role.DECODE)
        self.manager.handle(Assign(_REQUEST, 1, settings.blocks))
        reserved = self.reported.get(timeout=_DEADLINE_S)
        assert isinstance(reserved, Reserved)
        self._slots = reserved.slots

    def peer(self) -> tuple[EngineAddress, tuple[int, ...]]:
        """Return address and slots for the PE."""
        return self.manager.address(_EPOCH), self._slots


class _PrefillEngine(_Engine):
    def __init__(self, settings: DataPlaneSettings) -> None:
        super().__init__(settings, Role.PREFILL)
        self._settings = settings
        self._slots: tuple[int, ...] = ()
        self._agents: tuple[str, ...] = ()

    def connect(self, peer: tuple[EngineAddress, tuple[int, ...]]) -> None:
        address, self._slots = peer
        self.manager.handle(PeerUp(address))
        self.manager.handle(Assign(_REQUEST, 1, 0))
        self._agents = tuple(agent.agent for agent in address.agents)

    def one_pass(self, leg: Leg) -> int:
        """Run a forward pass without computation; its chunk is one block, or the whole prompt."""
        geometry, blocks = self._settings.geometry, self._settings.blocks
        hits = _hits(self._settings, leg)
        run = HitRun(Role.DECODE, BlockRun(0, hits), self._slots[:hits])
        prefill_transfer = PrefillTransfer(
            request_id=_REQUEST,
            prompt_tokens=blocks * geometry.block_tokens,
            hit_blocks=hits,
            hit_key_tail=b"",
            hits=(run,) if hits else (),
            decode_engine=Role.DECODE.value,
            decode_epoch=_EPOCH,
            de_slots=self._slots,
        )
        chunk = BlockRun(hits, blocks - hits)
        work = PrefillChunk(prefill_transfer, chunk, tuple(range(blocks)), self._agents)
        stream = self.manager.passes.begin([work], LayerSettings(LAYERS_IN_FLIGHT, overlap=True))
        for layer in range(geometry.layers):
            stream.wait_loaded(layer)
            stream.computed(layer)
        if failures := self.manager.passes.end(stream):
            raise TransportError(f"the forward pass failed: {failures[_REQUEST]}")
        return blocks * geometry.full_block_bytes


def _hits(settings: DataPlaneSettings, leg: Leg) -> int:
    """Return the number of blocks read from the DE; at least one block is computed and sent."""
    return settings.blocks - 1 if leg is Leg.DE_TO_PE else 0


def measure_moves(settings: DataPlaneSettings, mover: Mover) -> dict[Leg, Rate]:
    """Return the rate of a mover on every leg, between two new processes."""
    with _pair(settings, mover) as ask:
        return {leg: ask(leg) for leg in Leg}


@contextmanager
def _pair(settings: DataPlaneSettings, mover: Mover) -> Iterator[Callable[[Leg], Rate]]:
    """Run a PE and a DE process during the ``with`` block; yields a function to measure a leg."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    prefill_end, decode_end = spawn.Pipe()
    processes = [
        spawn.Process(target=_prefill_process, args=(settings, mover, there, prefill_end)),
        spawn.Process(target=_decode_process, args=(settings, mover, decode_end)),
    ]
    for process in processes:
        process.daemon = True
        process.start()
    for end in (there, prefill_end, decode_end):
        end.close()

    def ask(leg: Leg) -> Rate:
        try:
            here.send(leg)
            rate: Rate = here.recv()
            return rate
        except (EOFError, BrokenPipeError) as error:
            raise EngineLostError(
                f"a process of {mover.value!r} has ended; its error was printed before"
            ) from error

    try:
        yield ask
    finally:
        here.close()
        for process in processes:
            process.join(_DEADLINE_S)


def _decode_process(settings: DataPlaneSettings, mover: Mover, control: Connection) -> None:
    """Run the passive side: send its address, then its CPU time on request."""
    os.environ["UCX_TLS"] = settings.tls
    side: _DecodeEngine | RawAgent
    if mover is Mover.TRAFFIC_MANAGER:
        side = _DecodeEngine(settings)
    else:
        side = RawAgent(
            "raw-de",
            settings.layers * settings.blocks,
            settings.layer_block_bytes,
            tuned=mover is Mover.NIXL,
        )
    control.send(side.peer())
    while _received(control) is not None:
        control.send(time.process_time())
    side.close()


def _prefill_process(
    settings: DataPlaneSettings, mover: Mover, control: Connection, decode: Connection
) -> None:
    """Run the side that posts all transfers, one measurement per received leg."""
    os.environ["UCX_TLS"] = settings.tls
    side: _Initiator = (
        _PrefillEngine(settings)
        if mover is Mover.TRAFFIC_MANAGER
        else _RawInitiator(settings, mover)
    )
    side.connect(decode.recv())
    while (leg := _received(control)) is not None:
        control.send(_rate(settings, side, leg, decode))
    side.close()
    decode.send(None)


def _received(control: Connection) -> Any:  # noqa: ANN401 - any message
    try:
        return control.recv()
    except EOFError:
        return None


def _rate(settings: DataPlaneSettings, side: _Initiator, leg: Leg, decode: Connection) -> Rate:
    side.one_pass(leg)  # warm-up: connects, touches all pages
    before_s, start_s = _both_cpu_s(decode), time.perf_counter()
    moved_bytes = 0
    while (wall_s := time.perf_counter() - start_s) < settings.move_s:
        moved_bytes += side.one_pass(leg)
    return Rate(moved_bytes / wall_s, (_both_cpu_s(decode) - before_s) / moved_bytes * 1e9)


def _both_cpu_s(decode: Connection) -> float:
    decode.send("CPU time")
    there: float = decode.recv()
    return there + time.process_time()
