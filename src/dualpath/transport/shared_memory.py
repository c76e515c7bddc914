"""Engines of one machine move KV without a network: through memory that both of them map.

The buffer of a decode engine is a memory file (``transport.memory``).  A prefill engine of the same
machine maps it, and copies between it and its own HBM: with ``memmove`` if KV is in DRAM, with the
copies of its GPU if KV is in HBM.  Without an RDMA NIC, NIXL would emulate what moves between a GPU
and the DRAM of another process.

*One machine* is proven, never assumed from a host name alone.  The other engine must have the same
boot ID, host name and PID namespace (``HostProcess.host``), its memory file must be there to open
under its process number, and the file must contain the nonce that the engine has sent.  The same
condition lets either engine confirm that the other one's process has exited
(``node.host_process``): the owner of a mapped buffer can prove the death of each process that can
write to it.

A mapping holds the peer's pages, also after the peer's process has exited.  So it is dropped when
the peer is disconnected, and within ``WATCH_S`` of the peer's exit, which ranks without forward
passes would learn late.  It stays until the last copy to or from it has ended.

The copies of a GPU have never been run on a GPU.
"""

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import HostProcess, SharedMemory
from dualpath.core.errors import ConfigError, DualPathError, PeerLostError, TransportError
from dualpath.transport.contract import (
    AgentInfo,
    Direction,
    PieceIndices,
    RegionInfo,
    Transfer,
    TransferState,
    Transport,
)
from dualpath.transport.copy_transport import CopyTransfer, CopyTransport
from dualpath.transport.memory import RegisteredMemory, file_path, map_shared
from dualpath.transport.regions import span_bytes

log = logging.getLogger(__name__)

#: Interval at which peers are checked for exited processes.
WATCH_S = 1.0
#: How long ``close`` waits for copies of the device, and the interval of its polls.
_CLOSE_DRAIN_S = 1.0
_CLOSE_POLL_S = 0.001

#: The interpreter's lock is released once per this number of copied bytes, which take some 0.1 ms.
#: Released for every piece, it slows copies of small pieces; never released, it stops the thread
#: that computes for up to 5 ms at a time.
_LOCKED_BYTES = 512 << 10
_MemMove = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_UnlockedMemMove = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_address = ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value
assert _memmove_address is not None
_move, _move_unlocked = _MemMove(_memmove_address), _UnlockedMemMove(_memmove_address)


