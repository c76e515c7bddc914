"""How fast an engine is, and how it knows: what α, β and the compute quota follow from (§A.4)."""

import enum
from typing import Annotated

import msgspec

#: Prompt tokens that pass for one that is computed: more than any context has.
MOST_COMPUTED_WEIGHT = 1e9
ComputedWeight = Annotated[float, msgspec.Meta(ge=1, le=MOST_COMPUTED_WEIGHT)]


class RateOrigin(enum.StrEnum):
    """How an engine knows a rate."""

    MEASURED = "measured"
    """At this start."""
    REMEMBERED = "remembered"
    """Measured at an earlier start, with the same model, device and settings."""
    FILE = "file"
    """Read from what ``dualpath profile`` wrote."""
    SET = "set"
    """A setting bounds it."""
    COSTS = "costs"
    """An emulated engine computes by its costs."""


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``per_s`` bytes or tokens in a second, above 0.

    ``age_s`` is how long before the engine joined it was measured, at least 0; None where it was
    not, or at this start.
    """

    per_s: float
    origin: RateOrigin
    age_s: float | None = None


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates of an engine, None where unknown.

    ``read_bytes`` from storage, alone on its node; ``prefill_tokens`` of prompts, hits included, of
    which so many pass for each token that is computed: ``computed_weight`` ≥ 1.
    """

    read_bytes: Rate | None = None
    prefill_tokens: Rate | None = None
    computed_weight: float | None = None
