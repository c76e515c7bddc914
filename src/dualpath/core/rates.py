"""Speeds of an engine and their origin; α, β and the compute quota are derived from them (§A.4)."""

import enum
from typing import Annotated

import msgspec

#: Upper bound of ``Rates.computed_weight``: more tokens than any context has.
MAX_COMPUTED_WEIGHT = 1e9
ComputedWeight = Annotated[float, msgspec.Meta(ge=1, le=MAX_COMPUTED_WEIGHT)]


class RateOrigin(enum.StrEnum):
    """How an engine got a rate."""

    MEASURED = "measured"
    """Measured at this start."""
    REMEMBERED = "remembered"
    """Measured at an earlier start, with the same model, device and settings."""
    FILE = "file"
    """Read from a file of ``dualpath profile``."""
    SET = "set"
    """Limited by a setting."""
    COSTS = "costs"
    """Derived from the cost table of an emulated engine."""


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``per_s`` bytes or tokens per second, above 0.

    ``age_s`` ≥ 0 is the age of the measurement when the engine joined; None if the rate was
    measured at this start or not at all.
    """

    per_s: float
    origin: RateOrigin
    age_s: float | None = None


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates of an engine, None if unknown.

    ``read_bytes`` from storage while no other engine of the node reads; ``prefill_tokens`` of
    prompts, hits included, measured with ``computed_weight`` ≥ 1 prompt tokens per computed token.
    """

    read_bytes: Rate | None = None
    prefill_tokens: Rate | None = None
    computed_weight: float | None = None