def copy_pieces(
    sources: NDArray[np.int64], destinations: NDArray[np.int64], piece_bytes: int
) -> None:
    """Copy pieces of equal size between addresses of this process."""
    per_release = max(1, _LOCKED_BYTES // piece_bytes)
    pairs = zip(destinations.tolist(), sources.tolist(), strict=True)
    for number, (destination, source) in enumerate(pairs, start=1):
        move = _move if number % per_release else _move_unlocked
        move(destination, source, piece_bytes)


class HbmCopies(NamedTuple):
    """Copies by the device that has this engine's HBM; see ``engine.passes.device``.

    ``pin`` page-locks host memory (address, bytes, owner) and ``unpin`` undoes it for an address.
    ``copy`` queues copies of equal pieces (sources, destinations, bytes of a piece, whether into
    HBM) and returns at once.
    """

    pin: Callable[[int, int, object], None]
    unpin: Callable[[int], None]
    copy: Callable[[NDArray[np.int64], NDArray[np.int64], int, bool], Transfer]


class _Mapping:
    """A peer's memory in this process; unmapped, and unpinned before, with its last reference."""

    def __init__(self, shared: SharedMemory, memory: RegisteredMemory) -> None:
        self.shared = shared
        self.pinned = False
        self._memory = memory
        self._pinning = threading.Lock()

    def pin(self, hbm: HbmCopies) -> None:
        """Page-lock the memory once, which may take seconds; raises ``ConfigError``."""
        with self._pinning:
            if not self.pinned:
                hbm.pin(self._memory.address, self._memory.size_bytes, None)
                weakref.finalize(self, _unpin, hbm, self._memory).atexit = False
                self.pinned = True

    def translate(self, there: NDArray[np.int64], piece_bytes: int) -> NDArray[np.int64] | None:
        """Return the peer's addresses of pieces as this process's; None if any is outside."""
        start = self.shared.base_address
        if int(there.min()) < start:
            return None
        if int(there.max()) + piece_bytes > start + self.shared.size_bytes:
            return None
        return there + (self._memory.address - start)


def _unpin(hbm: HbmCopies, memory: RegisteredMemory) -> None:
    hbm.unpin(memory.address)


class _Peer(NamedTuple):
    process: HostProcess
    mappings: tuple[_Mapping, ...]


class SharedMemoryFabric:
    """The mapped memories of peers; see ``transport.copy_transport.Fabric``.

    ``this`` is the agent's own process, ``has_exited`` checks another one.
    """

    def __init__(self, this: HostProcess, has_exited: Callable[[HostProcess], bool]) -> None:
        self._this = this
        self._has_exited = has_exited
        self._lock = threading.Lock()
        self._own = ""
        self._peers: dict[str, _Peer] = {}

    def join(self, agent: str) -> bytes:
        """Raise ``ConfigError`` if other processes could not recognise this one."""
        if not self._this.host:
            raise ConfigError(
                "memory cannot be shared with other engines: this process has no identity that "
                "they could verify (/proc has no boot ID, or shows another PID namespace); mount "
                "the container's own /proc, or set --transport nixl"
            )
        self._own = agent
        return b""

    def kill(self, agent: str) -> None:
        """Remove an agent and drop its mappings."""
        with self._lock:
            self._peers.pop(agent, None)
            if agent == self._own:
                self._own = ""
                self._peers.clear()

    def reach(self, peer: AgentInfo) -> None:
        """Map a peer's memory; raises ``PeerLostError`` if it is not shown to be on this machine.

        Mappings of the same memory are reused.
        """
        processes = {shared.process for shared in peer.shared}
        if len(processes) != 1:
            raise PeerLostError(
                f"agent {peer.agent!r} shares no memory with other engines; NIXL reaches it "
                "(--transport auto or nixl)"
            )
        (process,) = processes
        with self._lock:
            known = self._peers.get(peer.agent)
        if known is not None and tuple(m.shared for m in known.mappings) == peer.shared:
            return
        if process.host != self._this.host:
            raise PeerLostError(
                f"agent {peer.agent!r} is on another machine or in another PID namespace, so that "
                "its memory cannot be mapped; NIXL reaches it (--transport auto or nixl)"
            )
        mappings = tuple(_map(peer.agent, shared) for shared in peer.shared)
        if self._has_exited(process):
            raise PeerLostError(f"agent {peer.agent!r} cannot be reached: its process has exited")
        with self._lock:
            self._peers[peer.agent] = _Peer(process, mappings)

    def is_alive(self, agent: str) -> bool:
        """Whether the agent is this one or a connected peer."""
        return agent == self._own or agent in self._peers

    def stalls(self, agent: str) -> bool:
        """Return False: mapped memory can be reached even while its owner is suspended."""
        return False

    def exited(self) -> list[str]:
        """Return the peers with exited processes."""
        with self._lock:
            peers = list(self._peers.items())
        return [agent for agent, peer in peers if self._has_exited(peer.process)]

    def mappings(self, agent: str) -> tuple[_Mapping, ...]:
        """Return a peer's mappings; raises ``PeerLostError`` if it is not connected."""
        with self._lock:
            peer = self._peers.get(agent)
        if peer is None:
            raise PeerLostError(f"agent {agent!r} is not connected; connect to it again")
        return peer.mappings

    def copy(self, transfer: CopyTransfer) -> str | None:
        """Copy all pieces; they are in memory that is mapped here."""
        if not transfer.here.size:
            return None
        try:
            # ``mapping`` holds the memory while it is copied, also if the peer is disconnected.
            mapping, there = self.local(transfer)
        except DualPathError as error:
            return str(error)
        writes = transfer.direction is Direction.WRITE
        ends = (transfer.here, there) if writes else (there, transfer.here)
        copy_pieces(*ends, transfer.piece_bytes)
        del mapping
        return None

    def local(self, transfer: CopyTransfer) -> tuple[_Mapping | None, NDArray[np.int64]]:
        """Return the addresses of the peer's pieces in this process, and what must stay mapped.

        Raises ``TransportError`` if they are not in mapped memory.
        """
        there = transfer.there
        if transfer.peer == self._own:
            return None, there
        for mapping in self.mappings(transfer.peer):
            found = mapping.translate(there, transfer.piece_bytes)
            if found is not None:
                return mapping, found
        raise TransportError(
            f"transfer with {transfer.peer!r} failed: {there.size} pieces from address "
            f"{int(there.min())} on are not in the memory that it shares"
        )


def _map(agent: str, shared: SharedMemory) -> _Mapping:
    path = file_path(shared.process.pid, shared.descriptor)
    try:
        memory = map_shared(path, shared.size_bytes)
    except ConfigError as error:
        raise PeerLostError(f"agent {agent!r} cannot be reached: {error}") from error
    assert memory.file is not None
    if memory.file.nonce != shared.nonce:
        raise PeerLostError(
            f"agent {agent!r} cannot be reached: {path} is not the memory that it shares; its "
            "process has been replaced"
        )
    return _Mapping(shared, memory)


class SharedMemoryTransport(CopyTransport):
    """One agent that maps its peers' memory; see ``dualpath.transport.contract.Transport``.

    ``hbm`` are the copies of the device that has this engine's HBM; without them only DRAM can be
    registered.  Raises ``ConfigError`` if other processes could not recognise this one.
    """

    fabric: SharedMemoryFabric

    def __init__(
        self,
        agent: str,
        this: HostProcess,
        has_exited: Callable[[HostProcess], bool],
        hbm: HbmCopies | None = None,
        *,
        traffic_classes: Collection[str] = ("kv",),
    ) -> None:
        super().__init__(
            agent, SharedMemoryFabric(this, has_exited), traffic_classes=traffic_classes
        )
        self._this = msgspec.structs.replace(this, ranks=())
        self.hbm = hbm
        self._shared: dict[int, SharedMemory] = {}
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def register(self, region: RegionInfo, keep_alive: object) -> None:
        """Register memory; raises ``ConfigError`` also for HBM without a device that copies."""
        if region.memory == "VRAM" and self.hbm is None:
            raise ConfigError(
                f"region {region.name!r} is in {region.memory}, which --transport memory cannot "
                "access; use --transport auto"
            )
        super().register(region, keep_alive)
        if isinstance(keep_alive, RegisteredMemory) and (file := keep_alive.file) is not None:
            self._shared[file.descriptor] = SharedMemory(
                self._this, file.descriptor, file.address, file.size_bytes, file.nonce
            )

    def info(self) -> AgentInfo:
        """Return this agent's regions and the memory that peers can map."""
        return msgspec.structs.replace(super().info(), shared=tuple(self._shared.values()))

    def connect(self, peer: AgentInfo, views: Sequence[RegionInfo] = ()) -> None:
        """Map a peer's memory; raises ``PeerLostError`` unless it is on this machine.

        With HBM, ``pin`` must follow before transfers are posted.
        """
        super().connect(peer, views)
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="shared-memory-watch", daemon=True
            )
            self._watcher.start()

    def pin(self, agent: str) -> None:
        """Page-lock a connected peer's memory for the device, which takes seconds.

        Raises ``ConfigError`` if the device refuses, ``PeerLostError`` if the peer is disconnected.
        """
        assert self.hbm is not None
        for mapping in self.fabric.mappings(agent):
            mapping.pin(self.hbm)

    def serves(self, agent: str, *, dram: bool = False) -> bool:
        """Whether a peer is connected, and its memory is pinned if that is necessary.

        With ``dram`` it is not: KV is copied from DRAM to DRAM, by the processor.
        """
        try:
            mappings = self.fabric.mappings(agent)
        except PeerLostError:
            return False
        return dram or self.hbm is None or all(mapping.pinned for mapping in mappings)

    def disconnect(self, agent: str) -> None:
        """Disconnect a peer and drop its mappings, which stay until their copies have ended."""
        super().disconnect(agent)
        if agent != self.agent:
            self.fabric.kill(agent)

    def drop_exited(self) -> None:
        """Disconnect peers with exited processes, so that their memory is freed."""
        for agent in self.fabric.exited():
            log.info("the process of agent %s has exited; its memory is unmapped", agent)
            self.disconnect(agent)

    def close(self) -> None:
        """Wait for copies by the device, then drop all mappings; idempotent."""
        self._stop.set()
        deadline_s = time.monotonic() + _CLOSE_DRAIN_S
        while self._device_copies() and time.monotonic() < deadline_s:
            time.sleep(_CLOSE_POLL_S)
        super().close()

    def _device_copies(self) -> bool:
        """Whether a device still copies; polls all of its copies."""
        with self._lock:
            copies = [t for t in self._unfinished if isinstance(t, _HbmTransfer)]
        return any([transfer.is_copying() for transfer in copies])

    def _transfer(
        self,
        agent: str,
        direction: Direction,
        here: NDArray[np.int64],
        there: NDArray[np.int64],
        local: RegionInfo,
    ) -> CopyTransfer:
        if local.memory == "DRAM" or self.hbm is None:
            return super()._transfer(agent, direction, here, there, local)
        return _HbmTransfer(self, agent, direction, here, there, local.piece_bytes, self.hbm)

    def _watch(self) -> None:
        while not self._stop.wait(WATCH_S):
            self.drop_exited()


