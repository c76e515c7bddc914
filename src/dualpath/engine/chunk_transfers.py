"""The transfers of one chunk in one forward pass, and what becomes of those that are given up."""

from collections.abc import Callable
from typing import Protocol

from dualpath.core.blocks import BlockGeometry
from dualpath.engine.step_transfers import PrefillChunk
from dualpath.engine.threads import OS_THREADS, Threads


class BlockHolder(Protocol):
    """Who gives out an engine's HBM blocks.

    A transfer that was given up may still write.  Its blocks must go to nobody else meanwhile,
    though the engine has freed them.  That is enough, also where layers share a region: a late
    byte of layer L and block b lands in region L mod ``buffers`` at block b, where every other
    layer keeps that same block only, and no other request has it.

    Both are called from any thread; ``hold`` before the pass ends in which the request failed.
    """

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Give these to nobody until ``let_go``, be they free now or later."""
        ...

    def let_go(self, hbm_blocks: tuple[int, ...]) -> None:
        """Nothing writes to them any more."""
        ...


class NoHolder:
    """For an engine that gives no HBM block to anybody else."""

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Nobody gets them anyway."""

    def let_go(self, hbm_blocks: tuple[int, ...]) -> None:
        """Nothing was held."""


class ChunkTransfers:
    """Counts what moves; a chunk that is ``given_up`` gets no new transfers."""

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
        """Whose chunk it is."""
        return self.chunk.prefill_transfer.request_id

    @property
    def moves(self) -> bool:
        """Whether a transfer may still write."""
        with self._lock:
            return self._moving > 0

    def start(self) -> bool:
        """Count a transfer that is about to be posted; False if it must not be."""
        with self._lock:
            self._moving += not self._given_up
            return not self._given_up

    def ended(self) -> None:
        """A transfer writes no more."""
        with self._lock:
            self._moving -= 1
            then = None if self._moving else self._then
        if then is not None:
            then()

    def give_up(self) -> None:
        """Start no more."""
        with self._lock:
            self._given_up = True

    def when_still(self, then: Callable[[], None]) -> None:
        """Call ``then`` once nothing moves any more, at once if so; no transfer starts by now."""
        with self._lock:
            if self._moving:
                self._then = then
                return
        then()
