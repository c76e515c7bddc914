"""Costs of a prefill engine's forward passes, from which its compute quota and β are derived.

They are fitted to a few timed passes or read from a file of ``dualpath profile``.  This module does
not import vLLM.
"""

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.rates import ComputedWeight, RecomputeWeight, fitted_recompute_weight
from dualpath.policy.batching import AttentionGeometry, LayerTimeEstimate, fit
from dualpath.policy.events import (
    TYPICAL_APPEND_TOKENS,
    TYPICAL_COMPUTED_WEIGHT,
    TYPICAL_CONTEXT_TOKENS,
)


class TimedPass(msgspec.Struct, frozen=True):
    """A pass that computed ``bsz`` tokens after ``cached`` tokens.

    It took ``pass_s`` seconds, of which attention took ``attention_s``.
    """

    cached: int
    bsz: int
    pass_s: float
    attention_s: float


class BesidesAttention(msgspec.Struct, frozen=True):
    """What a pass takes besides attention: ``batch_s``, and ``token_s`` per computed token.

    Both are in seconds, at least 0.
    """

    batch_s: float
    token_s: float


class PassCosts(msgspec.Struct, frozen=True):
    """``attention`` predicts the time of a batch's attention layers from its FLOP (§6.2).

    ``prefill_tokens_per_s`` counts all tokens of prompts, hits included.  ``computed_weight`` ≥ 1
    is the number of prompt tokens per computed token, ``recompute_weight`` that by position, where
    passes have full size; None if it is unknown.  So is ``besides_attention`` if it is not
    measured, as in a cache of an earlier version.
    """

    attention: LayerTimeEstimate
    prefill_tokens_per_s: float
    computed_weight: float
    recompute_weight: RecomputeWeight | None = None
    besides_attention: BesidesAttention | None = None


def fitted_attention(passes: Sequence[TimedPass], geometry: AttentionGeometry) -> LayerTimeEstimate:
    """Return the line fitted to attention times over FLOP, of the passes of the largest size.

    Raises ``ConfigError`` for fewer than two passes or times that do not grow with the FLOP.
    """
    return fit([(geometry.flops(p.cached, p.bsz), p.attention_s) for p in _largest(passes)])


def _largest(passes: Sequence[TimedPass]) -> list[TimedPass]:
    most = max((p.bsz for p in passes), default=0)
    return [p for p in passes if p.bsz == most]


def rough_attention(passes: Sequence[TimedPass], geometry: AttentionGeometry) -> LayerTimeEstimate:
    """Return the mean throughput of the same passes, for use where ``fitted_attention`` fails.

    It is too low if overhead dominates, with short contexts or on a busy machine.  Raises
    ``ConfigError`` without any pass.
    """
    largest = _largest(passes)
    seconds = sum(p.attention_s for p in largest)
    if not seconds > 0:
        raise ConfigError(
            f"{len(largest)} passes fit into the KV memory, the context and the token budget; "
            "enlarge these, or set {profile} to a file"
        )
    flops = sum(geometry.flops(p.cached, p.bsz) for p in largest)
    return LayerTimeEstimate(0.0, flops / seconds)


def from_passes(
    passes: Sequence[TimedPass],
    geometry: AttentionGeometry,
    attention: LayerTimeEstimate,
    context_limit_tokens: int,
) -> PassCosts:
    """Return the costs of passes: ``attention``, and a constant time per token for the rest.

    The throughput is that of a typical turn, computed in one pass.  If the model's context is too
    short for it, the turn fills the context.  Only ``besides_attention`` depends on passes of other
    sizes than the largest.
    """
    rest_s = min((p.pass_s - p.attention_s) / p.bsz for p in _largest(passes))
    append = min(TYPICAL_APPEND_TOKENS, context_limit_tokens)
    context = min(TYPICAL_CONTEXT_TOKENS, context_limit_tokens - append)
    turn_s = attention.seconds(geometry.flops(context, append)) + rest_s * append
    tokens_per_s = (context + append) / turn_s
    weight = _recompute_weight(
        attention, geometry, rest_s, min(TYPICAL_CONTEXT_TOKENS, context_limit_tokens), tokens_per_s
    )
    besides = _besides_attention(passes)
    return PassCosts(attention, tokens_per_s, (context + append) / append, weight, besides)


