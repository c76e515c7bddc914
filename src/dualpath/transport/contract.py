"""The contract every transport keeps; ``tests/contract`` runs it against all of them.

A transport belongs to one engine.  It registers *regions* (memory divided into equal blocks,
DRAM buffer or HBM) once; a *transfer* moves a list of blocks between a local region and a region
of some agent, which may be the engine itself (the CNIC loopback of §5.2).  A *view* of a region is
the same piece of each of its blocks: no memory is registered for it, and nobody else hears of it.
Who addresses it makes it, at either end.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError


class Direction(enum.StrEnum):
    """WRITE moves local → remote, READ moves remote → local."""

    READ = "read"
    WRITE = "write"


class RegionInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered region as other agents address it.

    Piece ``i`` occupies ``[base_address + i * stride_bytes, … + piece_bytes)``, 0 ≤ i < pieces.
    A buffer is one region with a piece per slot, each a Full Block; what lies in HBM for one part
    of one layer is a region with a piece per engine block.  ``memory`` is "DRAM" or "VRAM".
    """

    name: str
    base_address: int
    stride_bytes: int
    piece_bytes: int
    pieces: int
    memory: str = "DRAM"
    device: int = 0

    def part(self, name: str, offset_bytes: int, piece_bytes: int) -> "RegionInfo":
        """Return the view of ``piece_bytes`` at ``offset_bytes`` of every piece.

        Raises ``ConfigError`` if that reaches out of the piece.
        """
        if offset_bytes < 0 or piece_bytes < 1 or offset_bytes + piece_bytes > self.piece_bytes:
            raise ConfigError(
                f"view {name!r} of {piece_bytes} bytes at {offset_bytes} reaches out of the "
                f"pieces of {self.piece_bytes} bytes of region {self.name!r}; both ends need the "
                "same model and block size"
            )
        return msgspec.structs.replace(
            self,
            name=name,
            base_address=self.base_address + offset_bytes,
            piece_bytes=piece_bytes,
        )


class AgentInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All another engine needs to reach this one; travels over the control plane.

    ``agent`` is unique per process start (it carries the engine's epoch), so that a restarted
    engine is never mistaken for its former self.
    """

    agent: str
    metadata: bytes
    regions: tuple[RegionInfo, ...]


class TransferState(enum.Enum):
    """Life of a transfer.

    DONE: every byte is at its destination, and a process there sees it.  FAILED: the destination
    holds undefined bytes, but none will arrive here any more: local memory may be reused.
    """

    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"


class Transfer(Protocol):
    """One posted transfer."""

    bytes: int

    def poll(self) -> TransferState:
        """Drive progress and return the state; never raises for a failed transfer or lost peer."""
        ...

    def error(self) -> str | None:
        """Return why it failed, or None."""
        ...

    def release(self) -> None:
        """Give the handle back; only after DONE or FAILED."""
        ...


PieceIndices = Sequence[int] | NDArray[np.int64]


class Transport(Protocol):
    """One engine's end of the compute network (CNIC)."""

    def register(self, region: RegionInfo, keep_alive: object) -> None:
        """Register memory once; ``keep_alive`` is held as long as the registration.

        Raises ``ConfigError`` for a second region of the same name or overlapping nonsense.
        """
        ...

    def view(self, view: RegionInfo) -> None:
        """Make a view of a registered region known by its own name.

        Raises ``ConfigError`` if the name is taken or a piece lies in no registered region's.
        """
        ...

    def info(self) -> AgentInfo:
        """Return this agent's address book entry, with all regions registered so far, no views."""
        ...

    def connect(self, peer: AgentInfo, views: Sequence[RegionInfo] = ()) -> None:
        """Make a peer reachable, with ``views`` of its regions; idempotent for the same of both.

        A longer list of either is taken over.  Raises ``PeerLostError`` if it cannot be reached,
        ``ConfigError`` for a view as ``view`` does.
        """
        ...

    def disconnect(self, agent: str) -> None:
        """Forget a peer; its unfinished transfers turn FAILED.  Unknown names are ignored.

        They do so as soon as no byte of theirs can still arrive, here or at the peer, which a peer
        that hangs may delay without bound; until then ``poll`` says MOVING and neither end may
        reuse their memory: a peer that was only out of sight lives on with what was written to it.
        """
        ...

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
        """Post one transfer of ``local_pieces[i]`` ↔ ``remote_pieces[i]`` and return at once.

        ``agent`` may be this agent's own name.  One call is one posted work list (the doorbell
        batching of §5.2), whatever the number of pieces.  Raises ``TransportError`` for unknown
        regions, piece sizes that differ or indices out of range, ``PeerLostError`` for an
        unknown or lost agent.
        """
        ...

    def close(self) -> None:
        """Deregister everything and stop; idempotent."""
        ...
