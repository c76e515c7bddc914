"""Time and size arithmetic of the model, shared by both cores to the last bit.

Scalars in, scalars out; every function compiles with numba as it stands.
"""

from dualpath.model.sim.result import NS_PER_S


def to_ns(seconds: float) -> int:
    """Round a duration to whole nanoseconds."""
    return int(seconds * NS_PER_S + 0.5)


def transfer_ns(transfer_bytes: float, bytes_per_s: float) -> int:
    """Return how long a link needs for so many bytes."""
    return int(transfer_bytes / bytes_per_s * NS_PER_S + 0.5)


def pass_s(
    attention_max_s: float,
    mean_tokens: float,
    batch_s: float,
    feed_forward_token_s: float,
    exchange_token_s: float,
    interleaved: bool,
) -> float:
    """Return the computation time of a forward pass of a unit (see ``PrefillCosts``).

    ``attention_max_s`` is its slowest engine's attention, ``mean_tokens`` the tokens of its mean
    engine: experts are spread over the unit, so their work is.
    """
    compute_s = attention_max_s + feed_forward_token_s * mean_tokens
    exchange_s = exchange_token_s * mean_tokens
    if interleaved:
        return batch_s + max(compute_s, exchange_s)
    return batch_s + compute_s + exchange_s


def decode_step_s(
    requests: int,
    window_context_tokens: int,
    context_tokens: int,
    engines: int,
    step_s: float,
    request_s: float,
    pair_s: float,
    index_pair_s: float,
) -> float:
    """Return the time of one decode step of a unit of ``engines`` (see ``DecodeCosts``)."""
    return (
        step_s
        + (request_s * requests + pair_s * window_context_tokens + index_pair_s * context_tokens)
        / engines
    )


def next_multiple_ns(now_ns: int, interval_ns: int) -> int:
    """Return the first multiple of ``interval_ns`` that is not before ``now_ns``."""
    return -(-now_ns // interval_ns) * interval_ns
