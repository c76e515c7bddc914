"""The data plane of an emulated engine's first rank, which is a member of the cluster."""

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided

from dualpath.core.blocks import WHOLE, PartSlice, slices_of
from dualpath.core.cluster import Role
from dualpath.core.errors import BufferTooSmallError, ConfigError
from dualpath.core.rates import Rate, RateOrigin
from dualpath.engine.buffer.hbm_reservations import Granted
from dualpath.engine.control.membership import Membership, ServedModel
from dualpath.engine.control.surroundings import LIVE, Surroundings
from dualpath.engine.control.traffic_manager import TrafficManager
from dualpath.engine.counters import Counters
from dualpath.engine.passes.device import HostDevice
from dualpath.engine.passes.forward_pass import ForwardPass
from dualpath.engine.passes.hbm_layout import HbmLayout, shared_layers
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.ranks.follower import FollowedPass, Follower, open_follower
from dualpath.engine.ranks.group import RankGroup
from dualpath.engine.ranks.rank import rank_place
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import allocate_registered, allocate_shared
from dualpath_lab.emulated.checkable_kv import CheckedAt, KvFunction, Seeds, Verifier, Words
from dualpath_lab.emulated.ranks import FollowerRank, LeaderRank, OnlyRank
from dualpath_lab.emulated.settings import WORD_BYTES, EmulatedSettings, Verify
from dualpath_sim.simulator.derived import recompute_weight

# --------------------------------------------------------------------------------------------- hbm
# HBM of an emulated engine: registered DRAM with the layout of an engine's KV memory.


class _Reservation(NamedTuple):
    """The owner of blocks that are reserved for a request that the engine has not got yet."""

    request_id: str


class _Waiting(NamedTuple):
    owner: object
    blocks: int
    granted: Granted


