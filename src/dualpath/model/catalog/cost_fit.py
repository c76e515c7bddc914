"""From measured pass and step times to the simulator's ``ModelCosts``; needs no vLLM.

Coefficients are non-negative least squares over *relative* errors, so that short passes count as
much as long ones; points that are off by more than ``TRUSTED_ERROR`` count for less (Huber's
weights), as one disturbed measurement must not bend all coefficients.

Timing whole passes cannot tell attention's time per token from the feed-forward network's: the
whole time per token is reported as ``feed_forward_token_s``, and ``attention_token_s`` stays 0.
The time per (query, key) pair is attention's alone.
"""

from collections.abc import Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
from dualpath.model.sim.settings import DecodeCosts, ModelCosts, PrefillCosts
from dualpath.vllm.measurement import Measurement, PassTime, StepTime

FloatArray = NDArray[np.float64]

#: Relative errors above this are taken for disturbances.
TRUSTED_ERROR = 0.05
_REWEIGHTINGS = 20


class Profile(msgspec.Struct, frozen=True):
    """Fitted costs with what they are worth.

    ``quota_flops_per_s`` is the engine setting of that name, None where the time of a pass does
    not grow with the pairs measured.  Errors are relative, per measured point in its order.
    """

    costs: ModelCosts
    quota_flops_per_s: float | None
    prefill_errors: tuple[float, ...]
    decode_errors: tuple[float, ...]


def fit_profile(measurement: Measurement, name: str, round_tokens: tuple[int, int]) -> Profile:
    """Return the costs that fit a measurement.

    ``round_tokens`` is (context, append) of the round by which ``prefill_tokens_per_s`` is
    stated, hits included, one round per pass.  Raises ``ConfigError`` for points that cannot tell
    the coefficients apart.
    """
    prefill, prefill_errors = _fit_prefill(measurement.passes)
    decode, decode_errors = _fit_decode(measurement.steps)
    context, append = round_tokens
    seconds = predict_pass_s(prefill, context, append)
    facts = measurement.facts
    costs = ModelCosts(
        name=name,
        layers=facts.layers,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        prefill=prefill,
        decode=decode,
        prefill_tokens_per_s=(context + append) / seconds,
        computed_weight=(context + append) / append,
        context_limit_tokens=facts.context_limit_tokens,
    )
    pair_flops = facts.attention.pair_flops
    quota = pair_flops / prefill.pair_s if prefill.pair_s > 0 else None
    return Profile(costs, quota, prefill_errors, decode_errors)


def predict_pass_s(prefill: PrefillCosts, cached: int, bsz: int) -> float:
    """Return the seconds of a pass with one chunk."""
    token_s = prefill.attention_token_s + prefill.feed_forward_token_s
    return prefill.batch_s + token_s * bsz + prefill.pair_s * _pairs(cached, bsz)


def predict_step_s(decode: DecodeCosts, requests: int, context_tokens: float) -> float:
    """Return the seconds of a decode step."""
    return decode.step_s + requests * (decode.request_s + decode.pair_s * context_tokens)


def _fit_prefill(passes: Sequence[PassTime]) -> tuple[PrefillCosts, tuple[float, ...]]:
    rows = [(1.0, float(p.bsz), float(_pairs(p.cached, p.bsz))) for p in passes]
    batch_s, token_s, pair_s = _fit("prefill passes", rows, [p.seconds for p in passes]).tolist()
    costs = PrefillCosts(batch_s=batch_s, feed_forward_token_s=token_s, pair_s=pair_s)
    errors = tuple(predict_pass_s(costs, p.cached, p.bsz) / p.seconds - 1 for p in passes)
    return costs, errors


def _fit_decode(steps: Sequence[StepTime]) -> tuple[DecodeCosts, tuple[float, ...]]:
    rows = [(1.0, float(s.requests), s.requests * s.context_tokens) for s in steps]
    step_s, request_s, pair_s = _fit("decode steps", rows, [s.seconds for s in steps]).tolist()
    costs = DecodeCosts(step_s=step_s, request_s=request_s, pair_s=pair_s)
    errors = tuple(
        predict_step_s(costs, s.requests, s.context_tokens) / s.seconds - 1 for s in steps
    )
    return costs, errors


def _fit(what: str, rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> FloatArray:
    """Return the non-negative coefficients; raises ``ConfigError`` for points that give none."""
    matrix, measured = np.array(rows, np.float64), np.array(seconds, np.float64)
    columns = matrix.shape[1] if matrix.ndim == 2 else 0
    if not columns or not (measured > 0).all() or np.linalg.matrix_rank(matrix) < columns:
        raise ConfigError(
            f"{len(rows)} measured {what} cannot tell {columns or 3} coefficients apart; measure "
            "at least two sizes in either direction, all with times above 0"
        )
    relative = matrix / measured[:, None]
    weights = np.ones(len(rows))
    for _ in range(_REWEIGHTINGS):
        found = _least_squares(relative, weights)
        errors = np.abs(relative @ found - 1)
        weights = TRUSTED_ERROR / np.maximum(errors, TRUSTED_ERROR)
    return found


def _least_squares(relative: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the non-negative least squares; with three columns every active set is tried."""
    root = np.sqrt(weights)
    matrix, target = relative * root[:, None], root
    columns = matrix.shape[1]
    best, least = np.zeros(columns), np.inf
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            part = _solve(matrix[:, list(chosen)], target)
            if (part < 0).any():
                continue
            residual = float(np.sum((matrix[:, list(chosen)] @ part - target) ** 2))
            if residual < least:
                least = residual
                best = np.zeros(columns)
                best[list(chosen)] = part
    return best


def _solve(matrix: FloatArray, target: FloatArray) -> FloatArray:
    # Columns differ by many orders of magnitude; normalised, none is taken for rank-deficient.
    size = np.linalg.norm(matrix, axis=0)
    found, *_ = np.linalg.lstsq(matrix / size, target, rcond=None)
    return np.asarray(found / size, np.float64)


def _pairs(cached: int, bsz: int) -> int:
    return bsz * cached + bsz * (bsz + 1) // 2
