"""HBM of a decode engine that is reserved for a prompt before the engine gets the request.

With a hand-over in HBM a prefill engine writes a prompt's KV straight into the HBM of the DE.  The
DE reserves the blocks when the router assigns the request, and the request of the engine gets them
once all KV is there.  Until then the rules are those of slots in the DE's buffer: blocks are
reserved FIFO and as a whole, and blocks of a released request are quarantined while a PE may still
write to them.
"""

from collections.abc import Callable
from typing import Protocol

from dualpath.core.errors import BufferTooSmallError
from dualpath.engine.passes.hbm_layout import NO_BLOCK
from dualpath.engine.passes.pass_transfers import BlockHolder
from dualpath.engine.threads import OS_THREADS, Threads

#: Called with the reserved HBM blocks; the first ones are those of the prompt, in order.
Granted = Callable[[tuple[int, ...]], None]


class HbmPool(BlockHolder, Protocol):
    """The allocator of an engine's HBM blocks; methods may be called from any thread.

    ``takes_free_hbm``: reserved blocks are missing from the free HBM that the engine reports.
    """

    @property
    def takes_free_hbm(self) -> bool:
        """See the class."""
        ...

    def check(self, request_id: str, prompt_tokens: int, new_tokens: int) -> None:
        """Raise ``BufferTooSmallError`` for a reservation that could never be granted."""
        ...

    def reserve(
        self, request_id: str, prompt_tokens: int, new_tokens: int, granted: Granted
    ) -> None:
        """Reserve blocks for a prompt that the engine has not got yet; FIFO.

        ``granted`` is called once, from any thread and perhaps at once, unless the reservation is
        ended before.  An engine that cannot extend a request's blocks later reserves those of
        ``new_tokens`` generated tokens as well.
        """
        ...

    def end_reservation(self, request_id: str) -> None:
        """Free the blocks of a reservation, or end its waiting."""
        ...

    def hand_over(self, request_id: str) -> None:
        """From now on the engine's own request owns the blocks, and frees them at its end."""
        ...


class _Reservation:
    def __init__(self) -> None:
        self.blocks: tuple[int, ...] = ()
        self.quarantined = False


class HbmReservations:
    """The reservations of one engine; ``pool`` is None for one that receives no KV in HBM."""

    def __init__(self, pool: HbmPool | None, threads: Threads = OS_THREADS) -> None:
        self._pool = pool
        self._lock = threads.lock()
        self._reserved: dict[str, _Reservation] = {}

    @property
    def takes_free_hbm(self) -> bool:
        """Whether reserved blocks are missing from the free HBM that the engine reports."""
        return self._pool is not None and self._pool.takes_free_hbm

    def check(self, request_id: str, prompt_tokens: int, new_tokens: int) -> None:
        """Raise ``BufferTooSmallError`` for a reservation that could never be granted."""
        if self._pool is None:
            raise BufferTooSmallError(
                f"request {request_id} needs HBM for {prompt_tokens} tokens before its prefill, "
                "this engine reserves none; set handover to buffer at the router"
            )
        self._pool.check(request_id, prompt_tokens, new_tokens)

    def request(
        self,
        request_id: str,
        prompt_tokens: int,
        new_tokens: int,
        granted: Granted,
    ) -> None:
        """Queue a reservation; ``granted`` is called unless it is released before."""
        assert self._pool is not None, "checked before"
        reservation = _Reservation()
        with self._lock:
            assert request_id not in self._reserved, f"request {request_id} has HBM already"
            self._reserved[request_id] = reservation

        def reserved(blocks: tuple[int, ...]) -> None:
            assert NO_BLOCK not in blocks
            with self._lock:
                if self._reserved.get(request_id) is not reservation:
                    return  # Released meanwhile, which has freed the blocks.
                reservation.blocks = blocks
            granted(blocks)

        self._pool.reserve(request_id, prompt_tokens, new_tokens, reserved)

    def blocks_of(self, request_id: str) -> tuple[int, ...]:
        """Return a request's reserved blocks; empty if it has none, or they are in quarantine."""
        with self._lock:
            found = self._reserved.get(request_id)
            return () if found is None or found.quarantined else found.blocks

    def has_request(self, request_id: str) -> bool:
        """Whether a request has a reservation, waits for one, or has blocks in quarantine."""
        with self._lock:
            return request_id in self._reserved

    def hand_over(self, request_id: str) -> bool:
        """All KV is there: the engine's request owns the blocks; False if it was released."""
        with self._lock:
            found = self._reserved.get(request_id)
            if found is None or found.quarantined or not found.blocks:
                return False
            del self._reserved[request_id]
            assert self._pool is not None
            self._pool.hand_over(request_id)
            return True

    def release(self, request_id: str) -> None:
        """Free a request's blocks, or end its waiting; blocks in quarantine stay there."""
        with self._lock:
            found = self._reserved.get(request_id)
            if found is None or found.quarantined:
                return
            del self._reserved[request_id]
        self._end(request_id)

    def quarantine(self, request_id: str) -> None:
        """Quarantine a request's blocks until ``end_quarantine``."""
        with self._lock:
            found = self._reserved.get(request_id)
            if found is not None and found.blocks:
                found.quarantined = True

    def end_quarantine(self, request_id: str) -> None:
        """Free quarantined blocks: their writer is confirmed dead or has finished."""
        with self._lock:
            found = self._reserved.get(request_id)
            if found is None or not found.quarantined:
                return
            del self._reserved[request_id]
        self._end(request_id)

    def quarantined(self) -> tuple[str, ...]:
        """Return the requests with blocks in quarantine."""
        with self._lock:
            return tuple(name for name, found in self._reserved.items() if found.quarantined)

    def quarantined_blocks(self) -> int:
        """Return the number of blocks in quarantine."""
        with self._lock:
            return sum(len(r.blocks) for r in self._reserved.values() if r.quarantined)

    def _end(self, request_id: str) -> None:
        assert self._pool is not None, "it has reserved the blocks"
        self._pool.end_reservation(request_id)
