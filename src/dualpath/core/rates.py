"""Speeds of an engine and their origin; α, β and the compute quota are derived from them (§A.4)."""

import enum
import math
from collections.abc import Callable
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


class RecomputeWeight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many prompt tokens an engine gets done while it recomputes one token, by its position.

    A token at position p counts ``head`` + ``context_token`` · p, both at least 0 and finite.  The
    unit is that of the engine's rate of prompt tokens.
    """

    head: float
    context_token: float = 0.0

    @property
    def is_valid(self) -> bool:
        """Whether both numbers are at least 0 and finite."""
        return all(0 <= part < math.inf for part in (self.head, self.context_token))

    def tokens(self, first: int, count: int) -> float:
        """Return how many prompt tokens ``count`` tokens from position ``first`` on count."""
        return count * (self.head + self.context_token * (first + count / 2))

    def most_before(self, end: int, tokens: float) -> int:
        """Return how many tokens before position ``end`` count at most ``tokens`` ≥ 0, if any."""
        last = self.head + self.context_token * end
        # The smaller root of tokens(end - n, n) = tokens; without one all count less.
        root = last**2 - 2 * self.context_token * tokens
        if root < 0 or last == 0:
            return end
        return min(int(2 * tokens / (last + math.sqrt(root))), end)


def fitted_recompute_weight(
    seconds: Callable[[int, int], float], context: int, tokens_per_s: float
) -> RecomputeWeight:
    """Return the line by position that takes ``seconds(cached, count)`` for a whole context.

    It also takes as long for the second half of the context.  So it is exact where the time of a
    token grows with its position, and constant where it does not, as behind a window.  ``context``
    ≥ 1 tokens; ``tokens_per_s`` is the engine's rate of prompt tokens.
    """
    half = context // 2
    rest = context - half
    mean, mean_second = seconds(0, context) / context, seconds(half, rest) / rest
    # The mean positions of all tokens and of those of the second half.
    slope = (mean_second - mean) / (half + rest / 2 - context / 2) if half else 0.0
    slope = max(slope, 0.0)
    head = max(mean - slope * context / 2, 0.0)
    return RecomputeWeight(head * tokens_per_s, slope * tokens_per_s)


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
    ``recompute_weight`` is that of a token which is recomputed in place of a read.
    ``read_bytes`` are bytes of KV; ``storage_codec`` is None if the setting of this name is off.
    """

    read_bytes: Rate | None = None
    prefill_tokens: Rate | None = None
    computed_weight: float | None = None
    recompute_weight: RecomputeWeight | None = None
    storage_codec: StorageCodec | None = None
