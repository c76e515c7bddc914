"""The real half of an emulated engine: a member of the cluster, and HBM whose bytes are checked."""

import logging
from collections.abc import Iterable, Sequence

from dualpath.core.cluster import Role
from dualpath.core.rates import Rate, RateOrigin
from dualpath.engine.membership import Membership, ServedModel
from dualpath.engine.surroundings import LIVE, Surroundings
from dualpath.laboratory.emulated.hbm import EmulatedHbm
from dualpath.laboratory.emulated.kv_bytes import KvFunction
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.settings import EmulatedSettings, Verify
from dualpath.laboratory.emulated.verification import CheckedAt, Verifier

log = logging.getLogger(__name__)


class DataPlane:
    """HBM, membership and verifier of one engine; methods may be called from any thread.

    Raises ``ConfigError`` for a storage, buffer or transport that cannot be had.
    """

    def __init__(self, settings: EmulatedSettings, surroundings: Surroundings = LIVE) -> None:
        self.settings = settings
        self.geometry = settings.geometry
        self.moves_bytes = settings.engine.mode.moves_bytes
        self.threads = surroundings.threads
        self.function = KvFunction(settings.geometry)
        self.hbm = EmulatedHbm(
            self.function, settings.layer_regions, settings.hbm_bytes, self.threads
        )
        served = ServedModel(
            served_model_name=settings.namespace.model,
            max_model_len=settings.max_model_len,
            vocab_size=settings.vocab_size,
        )
        self.membership = Membership(
            settings.engine,
            settings.namespace,
            served,
            self.hbm.layout(),
            surroundings=surroundings,
            holder=self.hbm,
        )
        if settings.engine.role is Role.PREFILL:
            tokens_per_s = settings.costs.prefill_tokens_per_s * settings.speedup
            self.membership.computes(Rate(tokens_per_s, RateOrigin.COSTS))
        self.manager = self.membership.manager
        verify = settings.verify or Verify.fitting(settings.geometry)
        self.verifier = Verifier(self.function, verify, self.manager.counters, self.threads)

    def now_s(self) -> float:
        """Return the time of the engine's clock."""
        return self.threads.now_ns() / 1e9

    def hbm_changed(self) -> None:
        """The free HBM changed: report it soon."""
        self.manager.set_free_hbm_tokens(self.hbm.free_tokens)
        self.membership.changed()

    def wrong_in_buffer(
        self, place: CheckedAt, request_id: str, slots: Sequence[int], seeds: Seeds
    ) -> str | None:
        """Compare the request's ``slots`` of the DRAM buffer with ``seeds``; say what is wrong.

        Slots that the request does not hold (any more) say nothing and are not compared.
        """
        buffer = self.manager.buffer
        held = buffer.slots_of(request_id)
        # One step: slots that were released meanwhile are another's, or free, which pins are not.
        if not self.verifier.compares or not buffer.pin_some(request_id, slots):
            return None
        try:
            wrong = self.verifier.full_blocks(place, [buffer.view(slot) for slot in slots], seeds)
            # Released while it was compared: what was found may be another request's.
            if held != buffer.slots_of(request_id):
                return None
        finally:
            buffer.unpin(slots)
        return self._reported(place, request_id, wrong)

    def wrong_in_hbm(
        self,
        place: CheckedAt,
        request_id: str,
        blocks: Sequence[int],
        seeds: Seeds,
        layers: Iterable[int],
    ) -> str | None:
        """Compare HBM ``blocks`` of these layers with ``seeds``; say what is wrong."""
        wrong: set[int] = set()
        for layer in layers:
            parts = self.hbm.layer(layer)
            wrong |= set(self.verifier.layer_blocks(place, parts, blocks, seeds, layer))
        return self._reported(place, request_id, sorted(wrong))

    def _reported(self, place: CheckedAt, request_id: str, wrong: Sequence[int]) -> str | None:
        """Say loudly that KV was wrong; return the message for whoever asked for it."""
        if not wrong:
            return None
        some = ", ".join(map(str, wrong[:8]))
        message = (
            f"request {request_id}: KV of {len(wrong)} prompt blocks ({some}) is wrong in "
            f"{place.value}; this is a defect of the data path, keep the engines' logs"
        )
        log.error("%s", message)
        return message