class EmulatedHbm:
    """Memory of ``hbm_bytes`` for ``regions`` layers of KV; layer l is in region l mod regions.

    A region is sized for the largest of its layers: block b of each of them begins at the same
    address, with its parts one after the other.  The memory holds whole blocks or the slice
    ``held`` of them, like ``function``.  Blocks are allocated for whole requests; ``allocate`` and
    ``free`` may be called from any thread.  Requests that wait for blocks get them FIFO.  With
    ``shared`` the memory is a file that other engines of the machine can map.  Raises
    ``ConfigError`` if not even one block fits.
    """

    takes_free_hbm = True

    def __init__(
        self,
        function: KvFunction,
        regions: int,
        hbm_bytes: int,
        threads: Threads = OS_THREADS,
        held: PartSlice = WHOLE,
        *,
        touch: bool = False,
        shared: bool = False,
    ) -> None:
        geometry = function.geometry
        layers = range(geometry.layers)
        sizes = [max(map(geometry.bytes_of, layers[first::regions])) for first in range(regions)]
        self.blocks = hbm_bytes // sum(sizes)
        if self.blocks < 1:
            raise ConfigError(
                f"HBM of {hbm_bytes} bytes is too small for one block of {regions} layers of "
                f"{max(sizes)} bytes; raise the HBM"
            )
        self._geometry = geometry
        self._slice = held
        self._function = function
        size_bytes = self.blocks * sum(sizes)
        self._memory = allocate_shared(size_bytes) if shared else allocate_registered(size_bytes)
        if touch:
            self._memory.touch()
        self._regions = [
            RegionInfo(f"hbm.{index}", address, size, size, self.blocks)
            for index, (address, size) in enumerate(
                zip(_addresses(self._memory.address, self.blocks, sizes), sizes, strict=True)
            )
        ]
        self._parts = [self._layer(layer) for layer in layers]
        self._free = deque(range(self.blocks))
        self._held: Counter[int] = Counter()
        #: Blocks that were freed while held.
        self._freed_while_held: set[int] = set()
        self._waiting: deque[_Waiting] = deque()
        #: Blocks that are reserved for requests that the engine has not got yet.
        self._reserved: dict[str, tuple[int, ...]] = {}
        #: Called when released blocks become free, or blocks are reserved.
        self.on_freed: Callable[[], None] = lambda: None
        self._lock = threads.lock()
        #: Guards the queue and the reservations; taken before the lock of the free blocks.
        self._granting = threads.lock()

    def layout(self) -> HbmLayout:
        """Describe the memory to the traffic manager."""
        capacity_tokens = self.blocks * self._geometry.block_tokens
        layout = shared_layers(self._regions, self._geometry, capacity_tokens, self._slice)
        return msgspec.structs.replace(layout, owner=self._memory)

    def _region_of(self, layer: int) -> RegionInfo:
        return self._regions[layer % len(self._regions)]

    def _layer(self, layer: int) -> tuple[Words, ...]:
        """Return the memory [block, head, token, word] of each part of a layer."""
        region, parts = self._region_of(layer), []
        heads, tokens = self._function.heads, self._geometry.block_tokens
        first = (region.base_address - self._memory.address) // WORD_BYTES
        words = self._memory.array.view(np.uint64)[first:]
        for part_words in self._function.layer_words[layer]:
            shape = (self.blocks, heads, tokens, part_words)
            token_bytes = part_words * WORD_BYTES
            strides = (region.stride_bytes, tokens * token_bytes, token_bytes, WORD_BYTES)
            parts.append(as_strided(words, shape, strides))
            words = words[heads * tokens * part_words :]
        return tuple(parts)

    @property
    def free_tokens(self) -> int:
        """The number of tokens that fit into the free blocks."""
        with self._lock:
            return len(self._free) * self._geometry.block_tokens

    def allocate(self, blocks: int) -> tuple[int, ...] | None:
        """Allocate that many blocks; return their ids, None if not enough are free."""
        with self._lock:
            if blocks > len(self._free):
                return None
            return tuple(self._free.popleft() for _ in range(blocks))

    def free(self, block_ids: Sequence[int]) -> None:
        """Free blocks; held ones become free when they are released."""
        with self._lock:
            self._free.extend(block for block in block_ids if block not in self._held)
            self._freed_while_held |= self._held.keys() & set(block_ids)
        self._grant()

    def request(self, owner: object, blocks: int, granted: Granted) -> None:
        """Allocate blocks once they are free, FIFO; ``granted`` gets them, on any thread."""
        with self._granting:
            self._waiting.append(_Waiting(owner, blocks, granted))
        self._grant()

    def cancel(self, owner: object) -> None:
        """End an owner's waiting; no effect if it does not wait (any more)."""
        with self._granting:
            self._waiting = deque(one for one in self._waiting if one.owner != owner)
        self._grant()

    def _grant(self) -> None:
        """Allocate blocks for the owners at the head of the queue."""
        while True:
            with self._granting:
                if not self._waiting or (blocks := self.allocate(self._waiting[0].blocks)) is None:
                    return
                owner, _, granted = self._waiting.popleft()
                if isinstance(owner, _Reservation):
                    self._reserved[owner.request_id] = blocks
            granted(blocks)

    def check(self, request_id: str, prompt_tokens: int, new_tokens: int) -> None:
        """Raise ``BufferTooSmallError`` for more than the whole HBM; see ``HbmPool``."""
        tokens, most = prompt_tokens + new_tokens, self.blocks * self._geometry.block_tokens
        if tokens > most:
            raise BufferTooSmallError(
                f"request {request_id} needs HBM for {tokens} tokens before its prefill, this "
                f"engine has {most}; give it more HBM"
            )

    def reserve(
        self, request_id: str, prompt_tokens: int, new_tokens: int, granted: Granted
    ) -> None:
        """Reserve blocks for a prompt and its generated tokens; see ``HbmPool``."""

        def reserved(blocks: tuple[int, ...]) -> None:
            granted(blocks)
            self.on_freed()

        blocks = self._geometry.blocks_for(prompt_tokens + new_tokens)
        self.request(_Reservation(request_id), blocks, reserved)

    def end_reservation(self, request_id: str) -> None:
        """Free reserved blocks, or end the waiting for them; see ``HbmPool``."""
        self.cancel(_Reservation(request_id))
        with self._granting:
            blocks = self._reserved.pop(request_id, ())
        self.free(blocks)
        self.on_freed()

    def hand_over(self, request_id: str) -> None:
        """The engine's request owns the reserved blocks; see ``HbmPool``."""
        with self._granting:
            del self._reserved[request_id]

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Do not reuse these blocks before ``unhold``; see ``BlockHolder``."""
        with self._lock:
            self._held.update(hbm_blocks)

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Release held blocks; those freed meanwhile can be allocated again."""
        with self._lock:
            self._held -= Counter(hbm_blocks)
            released = {block for block in hbm_blocks if block not in self._held}
            freed = released & self._freed_while_held
            self._freed_while_held -= freed
            self._free.extend(sorted(freed))
        if freed:
            self._grant()
            self.on_freed()

    def layer(self, layer: int) -> tuple[Words, ...]:
        """Return the memory [block, head, token, word] of each part of a layer."""
        return self._parts[layer]

    def write_blocks(self, layer: int, block_ids: Sequence[int], seeds: Seeds) -> None:
        """Write the KV of ``seeds`` [block, token] to blocks of a layer."""
        ids, step = np.asarray(block_ids, dtype=np.int64), self._function.portion_blocks
        for part, region in enumerate(self.layer(layer)):
            for start in range(0, len(ids), step):
                some = slice(start, start + step)
                region[ids[some]] = self._function.part_blocks(seeds[some], layer, part)

    def write_token(self, block_id: int, place: int, seed: np.uint64) -> None:
        """Write one token's KV in all layers; every layer needs a region of its own."""
        for words, constants in self._stacks:
            words[:, block_id, :, place] = seed ^ constants

    @cached_property
    def _stacks(self) -> list[tuple[Words, Words]]:
        """The memory [layer, block, head, token, word] of equal parts, with their constants."""
        found = []
        for stack in self._function.stacks:
            (first, *_) = parts = [self._parts[layer][stack.part] for layer in stack.layers]
            apart = parts[-1].ctypes.data - first.ctypes.data
            layer_stride = apart // max(len(parts) - 1, 1)
            shape, strides = (len(parts), *first.shape), (layer_stride, *first.strides)
            found.append((as_strided(first, shape, strides), stack.constants))
        return found


