"""The interface of every transport; ``tests/contract`` tests all transports against it.

A transport belongs to one engine.  It registers *regions* (memory divided into equal blocks,
DRAM buffer or HBM) once; a *transfer* copies a list of blocks between a local region and a region
of an agent, which may be the engine itself (the CNIC loopback of §5.2).  A *view* of a region is
the same part of each of its blocks.  No memory is registered for a view and views are not sent to
peers: each side creates the views that it addresses.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import SharedMemory
from dualpath.core.errors import ConfigError, DualPathError


class Direction(enum.StrEnum):
    """WRITE copies local → remote, READ copies remote → local."""

    READ = "read"
    WRITE = "write"


class RegionInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered region as other agents address it.

    Piece ``i`` occupies ``[base_address + i * stride_bytes, … + piece_bytes)``, 0 ≤ i < pieces.
    A DRAM buffer is one region with a piece per slot, each a Full Block; the KV cache of one part
    of one layer in HBM is a region with a piece per engine block.  ``memory`` is "DRAM" or "VRAM".
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

        Raises ``ConfigError`` if it exceeds the piece.
        """
        if offset_bytes < 0 or piece_bytes < 1 or offset_bytes + piece_bytes > self.piece_bytes:
            raise ConfigError(
                f"view {name!r} of {piece_bytes} bytes at {offset_bytes} exceeds the pieces of "
                f"{self.piece_bytes} bytes of region {self.name!r}; both engines need the same "
                "model and block size"
            )
        return msgspec.structs.replace(
            self,
            name=name,
            base_address=self.base_address + offset_bytes,
            piece_bytes=piece_bytes,
        )


class AgentInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address and regions of an agent, sent to other engines over the control plane.

    ``agent`` is unique per process start (it contains the engine's epoch), so that a restarted
    engine is never mistaken for its previous process.  ``shared`` is the memory that agents of the
    same machine can map.
    """

    agent: str
    metadata: bytes
    regions: tuple[RegionInfo, ...]
    shared: tuple[SharedMemory, ...] = ()


class TransferState(enum.Enum):
    """States of a transfer.

    DONE: every byte is at its destination and visible to processes there.  FAILED: the destination
    holds undefined bytes, but no more bytes will be written: local memory may be reused.
    """

    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"


class Transfer(Protocol):
    """One posted transfer."""

    bytes: int

    def poll(self) -> TransferState:
        """Drive progress and return the state; does not raise for a failed transfer or peer."""
        ...

    def error(self) -> str | None:
        """Return why it failed, or None."""
        ...

    def release(self) -> None:
        """Release the handle; only after DONE or FAILED."""
        ...


PieceIndices = Sequence[int] | NDArray[np.int64]


class Transport(Protocol):
    """One engine's end of the compute network (CNIC)."""

    def register(self, region: RegionInfo, keep_alive: object) -> None:
        """Register memory once; ``keep_alive`` is referenced as long as the registration.

        Raises ``ConfigError`` for a second region of the same name or an invalid region.
        """
        ...

    def view(self, view: RegionInfo) -> None:
        """Add a view of a registered region under its own name.

        Raises ``ConfigError`` if the name is taken or the view is not part of a registered region.
        """
        ...

    def info(self) -> AgentInfo:
        """Return this agent's address and all regions registered so far, without views."""
        ...

    def connect(self, peer: AgentInfo, views: Sequence[RegionInfo] = ()) -> None:
        """Connect to a peer, with ``views`` of its regions; idempotent for equal arguments.

        A call with more regions or views replaces the earlier ones.  Raises ``PeerLostError`` if
        the peer cannot be reached, ``ConfigError`` for a view as ``view`` does.
        """
        ...

    def disconnect(self, agent: str) -> None:
        """Disconnect a peer; its unfinished transfers become FAILED.  Unknown names are ignored.

        A transfer fails once no more bytes can be written at either side, which a hanging peer may
        delay without bound.  Until then ``poll`` returns MOVING and neither side may reuse the
        memory: a peer that was only unreachable continues with the memory that was written.
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
        """Post one transfer of ``local_pieces[i]`` ↔ ``remote_pieces[i]``; does not block.

        ``agent`` may be this agent's own name.  One call is one request of the library, whatever
        the number of pieces.  Raises ``TransportError`` for unknown
        regions, piece sizes that differ or indices out of range, ``PeerLostError`` for an
        unknown or lost agent.
        """
        ...

    def close(self) -> None:
        """Deregister everything and stop; idempotent."""
        ...


# ---------------------------------------------------------------------------------- transfer group
# Several posted transfers as one: the parts of a layer, each with its own work list.


def post_together(posts: Sequence[Callable[[], Transfer]]) -> Transfer:
    """Post all of ``posts`` and return a transfer that ends when the last of them has ended.

    An exception of the first post is raised: then nothing was posted.  If a later post fails, the
    returned transfer fails once the posted ones have ended.
    """
    first, *others = posts
    posted = [first()]
    refusal: str | None = None
    for post in others:
        try:
            posted.append(post())
        except DualPathError as error:
            refusal = str(error)
            break
    return posted[0] if len(posts) == 1 else TransferGroup(posted, refusal)


class TransferGroup:
    """See ``dualpath.transport.contract.Transfer``; ``refusal``: error of a post that failed.

    The group is MOVING as long as any transfer is, so that no memory is reused before.
    """

    def __init__(self, transfers: Sequence[Transfer], refusal: str | None = None) -> None:
        self.bytes = sum(transfer.bytes for transfer in transfers)
        self._transfers = transfers
        self._refusal = refusal

    def poll(self) -> TransferState:
        """Drive all transfers and return the state of the group."""
        states = {transfer.poll() for transfer in self._transfers}
        if TransferState.MOVING in states:
            return TransferState.MOVING
        failed = self._refusal is not None or TransferState.FAILED in states
        return TransferState.FAILED if failed else TransferState.DONE

    def error(self) -> str | None:
        """Return the error of the first transfer that failed, or None."""
        errors = (transfer.error() for transfer in self._transfers)
        return next((error for error in errors if error is not None), self._refusal)

    def release(self) -> None:
        """Release all handles."""
        for transfer in self._transfers:
            transfer.release()