def _besides_attention(passes: Sequence[TimedPass]) -> BesidesAttention:
    """Return the line through the fastest of the largest and of the smallest passes.

    With passes of one size all of their time is per token.
    """
    rest_s: dict[int, float] = {}
    for one in passes:
        rest_s[one.bsz] = min(one.pass_s - one.attention_s, rest_s.get(one.bsz, math.inf))
    least, most = min(rest_s), max(rest_s)
    if least == most:
        return BesidesAttention(0.0, max(rest_s[most] / most, 0.0))
    token_s = max((rest_s[most] - rest_s[least]) / (most - least), 0.0)
    return BesidesAttention(max(rest_s[most] - token_s * most, 0.0), token_s)


def _recompute_weight(
    attention: LayerTimeEstimate,
    geometry: AttentionGeometry,
    rest_s: float,
    context: int,
    tokens_per_s: float,
) -> RecomputeWeight:
    """Return the weight of a recomputed token; ``rest_s`` is its time besides attention."""

    def seconds(cached: int, count: int) -> float:
        return geometry.flops(cached, count) / attention.flops_per_s + rest_s * count

    return fitted_recompute_weight(seconds, context, tokens_per_s)


class _Prefill(msgspec.Struct):
    pair_s: float
    batch_s: float = 0.0
    index_pair_s: float = 0.0
    attention_token_s: float = 0.0
    feed_forward_token_s: float = 0.0


class Profile(msgspec.Struct):
    """The keys of a file of ``dualpath profile`` that engines read."""

    prefill_tokens_per_s: float
    prefill: _Prefill
    computed_weight: ComputedWeight = TYPICAL_COMPUTED_WEIGHT


def read_profile(path: str) -> Profile:
    """Return the file that ``dualpath profile`` wrote; raises ``ConfigError``."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        profile = msgspec.convert(table, Profile)
    except OSError as error:
        raise ConfigError(
            f"{{profile}} {path!r} cannot be read ({error.strerror}); write it with `dualpath "
            "profile MODEL --out FILE`, or set auto or off"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{{profile}} {path!r} is not a file of `dualpath profile`: {error}; write one with "
            "`dualpath profile MODEL --out FILE`, or set auto or off"
        ) from error
    if not (profile.prefill_tokens_per_s > 0 and profile.prefill.pair_s > 0):
        raise ConfigError(
            f"{{profile}} {path!r} has prefill_tokens_per_s {profile.prefill_tokens_per_s} and "
            f"pair_s {profile.prefill.pair_s}; both must be above 0: profile larger passes"
        )
    return profile


def read_file(path: str, geometry: AttentionGeometry) -> PassCosts:
    """Return the costs that ``dualpath profile`` wrote; raises ``ConfigError``."""
    profile = read_profile(path)
    seconds = profile.prefill.pair_s + profile.prefill.index_pair_s
    flops_per_s = (geometry.pair_flops + geometry.index_pair_flops) / seconds
    attention = LayerTimeEstimate(0.0, flops_per_s)
    costs = PassCosts(attention, profile.prefill_tokens_per_s, profile.computed_weight)
    rest_s = profile.prefill.attention_token_s + profile.prefill.feed_forward_token_s
    if not 0 < rest_s < math.inf:
        return costs
    if 0 <= profile.prefill.batch_s < math.inf:
        rest = BesidesAttention(profile.prefill.batch_s, rest_s)
        costs = msgspec.structs.replace(costs, besides_attention=rest)
    weight = _recompute_weight(
        attention, geometry, rest_s, TYPICAL_CONTEXT_TOKENS, costs.prefill_tokens_per_s
    )
    return msgspec.structs.replace(costs, recompute_weight=weight)
