"""The real half of an emulated engine's first rank: a member of the cluster."""

import logging
from collections.abc import Callable, Iterable, Sequence

from dualpath.core.cluster import Role
from dualpath.core.rates import Rate, RateOrigin
from dualpath.engine.follower import FollowedPass
from dualpath.engine.forward_pass import ForwardPass, PromptPart
from dualpath.engine.membership import Membership, ServedModel
from dualpath.engine.surroundings import LIVE, Surroundings
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.rank_plane import Held, LetGo, RankPlane, wrong_kv
from dualpath.laboratory.emulated.ranks import LeadingEnd, NoFollowers
from dualpath.laboratory.emulated.settings import EmulatedSettings
from dualpath.laboratory.emulated.verification import CheckedAt

log = logging.getLogger(__name__)


class DataPlane(RankPlane):
    """HBM, membership and verifier of one engine; methods may be called from any thread.

    ``ranks`` leads to the engine's other ranks.  ``heard`` gets what ranks tell, this one included,
    except what is about HBM.  Raises ``ConfigError`` for a storage, buffer or transport that cannot
    be had, ``EngineLostError`` for a rank that did not come up.
    """

    def __init__(
        self,
        settings: EmulatedSettings,
        surroundings: Surroundings = LIVE,
        ranks: LeadingEnd | None = None,
    ) -> None:
        self._ranks = ranks or NoFollowers()
        super().__init__(settings, self._ranks, surroundings)
        self.heard: Callable[[int, object], None] = lambda rank, news: None
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
        )
        if settings.engine.role is Role.PREFILL:
            costs = settings.costs
            rate = Rate(costs.prefill_tokens_per_s * settings.speedup, RateOrigin.COSTS)
            self.membership.computes(rate, costs.computed_weight)
        self.manager = self.mover = self.membership.manager
        self.group = self.manager.ranks
        self.verifier = self.open_verifier(self.manager.counters)
        self._ranks.listen(self._hear, self.manager.fail)

    def close(self) -> None:
        """Let the other ranks end, and leave the cluster; idempotent."""
        self._ranks.end()
        self.membership.leave()

    def begin_pass(
        self, parts: Sequence[PromptPart], before: ForwardPass | FollowedPass | None = None
    ) -> ForwardPass:
        """See ``RankPlane``."""
        assert before is None or isinstance(before, ForwardPass)
        return ForwardPass(self.manager, self.membership.send, parts, before)

    def tell(self, news: object) -> None:
        """See ``RankPlane``."""
        self._hear(0, news)

    def _hear(self, rank: int, news: object) -> None:
        match news:
            case Held():
                self.hbm.hold(news.hbm_blocks)
            case LetGo():
                self.hbm.let_go(news.hbm_blocks)
            case _:
                self.heard(rank, news)

    def hbm_changed(self) -> None:
        """The free HBM changed: report it soon."""
        self.manager.set_free_hbm_tokens(self.hbm.free_tokens)
        self.membership.changed()

    def wrong_in_buffer(
        self,
        place: CheckedAt,
        request_id: str,
        slots: Sequence[int],
        seeds: Seeds,
        there_from: Sequence[int],
    ) -> str | None:
        """Compare the request's ``slots`` of the DRAM buffer with ``seeds``; say what is wrong.

        ``there_from``: for each layer the first of the slots that holds its KV.  Slots that the
        request does not hold (any more) say nothing and are not compared.
        """
        buffer = self.manager.buffer
        held = buffer.slots_of(request_id)
        # One step: slots that were released meanwhile are another's, or free, which pins are not.
        if not self.verifier.compares or not buffer.pin_some(request_id, slots):
            return None
        try:
            views = [buffer.view(slot) for slot in slots]
            wrong = self.verifier.full_blocks(place, views, seeds, there_from)
            # Released while it was compared: what was found may be another request's.
            if held != buffer.slots_of(request_id):
                return None
        finally:
            buffer.unpin(slots)
        found = wrong_kv(place.value, request_id, wrong)
        self.report_wrong([found] if found else [])
        return found

    def report_wrong(self, found: Iterable[str]) -> None:
        """Say loudly that KV was wrong."""
        for message in found:
            log.error("%s", message)