class _HbmTransfer(CopyTransfer):
    """A copy between a peer's memory and HBM, queued on the device by the first poll."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        peer: str,
        direction: Direction,
        here: NDArray[np.int64],
        there: NDArray[np.int64],
        piece_bytes: int,
        hbm: HbmCopies,
    ) -> None:
        super().__init__(transport, peer, direction, here, there, piece_bytes)
        self._fabric = transport.fabric
        self._hbm = hbm
        self._copy: Transfer | None = None
        self._held: _Mapping | None = None

    def poll(self) -> TransferState:
        """Queue the copy, then return its state; after ``fail`` it becomes FAILED at its end."""
        with self._lock:
            if self.state is TransferState.MOVING:
                self._advance()
            return self.state

    def fail(self, reason: str) -> None:
        """Fail: at once if nothing is queued, else when the device writes no more bytes."""
        with self._lock:
            if self.state is TransferState.MOVING:
                self._error = reason
                self._advance()

    def is_copying(self) -> bool:
        """Whether the device still copies, as of now."""
        return self._copy is not None and self.poll() is TransferState.MOVING

    def _advance(self) -> None:
        if self._copy is None:
            if self._error is None and self.here.size:
                self._error = self._queue()
            if self._copy is None:
                self.state = TransferState.DONE if self._error is None else TransferState.FAILED
            return
        found = self._copy.poll()
        if found is TransferState.MOVING:
            return
        self._error = self._error or self._copy.error()
        self._copy.release()
        self._held = None
        failed = found is TransferState.FAILED or self._error is not None
        self.state = TransferState.FAILED if failed else TransferState.DONE

    def _queue(self) -> str | None:
        """Queue the copy; return the error, None on success."""
        into_hbm = self.direction is Direction.READ
        try:
            self._held, there = self._fabric.local(self)
            source, destination = (there, self.here) if into_hbm else (self.here, there)
            self._copy = self._hbm.copy(source, destination, self.piece_bytes, into_hbm)
        except DualPathError as error:
            return str(error)
        return None


def _is_shared(region: RegionInfo, peer: AgentInfo) -> bool:
    """Whether all of a peer's region is in memory that the peer shares."""
    return any(
        shared.base_address <= region.base_address
        and region.base_address + span_bytes(region) <= shared.base_address + shared.size_bytes
        for shared in peer.shared
    )


