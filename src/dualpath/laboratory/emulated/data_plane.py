"""The data plane of an emulated engine's first rank, which is a member of the cluster."""

import logging
from collections.abc import Callable, Iterable, Sequence

from dualpath.core.cluster import Role
from dualpath.core.rates import Rate, RateOrigin
from dualpath.engine.follower import FollowedPass
from dualpath.engine.forward_pass import ForwardPass, PromptPart
from dualpath.engine.membership import Membership, ServedModel
from dualpath.engine.surroundings import LIVE, Surroundings
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.rank_plane import (
    BlocksHeld,
    BlocksReleased,
    RankPlane,
    wrong_kv_message,
)
from dualpath.laboratory.emulated.ranks import LeaderRank, OnlyRank
from dualpath.laboratory.emulated.settings import EmulatedSettings
from dualpath.laboratory.emulated.verification import CheckedAt

log = logging.getLogger(__name__)


class DataPlane(RankPlane):
    """HBM, membership and verifier of one engine; methods may be called from any thread.

    ``ranks`` connects to the engine's other ranks.  ``on_rank_event`` is called with the events of
    all ranks, this one included, except those about HBM.  Raises ``ConfigError`` for storage,
    buffer or transport that cannot be opened, ``EngineLostError`` for a rank that did not start.
    """

    def __init__(
        self,
        settings: EmulatedSettings,
        surroundings: Surroundings = LIVE,
        ranks: LeaderRank | None = None,
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
        )
        if settings.engine.role is Role.PREFILL:
            costs = settings.costs
            rate = Rate(costs.prefill_tokens_per_s * settings.speedup, RateOrigin.COSTS)
            self.membership.set_compute_rate(rate, costs.computed_weight)
        self.manager = self.mover = self.membership.manager
        self.group = self.manager.ranks
        self.verifier = self.open_verifier(self.manager.counters)
        self._ranks.listen(self._on_event, self.manager.fail)

    def close(self) -> None:
        """End the other ranks and leave the cluster; idempotent."""
        self._ranks.end()
        self.membership.leave()

    def begin_pass(
        self, parts: Sequence[PromptPart], before: ForwardPass | FollowedPass | None = None
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
        self.manager.set_free_hbm_tokens(self.hbm.free_tokens)
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