def _addresses(first: int, blocks: int, sizes: Sequence[int]) -> list[int]:
    """Return the start addresses of consecutive regions with blocks of these sizes."""
    return [first + blocks * before for before in itertools.accumulate(sizes[:-1], initial=0)]


# -------------------------------------------------------------------------------------- rank plane
# The data plane of one rank of an emulated engine: its HBM, transfers and verification.


class BlocksHeld(NamedTuple):
    """Event of a rank: a transfer may still write to these HBM blocks, so do not reuse them."""

    hbm_blocks: tuple[int, ...]


class BlocksReleased(NamedTuple):
    """Event of a rank: no transfer writes to these HBM blocks any more."""

    hbm_blocks: tuple[int, ...]


class RankPlane:
    """The common part of all ranks; methods may be called from any thread.

    ``group`` synchronises ranks during the engine's work, with a timeout for every wait.  ``mover``
    runs the transfers.  Raises ``ConfigError`` for HBM that cannot be allocated.
    """

    group: RankGroup
    mover: TrafficManager | Follower
    verifier: Verifier

    def __init__(
        self, settings: EmulatedSettings, end: RankGroup, surroundings: Surroundings
    ) -> None:
        self.settings = settings
        self.geometry = settings.geometry
        self.moves_bytes = settings.engine.mode.moves_bytes
        self.threads = surroundings.threads
        place, self.held = rank_place(end, slices_of(end.size, settings.kv_heads))
        self.place = place._replace(this_process=surroundings.this_process)
        self.function = KvFunction(settings.geometry, settings.kv_heads)
        self._held_function = KvFunction(settings.geometry, settings.kv_heads, self.held)
        self.hbm = EmulatedHbm(
            self._held_function,
            settings.layer_regions,
            settings.hbm_bytes,
            self.threads,
            self.held,
            touch=settings.engine.touch_memory,
            # Prefill engines of this machine may map it, to send KV there.
            shared=settings.engine.role is Role.DECODE
            and settings.engine.transport != "nixl"
            and end.size == 1,
        )
        self.engine_settings = settings.engine.of_rank(end.rank, "")

    def begin_pass(
        self, parts: Sequence[PrefillChunk], before: ForwardPass | FollowedPass | None = None
    ) -> ForwardPass | FollowedPass:
        """Start this rank's transfers of a forward pass; ``before`` may still be running."""
        raise NotImplementedError

    def notify(self, event: object) -> None:
        """Send an event to the engine's first rank."""
        raise NotImplementedError

    def now_s(self) -> float:
        """Return the time of the engine's clock in seconds."""
        return self.threads.now_ns() / 1e9

    def open_verifier(self, counters: Counters) -> Verifier:
        """Return a verifier of this rank's KV, which adds to ``counters``."""
        verify = self.settings.verify or Verify.fitting(self.settings.geometry)
        return Verifier(self.function, verify, counters, self.threads, self._held_function)

    def verify_hbm(
        self,
        place: CheckedAt,
        request_id: str,
        blocks: Sequence[int],
        seeds: Seeds,
        layers: Iterable[int],
        next_token: int,
    ) -> str | None:
        """Verify this rank's HBM ``blocks`` in ``layers`` with ``seeds``.

        In layers with a window only the blocks to which token ``next_token`` attends are verified.
        Return a message if KV is wrong.
        """
        wrong: set[int] = set()
        for layer in layers:
            first, parts = self.geometry.seen_from(layer, next_token), self.hbm.layer(layer)
            found = self.verifier.layer_blocks(place, parts, blocks[first:], seeds[first:], layer)
            wrong.update(first + block for block in found)
        where = place.value
        if self.place.group.size > 1:
            where = f"{where} of rank {self.place.group.rank}"
        return wrong_kv_message(where, request_id, sorted(wrong))