class NearestTransport:
    """Reaches peers of this machine through shared memory, all others through the network.

    Copies within this engine use ``memory`` if both ends are in DRAM.  HBM is copied by the device
    (``memory.hbm``): then a peer's memory must be pinned, and the network serves the peer until a
    thread has pinned it.  A peer of which no views are connected is not pinned: whole pieces are
    copied between its DRAM and this engine's, by the processor.

    HBM of a device that leaves copies to NIXL (``device_copies``) is reached through the network
    only, and so is memory of a peer that is in none of its memory files.
    """

    def __init__(self, memory: SharedMemoryTransport, network: Transport) -> None:
        self._memory, self._network = memory, network
        #: Views of peers' memory that cannot be mapped, by agent.
        self._far: dict[str, frozenset[str]] = {}
        self._dram: set[str] = set()
        self._only_network = False

    def register(self, region: RegionInfo, keep_alive: object) -> None:
        """Register memory with both; HBM with ``memory`` only if the device copies it."""
        self._network.register(region, keep_alive)
        if region.memory == "VRAM" and self._memory.hbm is None:
            self._only_network = True
            return
        self._memory.register(region, keep_alive)
        if region.memory == "DRAM":
            self._dram.add(region.name)

    def view(self, view: RegionInfo) -> None:
        """Add a view of a registered region; see the contract."""
        self._network.view(view)
        if view.memory == "VRAM" and self._memory.hbm is None:
            return
        self._memory.view(view)
        if view.memory == "DRAM":
            self._dram.add(view.name)

    def info(self) -> AgentInfo:
        """Return the network's address, with the memory that peers of this machine can map."""
        return msgspec.structs.replace(self._network.info(), shared=self._memory.info().shared)

    def connect(self, peer: AgentInfo, views: Sequence[RegionInfo] = ()) -> None:
        """Connect through shared memory, or through the network with a log line that says why."""
        try:
            if self._only_network:
                raise PeerLostError("its GPU leaves copies to NIXL (device_copies)")
            self._memory.connect(peer, views)
        except PeerLostError as reason:
            self._network.connect(peer, views)
            log.info("this engine reaches %s through the network: %s", peer.agent, reason)
            return
        self._far[peer.agent] = far = frozenset(
            view.name for view in views if not _is_shared(view, peer)
        )
        if self._memory.serves(peer.agent, dram=not views):
            if far:
                self._connect_far(peer, views)
            log.info("this engine reaches %s through shared memory", peer.agent)
            return
        self._network.connect(peer, views)
        threading.Thread(
            target=self._pin, args=(peer.agent,), name="shared-memory-pin", daemon=True
        ).start()

    def _connect_far(self, peer: AgentInfo, views: Sequence[RegionInfo]) -> None:
        """Connect through the network to memory of a peer that cannot be mapped."""
        try:
            self._network.connect(peer, views)
        except PeerLostError as error:
            log.warning(
                "the memory of %s that is in none of its memory files cannot be reached: %s",
                *(peer.agent, error),
            )

    def disconnect(self, agent: str) -> None:
        """Disconnect a peer; its transfers end as those of their transport do."""
        self._far.pop(agent, None)
        self._memory.disconnect(agent)
        self._network.disconnect(agent)

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
    ) -> Transfer:
        """Post one transfer through the transport that serves the peer; see the contract."""
        within = agent == self._memory.agent and {local_region, remote_region} <= self._dram
        far = remote_region in self._far.get(agent, ())
        near = within or (self._memory.serves(agent, dram=local_region in self._dram) and not far)
        transport: Transport = self._memory if near else self._network
        return transport.post(
            *(direction, local_region, local_pieces, agent, remote_region, remote_pieces),
            traffic_class=traffic_class,
        )

    def close(self) -> None:
        """Close both; idempotent."""
        self._memory.close()
        self._network.close()

    def _pin(self, agent: str) -> None:
        try:
            self._memory.pin(agent)
        except DualPathError as error:
            log.warning("this engine reaches %s through the network: %s", agent, error)
            self._memory.disconnect(agent)
        else:
            log.info("this engine reaches %s through shared memory", agent)
