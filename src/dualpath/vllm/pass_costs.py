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


class PassCosts(msgspec.Struct, frozen=True):
    """``attention`` predicts the time of a batch's attention layers from its FLOP (§6.2).

    ``prefill_tokens_per_s`` counts all tokens of prompts, hits included.  ``computed_weight`` ≥ 1
    is the number of prompt tokens per computed token, ``recompute_weight`` that by position, where
    passes have full size; None if it is unknown.
    """

    attention: LayerTimeEstimate
    prefill_tokens_per_s: float
    computed_weight: float
    recompute_weight: RecomputeWeight | None = None


def fitted_attention(passes: Sequence[TimedPass], geometry: AttentionGeometry) -> LayerTimeEstimate:
    """Return the line fitted to attention times over FLOP.

    Raises ``ConfigError`` for fewer than two passes or times that do not grow with the FLOP.
    """
    return fit([(geometry.flops(p.cached, p.bsz), p.attention_s) for p in passes])


def rough_attention(passes: Sequence[TimedPass], geometry: AttentionGeometry) -> LayerTimeEstimate:
    """Return the mean throughput over all passes, for use where ``fitted_attention`` fails.

    It is too low if overhead dominates, with short contexts or on a busy machine.  Raises
    ``ConfigError`` without any pass.
    """
    seconds = sum(p.attention_s for p in passes)
    if not seconds > 0:
        raise ConfigError(
            f"{len(passes)} passes fit into the KV memory, the context and the token budget; "
            "enlarge these, or set {profile} to a file"
        )
    flops = sum(geometry.flops(p.cached, p.bsz) for p in passes)
    return LayerTimeEstimate(0.0, flops / seconds)


def from_passes(
    passes: Sequence[TimedPass],
    geometry: AttentionGeometry,
    attention: LayerTimeEstimate,
    context_limit_tokens: int,
) -> PassCosts:
    """Return the costs of passes: ``attention``, and a constant time per token for the rest.

    The throughput is that of a typical turn, computed in one pass.  If the model's context is too
    short for it, the turn fills the context.
    """
    rest_s = min((p.pass_s - p.attention_s) / p.bsz for p in passes)
    append = min(TYPICAL_APPEND_TOKENS, context_limit_tokens)
    context = min(TYPICAL_CONTEXT_TOKENS, context_limit_tokens - append)
    turn_s = attention.seconds(geometry.flops(context, append)) + rest_s * append
    tokens_per_s = (context + append) / turn_s
    weight = _recompute_weight(
        attention, geometry, rest_s, min(TYPICAL_CONTEXT_TOKENS, context_limit_tokens), tokens_per_s
    )
    return PassCosts(attention, tokens_per_s, (context + append) / append, weight)


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
    weight = _recompute_weight(
        attention, geometry, rest_s, TYPICAL_CONTEXT_TOKENS, costs.prefill_tokens_per_s
    )
    return msgspec.structs.replace(costs, recompute_weight=weight)
