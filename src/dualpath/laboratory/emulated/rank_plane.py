"""One rank of an emulated engine: its HBM, whose bytes are checked, and what moves them."""

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
from dualpath.laboratory.emulated.ranks import FollowingEnd
from dualpath.laboratory.emulated.settings import EmulatedSettings, Verify
from dualpath.laboratory.emulated.verification import CheckedAt, Verifier


class Held(NamedTuple):
    """A rank tells: a transfer may still write to these HBM blocks; nobody else may have them."""

    hbm_blocks: tuple[int, ...]


class LetGo(NamedTuple):
    """A rank tells: nothing writes to these any more."""

    hbm_blocks: tuple[int, ...]


class RankPlane:
    """What ranks have, whether they lead or not; methods may be called from any thread.

    ``group`` is for what goes with the engine's work, with a limit for every wait, ``mover`` has
    the transfers.  Raises ``ConfigError`` for HBM that cannot be had.
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
        """Start this rank's transfers of a forward pass; ``before`` may not be over."""
        raise NotImplementedError

    def tell(self, news: object) -> None:
        """Let the engine's first rank know."""
        raise NotImplementedError

    def now_s(self) -> float:
        """Return the time of the engine's clock."""
        return self.threads.now_ns() / 1e9

    def open_verifier(self, counters: Counters) -> Verifier:
        """Return what compares this rank's bytes, and counts them in ``counters``."""
        verify = self.settings.verify or Verify.fitting(self.settings.geometry)
        return Verifier(self.function, verify, counters, self.threads, self._held_function)

    def wrong_in_hbm(
        self,
        place: CheckedAt,
        request_id: str,
        blocks: Sequence[int],
        seeds: Seeds,
        layers: Iterable[int],
        next_token: int,
    ) -> str | None:
        """Compare what the token ``next_token`` sees of this rank's HBM ``blocks`` in these layers.

        ``seeds`` are those of the blocks.  Say what is wrong.
        """
        wrong: set[int] = set()
        for layer in layers:
            first, parts = self.geometry.seen_from(layer, next_token), self.hbm.layer(layer)
            seen, right = blocks[first:], seeds[first:]
            found = self.verifier.layer_blocks(place, parts, seen, right, layer)
            wrong.update(first + block for block in found)
        where = place.value
        if self.place.group.size > 1:
            where = f"{where} of rank {self.place.group.rank}"
        return wrong_kv(where, request_id, sorted(wrong))


class FollowerPlane(RankPlane):
    """A rank that follows: the first one gives out its HBM."""

    def __init__(
        self, settings: EmulatedSettings, end: FollowingEnd, surroundings: Surroundings = LIVE
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
        """See ``RankPlane``; a rank that follows ends one pass before it begins another."""
        assert before is None
        return self.follower.begin_pass(parts)

    def tell(self, news: object) -> None:
        """See ``RankPlane``."""
        self._end.tell(news)

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """See ``engine.chunk_transfers.BlockHolder``."""
        self._end.tell(Held(hbm_blocks))

    def let_go(self, hbm_blocks: tuple[int, ...]) -> None:
        """See ``engine.chunk_transfers.BlockHolder``."""
        self._end.tell(LetGo(hbm_blocks))


def wrong_kv(where: str, request_id: str, wrong: Sequence[int]) -> str | None:
    """Return how a request is told of wrong blocks of its prompt; None if there are none."""
    if not wrong:
        return None
    some = ", ".join(map(str, wrong[:8]))
    return (
        f"request {request_id}: KV of {len(wrong)} prompt blocks ({some}) is wrong in "
        f"{where}; this is a defect of the data path, keep the engines' logs"
    )
