"""Simulated transfers between engines: their bytes move after random delays.

A transfer takes some time, may stall, and may fail after a part of it has moved.  Transfers
continue while the process that posted them is stopped, and after their peer was disconnected.  A
transfer with a disconnected peer is MOVING until the last byte has arrived, then FAILED
(``transport.contract.Transport.disconnect``).  Transfers of a killed process continue until its
machine reports its exit.  Whenever bytes arrive, the owner of their memory is checked.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import msgspec

from dualpath.transport.contract import Direction, PieceIndices, TransferState
from dualpath.transport.copy_transport import CopyTransfer
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath_lab.faults.simulation.world import Process, World

#: The current owner of a piece of a region of an agent; None if it is free.
OwnerOf = Callable[[str, str, int], str | None]

_DELAYS_S = (0.0, 0.0001, 0.0005, 0.002, 0.02)
#: Probability that a pending fault hits the next transfer.
_HIT = 0.3
#: Delay until the engine that posted a transfer notices its end.
_NOTICED_S = (0.0, 0.0, 0.0001, 0.001, 0.02)


class TransferFaults:
    """Number of future transfers that stall or fail; ``stall_s`` is the range of stalls."""

    def __init__(self) -> None:
        self.to_stall = 0
        self.to_fail = 0
        self.stall_s = (0.5, 8.0)


class Memory(msgspec.Struct, frozen=True):
    """Pieces of a region that a transfer writes to."""

    agent: str
    region: str
    pieces: tuple[int, ...]


class SimTransfer:
    """One posted transfer; ``transport.contract.Transfer``."""

    def __init__(
        self, transport: "SimTransport", inner: CopyTransfer, peer: str, writes: Memory
    ) -> None:
        self.bytes = inner.bytes
        self._transport = transport
        self._inner = inner
        self.peer = peer
        self._writes = writes
        self._owners = transport.owners(writes, writes.pieces)
        self._sources: list[int] = inner.sources.tolist()
        self._destinations: list[int] = inner.destinations.tolist()
        self._broken: str | None = None
        self._fail_reason: str | None = None
        self._plan(transport.world, transport.faults)

    def _plan(self, world: World, faults: TransferFaults) -> None:
        chance = world.chance
        delay_s = world.pick(_DELAYS_S)
        if faults.to_stall and chance.random() < _HIT:
            faults.to_stall -= 1
            delay_s = chance.uniform(*faults.stall_s)
            world.note("transfer", f"{self} stalls for {delay_s:.3f} s")
        elif faults.to_fail and chance.random() < _HIT:
            faults.to_fail -= 1
            self._broken = "an injected fault has broken it"
            world.note("transfer", f"{self} fails after {delay_s:.3f} s")
        world.maybe_fault()
        if world.verbose:
            world.detail("transfer", lambda: f"{self} begins, {delay_s:.4f} s")
        if half := len(self._writes.pieces) // 2:
            world.after(delay_s / 2, functools.partial(self._move, 0, half))
        world.after(delay_s, functools.partial(self._land, half))

    def __str__(self) -> str:
        memory = self._writes
        return f"of {self._transport.agent} into {memory.agent} {memory.region} {memory.pieces}"

    def poll(self) -> TransferState:
        """Return its state; the simulation moves its bytes."""
        return self._inner.state

    def fail_when_over(self, reason: str) -> None:
        """Set the transfer to FAILED once no more bytes can arrive."""
        self._fail_reason = reason

    def error(self) -> str | None:
        """Return why it failed, or None."""
        return self._inner.error()

    def release(self) -> None:
        """Release the handle."""
        self._inner.release()

    def _may_move(self) -> bool:
        """Whether bytes can still arrive: both processes must exist."""
        sent = not self._transport.process.has_exited and self._transport.alive(self._writes.agent)
        return sent and self._inner.state is TransferState.MOVING

    def _move(self, first: int, end: int) -> None:
        if not self._may_move():
            return
        pieces, piece_bytes = self._writes.pieces[first:end], self._inner.piece_bytes
        for index, owner in enumerate(self._transport.owners(self._writes, pieces), first):
            if owner is None or owner != self._owners[index]:
                self._transport.world.problem(
                    f"bytes {self} arrive in piece {self._writes.pieces[index]}, which belonged "
                    f"to {self._owners[index] or 'no request'} and belongs to "
                    f"{owner or 'no request'} now"
                )
            ctypes.memmove(self._destinations[index], self._sources[index], piece_bytes)

    def _land(self, first: int) -> None:
        inner = self._inner
        if self._broken is None and not self._transport.process.has_exited:
            self._move(first, len(self._writes.pieces))
            if not self._transport.alive(inner.peer):
                self._fail_reason = self._fail_reason or f"agent {inner.peer!r} has exited"
        if (error := self._broken or self._fail_reason) is not None:
            inner.fail(error)
        elif inner.state is TransferState.MOVING:
            inner.state = TransferState.DONE
        self._transport.over(self)


class SimTransport(InProcessTransport):
    """The agent of one engine; ``noticed`` is called when it notices the end of a transfer."""

    def __init__(
        self,
        agent: str,
        fabric: InProcessFabric,
        process: Process,
        faults: TransferFaults,
        owner_of: OwnerOf,
        noticed: Callable[[], None],
    ) -> None:
        super().__init__(agent, fabric)
        self.process = process
        self.world = process.world
        self.faults = faults
        self._owner_of = owner_of
        self._noticed = functools.partial(process.step, noticed)
        self._moving: dict[SimTransfer, None] = {}

    def owners(self, memory: Memory, pieces: Sequence[int]) -> list[str | None]:
        """Return the current owners of pieces."""
        return [self._owner_of(memory.agent, memory.region, piece) for piece in pieces]

    def alive(self, agent: str) -> bool:
        """Whether an agent's process is alive."""
        return self.fabric.is_alive(agent)

    def post(  # type: ignore[override]
        self,
        direction: Direction,
        local_region: str,
        local_pieces: PieceIndices,
        agent: str,
        remote_region: str,
        remote_pieces: PieceIndices,
        *,
        traffic_class: str = "kv",
    ) -> SimTransfer:
        """Post a transfer; its bytes move later."""
        inner = super().post(
            direction,
            local_region,
            local_pieces,
            agent,
            remote_region,
            remote_pieces,
            traffic_class=traffic_class,
        )
        if direction is Direction.WRITE:
            writes = Memory(agent, remote_region, tuple(int(p) for p in remote_pieces))
        else:
            writes = Memory(self.agent, local_region, tuple(int(p) for p in local_pieces))
        transfer = SimTransfer(self, inner, agent, writes)
        self._moving[transfer] = None
        return transfer

    def disconnect(self, agent: str) -> None:
        """Remove a peer; transfers in flight continue to their end."""
        self._peers.pop(agent, None)
        for transfer in self._moving:
            if transfer.peer == agent:
                transfer.fail_when_over(f"agent {agent!r} was disconnected")

    def close(self) -> None:
        """Leave the fabric; what is in flight to others still arrives, as over a network."""
        for transfer in self._moving:
            transfer.fail_when_over(f"transport {self.agent!r} was closed")
            self._unfinished.pop(transfer._inner, None)
        super().close()

    def over(self, transfer: SimTransfer) -> None:
        """A transfer has ended."""
        self._moving.pop(transfer, None)
        self.world.after(self.world.pick(_NOTICED_S), self._noticed)

    @property
    def unfinished(self) -> int:
        """Number of transfers with unreleased handles."""
        return len(self._unfinished)
