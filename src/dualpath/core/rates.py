"""Speeds of an engine and their origin; α, β and the compute quota are derived from them (§A.4)."""

import enum
from typing import Annotated, Literal

import msgspec

#: Upper bound of ``Rates.computed_weight``: more tokens than any context has.
MAX_COMPUTED_WEIGHT = 1e9
#: Share of the cores' measured rates that compression may take: the engine needs them as well.
CODEC_CPU_SHARE = 0.5
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
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


class StorageCodec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whether an engine compresses the blocks that it writes, and the numbers behind the choice.

    ``codec`` is off or zstd, ``reason`` why.  Of a sample with the engine's geometry: KV is
    ``ratio`` times as large as its stored bytes; the engine's writers compress and its readers
    decompress so many bytes of KV per second if they do nothing else.  ``storage_bytes_per_s`` is
    the rate of reads of plain blocks, None if it was not measured.  Numbers that were not measured
    are 0.
    """

    codec: Literal["off", "zstd"]
    reason: Annotated[str, msgspec.Meta(max_length=500)]
    ratio: NotNegative = 0.0
    compress_bytes_per_s: NotNegative = 0.0
    decompress_bytes_per_s: NotNegative = 0.0
    storage_bytes_per_s: NotNegative | None = None

    def kv_bytes_per_s(self, storage_bytes_per_s: float) -> float:
        """Return the rate at which KV is read from a storage of this rate, compressed."""
        usable_bytes_per_s = self.decompress_bytes_per_s * CODEC_CPU_SHARE
        return min(storage_bytes_per_s * self.ratio, usable_bytes_per_s)


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates of an engine, None if unknown.

    ``read_bytes`` from storage while no other engine of the node reads; ``prefill_tokens`` of
    prompts, hits included, measured with ``computed_weight`` ≥ 1 prompt tokens per computed token.
    ``read_bytes`` are bytes of KV; ``storage_codec`` is None if the setting of this name is off.
    """

    read_bytes: Rate | None = None
    prefill_tokens: Rate | None = None
    computed_weight: float | None = None
    storage_codec: StorageCodec | None = None
