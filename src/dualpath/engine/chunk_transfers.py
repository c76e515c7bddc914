"""The transfers of one chunk in one forward pass, and the HBM blocks of abandoned transfers."""

from collections.abc import Callable
from typing import Protocol

from dualpath.core.blocks import BlockGeometry
from dualpath.engine.step_transfers import PrefillChunk
from dualpath.engine.threads import OS_THREADS, Threads


class BlockHolder(Protocol):
    """The allocator of an engine's HBM blocks, which can hold blocks back from reuse.

    An abandoned transfer may still write.  Its HBM blocks must not be reused meanwhile, though the
    engine has freed them.  This suffices also if layers share a region: a late byte of layer L and
    block b arrives in region L mod ``buffers`` at block b, which all other layers use for the same
    block b, and no other request has that block.

    Both methods are called from any thread; ``hold`` before the end of the pass in which the
    request failed.
    """

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Do not allocate these blocks until ``unhold``, whether they are free now or later."""
        ...

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Allow reuse again: no transfer writes to these blocks any more."""
        ...


class NoHolder:
    """The holder of an engine that never reuses HBM blocks for other requests."""

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Do nothing: the blocks are not reused."""

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Do nothing: no block was held."""


class ChunkTransfers:
    """Counts the transfers under way; an abandoned chunk gets no new transfers."""

    def __init__(
        self, chunk: PrefillChunk, geometry: BlockGeometry, threads: Threads = OS_THREADS
    ) -> None:
        self.chunk = chunk
        self.layout = chunk.layout(geometry)
        self._lock = threads.lock()
        self._moving = 0
        self._given_up = False
        self._then: Callable[[], None] | None = None

    @property
    def request_id(self) -> str:
        """The request of the chunk."""
        return self.chunk.prefill_transfer.request_id

    @property
    def moves(self) -> bool:
        """Whether a transfer may still write."""
        with self._lock:
            return self._moving > 0

    def start(self) -> bool:
        """Count a transfer that is about to be posted; False if the chunk is abandoned."""
        with self._lock:
            self._moving += not self._given_up
            return not self._given_up

    def ended(self) -> None:
        """A transfer has ended and writes no more."""
        with self._lock:
            assert self._moving > 0, f"request {self.request_id}: no transfer is under way"
            self._moving -= 1
            then = None if self._moving else self._then
        if then is not None:
            then()

    def give_up(self) -> None:
        """Abandon the chunk: no new transfer is started."""
        with self._lock:
            self._given_up = True

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call ``then`` once no transfer is under way; no transfer may start after this call."""
        with self._lock:
            if self._moving:
                self._then = then
                return
        then()
