"""The HBM blocks in which a vLLM decode engine receives prompts before it gets their requests.

vLLM's scheduler allocates blocks in its steps, and for its own requests only.  So the last blocks
of its pool, ``receive_hbm_share`` of them, are taken out of the pool at start, and the worker
reserves them for prompts by itself: without a step, and without a message to the scheduler.

When a request comes, vLLM allocates blocks for it as for any load of a connector.  When the load is
over, these blocks and the reserved ones change places: the request's table gets the blocks with the
KV, and the others are in the area from then on.  Each has one reference before and after.
"""

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dualpath.core.cluster import Role
from dualpath.core.errors import BufferTooSmallError
from dualpath.engine.buffer.hbm_reservations import Granted
from dualpath.engine.settings import EngineSettings
from dualpath.vllm.metadata import HeldBlocks


def receiving_blocks(settings: EngineSettings, pool_blocks: int) -> range:
    """Return the ids of the blocks that an engine takes out of its pool; empty if it takes none."""
    share = settings.receive_hbm_share if settings.role is Role.DECODE else 0.0
    return range(pool_blocks - int(pool_blocks * share), pool_blocks)


class _Waiting(NamedTuple):
    request_id: str
    blocks: int
    granted: Granted


class ReceivingArea:
    """The worker's half: an ``HbmPool`` of the data plane; methods may be called from any thread.

    ``held`` holds blocks out of vLLM's pool.  A block that is held is not reserved again, although
    its reservation has ended.
    """

    takes_free_hbm = False

    def __init__(self, blocks: Sequence[int], block_tokens: int, held: HeldBlocks) -> None:
        self._block_tokens = block_tokens
        self._pool = held
        self._lock = threading.Lock()
        self._blocks = len(blocks)
        self._free = deque(blocks)
        self._held: Counter[int] = Counter()
        self._waiting: deque[_Waiting] = deque()
        self._reserved: dict[str, tuple[int, ...]] = {}
        self._handed_over: dict[str, tuple[int, ...]] = {}

    @property
    def free(self) -> int:
        """Number of blocks that could be reserved now."""
        with self._lock:
            return len(self._available())

    def check(self, request_id: str, prompt_tokens: int, new_tokens: int) -> None:
        """Raise ``BufferTooSmallError`` for a prompt larger than the area; see ``HbmPool``."""
        most = self._blocks * self._block_tokens
        if prompt_tokens > most:
            raise BufferTooSmallError(
                f"request {request_id} has a prompt of {prompt_tokens} tokens, the engine receives "
                f"at most {most} in HBM; raise receive_hbm_share"
            )

    def reserve(
        self, request_id: str, prompt_tokens: int, new_tokens: int, granted: Granted
    ) -> None:
        """Reserve blocks for a prompt, as vLLM allocates those of its answer; see ``HbmPool``."""
        blocks = -(-prompt_tokens // self._block_tokens)
        with self._lock:
            self._waiting.append(_Waiting(request_id, blocks, granted))
        self._grant()

    def end_reservation(self, request_id: str) -> None:
        """Free reserved blocks, or end the waiting for them; see ``HbmPool``."""
        with self._lock:
            self._waiting = deque(one for one in self._waiting if one.request_id != request_id)
            self._free.extend(self._reserved.pop(request_id, ()))
        self._grant()

    def hand_over(self, request_id: str) -> None:
        """The load is over; ``take`` follows.  See ``HbmPool``."""
        with self._lock:
            self._handed_over[request_id] = self._reserved.pop(request_id)

    def take(self, request_id: str, first: int, end: int) -> tuple[int, ...]:
        """Remove blocks of a request that were handed over; its other blocks are free again."""
        with self._lock:
            blocks = self._handed_over.pop(request_id)
            self._free.extend((*blocks[:first], *blocks[end:]))
        self._grant()
        return blocks[first:end]

    def give(self, blocks: Iterable[int]) -> None:
        """Add the blocks that vLLM's requests had in place of those that were taken."""
        with self._lock:
            self._free.extend(blocks)
        self._grant()

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Neither reserve these blocks nor let vLLM allocate them; see ``BlockHolder``."""
        with self._lock:
            self._held.update(hbm_blocks)
        self._pool.hold(hbm_blocks)

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Allow their reuse again; see ``BlockHolder``."""
        with self._lock:
            self._held -= Counter(hbm_blocks)
        self._pool.unhold(hbm_blocks)
        self._grant()

    def _available(self) -> list[int]:
        return [block for block in self._free if block not in self._held]

    def _grant(self) -> None:
        """Reserve blocks for the requests at the head of the queue."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                available = self._available()
                if self._waiting[0].blocks > len(available):
                    return
                request_id, count, granted = self._waiting.popleft()
                blocks = tuple(available[:count])
                taken = set(blocks)
                self._free = deque(block for block in self._free if block not in taken)
                self._reserved[request_id] = blocks
            granted(blocks)
