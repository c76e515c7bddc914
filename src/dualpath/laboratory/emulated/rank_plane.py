"""The data plane of one rank of an emulated engine: its HBM, transfers and verification."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dualpath.core.parts import slices_of
from dualpath.engine.counters import Counters
from dualpath.engine.device import HostDevice
from dualpath.engine.follower import FollowedPass, Follower, open_follower
from dualpath.engine.forward_pass import ForwardPass, PromptPart
from dualpath.engine.rank import rank_place
from dualpath.engine.ranks import RankGroup
from dualpath.engine.surroundings import LIVE, Surroundings
from dualpath.engine.traffic_manager import TrafficManager
from dualpath.laboratory.emulated.hbm import EmulatedHbm
from dualpath.laboratory.emulated.kv_bytes import KvFunction
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.ranks import FollowerRank
from dualpath.laboratory.emulated.settings import EmulatedSettings, Verify
from dualpath.laboratory.emulated.verification import CheckedAt, Verifier


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
        )
        self.engine_settings = settings.engine.of_rank(end.rank, "")

    def begin_pass(
        self, parts: Sequence[PromptPart], before: ForwardPass | FollowedPass | None = None
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
        self, parts: Sequence[PromptPart], before: ForwardPass | FollowedPass | None = None
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
