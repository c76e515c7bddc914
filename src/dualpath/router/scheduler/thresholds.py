"""α and β of Algorithm 1, and their origin (§A.4): set, from engines' rates, or unlimited.

Both concern prefill engines: whether the reading queue of a PE's node is short, whether a PE is
overloaded.  They hold for the whole cluster, so the slowest live PE sets them.  They are derived
again whenever engines join or are lost.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from dualpath.core.rates import Rate, RateOrigin, Rates, RecomputeWeight
from dualpath.policy.events import (
    ALPHA_S,
    BETA_S,
    TYPICAL_COMPUTED_WEIGHT,
    UNLIMITED_TOKENS,
    SetThresholds,
)
from dualpath.router.engines import EngineInfo
from dualpath.router.settings import RouterSettings

SETTING, DEFAULT = "setting", "default"
_ORIGINS = {
    RateOrigin.MEASURED: "measured by engine {}",
    RateOrigin.REMEMBERED: "measured by engine {} at an earlier start, {:.1f} h before it joined",
    RateOrigin.FILE: "profile file of engine {}",
    RateOrigin.SET: "snic_bytes_per_s of engine {}",
    RateOrigin.COSTS: "costs of emulated engine {}",
}


class Threshold(msgspec.Struct, frozen=True):
    """``tokens`` None: unlimited; ``origin`` is shown to operators."""

    tokens: int | None
    origin: str


class ClusterThresholds(msgspec.Struct, frozen=True):
    """α and β as they are in force; both weights are those of ``SchedulerSettings``."""

    alpha: Threshold = Threshold(None, DEFAULT)
    beta: Threshold = Threshold(None, DEFAULT)
    computed_weight: float = TYPICAL_COMPUTED_WEIGHT
    recompute_weight: RecomputeWeight | None = None

    @property
    def read_tokens_per_s(self) -> float:
        """Tokens of KV that a storage NIC reads in a second, which α stands for; 0: not known."""
        return (self.alpha.tokens or 0) / ALPHA_S

    def for_scheduler(self) -> SetThresholds:
        """Return the scheduler's event."""
        return SetThresholds(
            alpha_tokens=self.alpha.tokens or UNLIMITED_TOKENS,
            beta_tokens=self.beta.tokens or UNLIMITED_TOKENS,
            computed_weight=self.computed_weight,
            recompute_weight=self.recompute_weight,
        )


def derive(
    settings: RouterSettings, prefill_engines: Iterable[EngineInfo], bytes_per_token: int
) -> ClusterThresholds:
    """Return α and β for the live prefill engines."""
    engines = list(prefill_engines)
    reads = _slowest(engines, lambda engine: engine.rates.read_bytes)
    computes = _slowest(engines, lambda engine: engine.rates.prefill_tokens)
    rates = Rates()
    if settings.beta_tokens is None and computes is not None:
        rates = computes.engine.rates
    return ClusterThresholds(
        alpha=_threshold(settings.alpha_tokens, reads, ALPHA_S / bytes_per_token),
        beta=_threshold(settings.beta_tokens, computes, BETA_S),
        computed_weight=rates.computed_weight or TYPICAL_COMPUTED_WEIGHT,
        recompute_weight=rates.recompute_weight,
    )


class _Slowest(NamedTuple):
    rate: Rate
    engine: EngineInfo


def _slowest(
    engines: Iterable[EngineInfo], rate_of: Callable[[EngineInfo], Rate | None]
) -> _Slowest | None:
    known = (_Slowest(rate, e) for e in engines if (rate := rate_of(e)) is not None)
    return min(known, key=lambda found: found.rate.per_s, default=None)


def _threshold(set_tokens: int | None, slowest: _Slowest | None, factor: float) -> Threshold:
    if set_tokens is not None:
        return Threshold(set_tokens, SETTING)
    if slowest is None:
        return Threshold(None, DEFAULT)
    rate = slowest.rate
    tokens = min(max(int(factor * rate.per_s), 1), UNLIMITED_TOKENS)
    hours = (rate.age_s or 0.0) / 3600
    return Threshold(tokens, _ORIGINS[rate.origin].format(slowest.engine.engine_id, hours))