class FollowerPlane(RankPlane):
    """The data plane of a follower rank; the first rank allocates its HBM."""

    def __init__(
        self, settings: EmulatedSettings, end: FollowerRank, surroundings: Surroundings = LIVE
    ) -> None:
        super().__init__(settings, end, surroundings)
        self._end = end
        self.follower = self.mover = open_follower(
            self.engine_settings,
            self.geometry,
            self.hbm.layout(),
            self,
            self.place,
            HostDevice(),
            surroundings,
        )
        self.group = self.follower.rank.group
        self.verifier = self.open_verifier(self.follower.rank.counters)

    def begin_pass(
        self, parts: Sequence[PrefillChunk], before: ForwardPass | FollowedPass | None = None
    ) -> FollowedPass:
        """See ``RankPlane``; a follower rank ends each pass before it starts the next."""
        assert before is None
        return self.follower.begin_pass(parts)

    def notify(self, event: object) -> None:
        """See ``RankPlane``."""
        self._end.notify(event)

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """See ``BlockHolder``."""
        self._end.notify(BlocksHeld(hbm_blocks))

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """See ``BlockHolder``."""
        self._end.notify(BlocksReleased(hbm_blocks))


def wrong_kv_message(where: str, request_id: str, wrong: Sequence[int]) -> str | None:
    """Return the error message for wrong blocks of a prompt; None if there are none."""
    if not wrong:
        return None
    some = ", ".join(map(str, wrong[:8]))
    return (
        f"request {request_id}: KV of {len(wrong)} prompt blocks ({some}) is wrong in "
        f"{where}; this is a bug in the data path, save the engines' logs"
    )


log = logging.getLogger(__name__)


class DataPlane(RankPlane):
    """HBM, membership and verifier of one engine; methods may be called from any thread.

    ``ranks`` connects to the engine's other ranks.  ``on_rank_event`` is called with the events of
    all ranks, this one included, except those about HBM.  ``former_epoch`` is that of this
    process's former data plane, which has left with other weights.  Raises ``ConfigError`` for
    storage, buffer or transport that cannot be opened, ``EngineLostError`` for a rank that did not
    start.
    """

    def __init__(
        self,
        settings: EmulatedSettings,
        surroundings: Surroundings = LIVE,
        ranks: LeaderRank | None = None,
        former_epoch: str | None = None,
    ) -> None:
        self._ranks = ranks or OnlyRank()
        super().__init__(settings, self._ranks, surroundings)
        self.on_rank_event: Callable[[int, object], None] = lambda rank, event: None
        served = ServedModel(
            served_model_name=settings.namespace.model,
            max_model_len=settings.max_model_len,
            vocab_size=settings.vocab_size,
        )
        self.membership = Membership(
            self.engine_settings,
            settings.namespace,
            served,
            self.hbm.layout(),
            surroundings=surroundings,
            holder=self.hbm,
            place=self.place,
            former_epoch=former_epoch,
            hbm_pool=self.hbm,
        )
        if settings.engine.role is Role.PREFILL:
            costs = settings.costs
            rate = Rate(costs.prefill_tokens_per_s * settings.speedup, RateOrigin.COSTS)
            self.membership.set_compute_rate(rate, costs.computed_weight, recompute_weight(costs))
        self.manager = self.mover = self.membership.manager
        self.group = self.manager.ranks
        self.verifier = self.open_verifier(self.manager.counters)
        self._ranks.listen(self._on_event, self.manager.fail)

    def close(self, reason: str = "engine shuts down") -> bool:
        """End the other ranks and leave the cluster; idempotent.

        Return whether all transfers are over.
        """
        self._ranks.end()
        return self.membership.leave(reason)

    def begin_pass(
        self, parts: Sequence[PrefillChunk], before: ForwardPass | FollowedPass | None = None
    ) -> ForwardPass:
        """See ``RankPlane``."""
        assert before is None or isinstance(before, ForwardPass)
        return ForwardPass(self.manager, self.membership.send, parts, before)

    def notify(self, event: object) -> None:
        """See ``RankPlane``."""
        self._on_event(0, event)

    def _on_event(self, rank: int, event: object) -> None:
        match event:
            case BlocksHeld():
                self.hbm.hold(event.hbm_blocks)
            case BlocksReleased():
                self.hbm.unhold(event.hbm_blocks)
            case _:
                self.on_rank_event(rank, event)

    def hbm_changed(self) -> None:
        """Report the changed free HBM with the next message to the router."""
        self.manager.free_hbm_tokens = self.hbm.free_tokens
        self.membership.changed()

    def verify_buffer(
        self,
        place: CheckedAt,
        request_id: str,
        slots: Sequence[int],
        seeds: Seeds,
        first_loaded: Sequence[int],
    ) -> str | None:
        """Compare the request's ``slots`` of the DRAM buffer with ``seeds``.

        ``first_loaded``: for each layer the index of the first slot that holds its KV.  Slots that
        the request does not own (any more) are not compared.  Return a message if KV is wrong.
        """
        buffer = self.manager.buffer
        held = buffer.slots_of(request_id)
        # Checks and pins atomically: released slots may be free or belong to another request.
        if not self.verifier.compares or not buffer.pin_some(request_id, slots):
            return None
        try:
            views = [buffer.view(slot) for slot in slots]
            wrong = self.verifier.full_blocks(place, views, seeds, first_loaded)
            # If slots were released during the comparison, another request may have written them.
            if held != buffer.slots_of(request_id):
                return None
        finally:
            buffer.unpin(slots)
        found = wrong_kv_message(place.value, request_id, wrong)
        self.report_wrong([found] if found else [])
        return found

    def report_wrong(self, found: Iterable[str]) -> None:
        """Log messages about wrong KV as errors."""
        for message in found:
            log.error("%s", message)
