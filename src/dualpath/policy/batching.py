"""Compute quota: which chunks of which requests enter a PE's forward batch (§6.2).

Requests are added first come, first served while the predicted time of the attention layers
stays within the quota; the first that would exceed it is cut to what fits, found by binary
search, and closes the batch.  A cut ends at a multiple of ``align_tokens``, so that a chunk leaves
no half-filled block behind.  An empty batch takes at least one such chunk, whatever it costs:
nothing starves, and the quota is exceeded by at most that chunk.

*What a pass loads* (beyond the paper) is bounded as well where DEs receive KV in HBM.  Slots of a
DE's buffer admit one request after the other; without them, agents of equal pauses all enter the
same pass, and all of them wait for its loads.  So a request that its DE receives in HBM enters only
if all loads of the batch take at most ``LOAD_S``, or as long as the computation of the requests
before it; the first enters in any case.  Live engines observe how long the load of a token takes.

``next_chunk`` and what it calls take and return plain numbers, so that the simulator's compiled
core calls them as they stand; the classes around them are for everybody else.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.errors import ConfigError

Chunk = tuple[int, int]
"""(cached, bsz): tokens with KV-cache already there, tokens to compute in this batch."""

#: A window or a limit that never binds.
UNBOUNDED_TOKENS = 1 << 60
#: How long the loads of a batch may take where they are bounded.
LOAD_S = 0.1


class AttentionGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention cost of a model in FLOP, summed over the layers that the quota covers.

    ``pair_flops`` per (query, key) pair, where a query sees at most ``window_tokens`` keys (None:
    all; for sparse attention the number selected); ``index_pair_flops`` per pair whatever the
    window (the indexer of sparse attention, and the layers of a model with windows that have none);
    ``token_flops`` per computed token.
    """

    pair_flops: float
    token_flops: float = 0.0
    window_tokens: int | None = None
    index_pair_flops: float = 0.0

    @classmethod
    def from_heads(
        cls, layers: int, query_heads: int, key_dimension: int, value_dimension: int
    ) -> "AttentionGeometry":
        """Return the cost of plain attention: QK and PV, two FLOP per multiply-add."""
        return cls(pair_flops=2.0 * layers * query_heads * (key_dimension + value_dimension))

    def flops(self, cached: int, bsz: int) -> float:
        """Return the FLOP of ``bsz`` causal queries behind ``cached`` tokens; grows with bsz."""
        return chunk_flops(*self.coefficients, cached, bsz)

    @property
    def coefficients(self) -> tuple[float, float, float, int]:
        """The first arguments of ``chunk_flops``, ``largest_chunk`` and ``next_chunk``."""
        window = UNBOUNDED_TOKENS if self.window_tokens is None else self.window_tokens
        return self.pair_flops, self.index_pair_flops, self.token_flops, window


class LayerTimeEstimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds = ``overhead_s`` + FLOP / ``flops_per_s``, fitted for hardware and parallelism.

    ``overhead_s`` ≥ 0 is per batch, ``flops_per_s`` > 0.
    """

    overhead_s: float
    flops_per_s: float

    def seconds(self, flops: float) -> float:
        """Return the predicted time of a batch with that many attention FLOP."""
        return self.overhead_s + flops / self.flops_per_s


def fit(samples: Sequence[tuple[float, float]]) -> LayerTimeEstimate:
    """Return the least-squares estimate for measured (FLOP, seconds) of batches.

    An overhead that comes out negative is noise: the line is then fitted through the origin.
    Raises ``ConfigError`` without two different FLOP or when time does not grow with FLOP.
    """
    if len({flops for flops, _ in samples}) < 2:
        raise ConfigError(
            f"{len(samples)} profiling samples have fewer than 2 different FLOP; "
            "profile batches of several sizes"
        )
    mean_flops = sum(flops for flops, _ in samples) / len(samples)
    mean_s = sum(seconds for _, seconds in samples) / len(samples)
    spread = sum((flops - mean_flops) ** 2 for flops, _ in samples)
    slope = sum((flops - mean_flops) * (seconds - mean_s) for flops, seconds in samples) / spread
    overhead_s = mean_s - slope * mean_flops
    if overhead_s < 0:
        overhead_s = 0.0
        slope = sum(flops * s for flops, s in samples) / sum(flops**2 for flops, _ in samples)
    if slope <= 0:
        raise ConfigError(
            f"{len(samples)} profiling samples give {slope:.3g} s per FLOP, it must be above 0; "
            "profile larger batches on an otherwise idle machine"
        )
    return LayerTimeEstimate(overhead_s=overhead_s, flops_per_s=1.0 / slope)


def admit(
    batch: Iterable[Chunk],
    cached: int,
    remaining: int,
    quota_s: float,
    geometry: AttentionGeometry,
    estimate: LayerTimeEstimate,
    align_tokens: int = 1,
    limit: int | None = None,
) -> int:
    """Return how many of a request's ``remaining`` tokens join ``batch``: bsz, bsz' or 0.

    ``limit`` caps the answer for other reasons (a token budget), None for no cap.  In an empty
    batch a limit below one chunk is used up although that end is not aligned.
    """
    chunks = list(batch)
    spent = sum(geometry.flops(before, bsz) for before, bsz in chunks)
    limit_tokens = UNBOUNDED_TOKENS if limit is None else limit
    affordable = _affordable_flops(quota_s, estimate)
    return next_chunk(
        *geometry.coefficients,
        affordable,
        spent,
        cached,
        remaining,
        align_tokens,
        not chunks,
        limit_tokens,
    )[0]


class LoadBound(NamedTuple):
    """How long a batch's loads take, and its computation besides attention, in seconds.

    ``load_token_s`` per loaded token, 0 for loads without a bound; ``batch_s`` per batch and
    ``token_s`` per computed token.
    """

    load_token_s: float = 0.0
    batch_s: float = 0.0
    token_s: float = 0.0


NO_LOAD_BOUND = LoadBound()


class ComputeQuota:
    """The quota of one forward batch after another; asked once per request in FIFO order."""

    def __init__(
        self,
        geometry: AttentionGeometry,
        estimate: LayerTimeEstimate,
        quota_s: float,
        align_tokens: int = 64,
        loads: LoadBound = NO_LOAD_BOUND,
    ) -> None:
        """Raises ``ConfigError`` for a quota that is not positive or an alignment below 1."""
        if quota_s <= 0 or align_tokens < 1:
            raise ConfigError(
                f"compute quota of {quota_s} s with chunks of {align_tokens} tokens: the quota "
                "must be above 0 s and the alignment at least 1 token; correct the settings"
            )
        self._geometry = geometry
        self._estimate = estimate
        self._affordable_flops = _affordable_flops(quota_s, estimate)
        self._align_tokens = align_tokens
        self._loads = loads
        self.reset()

    def reset(self, load_token_s: float | None = None) -> None:
        """Begin an empty batch.

        ``load_token_s``, if given, is that of this batch and those after it: how long the load of a
        token takes as observed by now, 0 for loads without a bound.
        """
        if load_token_s is not None:
            self._loads = self._loads._replace(load_token_s=load_token_s)
        self._spent_flops = 0.0
        self._loaded_tokens = self._computed_tokens = 0
        self._empty = True
        self._closed = False

    def seconds(self, chunks: Iterable[Chunk]) -> float:
        """Return the predicted attention time of a batch of these chunks, 0 for an empty one."""
        flops = [self._geometry.flops(cached, bsz) for cached, bsz in chunks]
        return self._estimate.seconds(sum(flops)) if flops else 0.0

    @property
    def predicted_s(self) -> float:
        """Predicted attention time of the batch so far, 0 while it is empty."""
        return 0.0 if self._empty else self._estimate.seconds(self._spent_flops)

    @property
    def closed(self) -> bool:
        """Whether a request was cut or refused, so that no other may follow."""
        return self._closed

    def admit(
        self,
        cached: int,
        remaining: int,
        limit: int | None = None,
        *,
        loaded: int | None = None,
        bounded: bool = True,
    ) -> int:
        """Add the next request and return its bsz, 0 if it has to wait for the next batch.

        ``remaining`` tokens are still to be computed behind ``cached`` ones, of which the batch
        loads ``loaded`` (None: all); ``limit`` caps the answer for other reasons.  ``bounded``:
        the request enters only if the loads are short enough.  After the first request that did
        not enter whole, or not at all because of its load, all get 0.
        """
        loaded = cached if loaded is None else loaded
        if bounded and not self._empty and self._loads_too_long(loaded):
            self._closed = True
        if self._closed:
            return 0
        self._loaded_tokens += loaded
        bsz, self._spent_flops = next_chunk(
            *self._geometry.coefficients,
            self._affordable_flops,
            self._spent_flops,
            cached,
            remaining,
            self._align_tokens,
            self._empty,
            UNBOUNDED_TOKENS if limit is None else limit,
        )
        self._computed_tokens += bsz
        self._closed = bsz < remaining
        self._empty = self._empty and bsz == 0
        return bsz

    def _loads_too_long(self, loaded: int) -> bool:
        """Whether the batch would load longer than it computes with so many more loaded tokens."""
        loads = self._loads
        load_s = (self._loaded_tokens + loaded) * loads.load_token_s
        compute_s = loads.batch_s + self.predicted_s + self._computed_tokens * loads.token_s
        return load_s > max(LOAD_S, compute_s)


def _affordable_flops(quota_s: float, estimate: LayerTimeEstimate) -> float:
    return (quota_s - estimate.overhead_s) * estimate.flops_per_s


def next_chunk(
    pair_flops: float,
    index_pair_flops: float,
    token_flops: float,
    window_tokens: int,
    affordable_flops: float,
    spent_flops: float,
    cached: int,
    remaining: int,
    align_tokens: int,
    empty: bool,
    limit_tokens: int,
) -> tuple[int, float]:
    """Return how many of ``remaining`` tokens enter a batch, and its FLOP with them.

    The batch costs ``spent_flops`` of ``affordable_flops`` so far; see ``largest_chunk``.
    """
    bsz = largest_chunk(
        pair_flops,
        index_pair_flops,
        token_flops,
        window_tokens,
        affordable_flops - spent_flops,
        cached,
        remaining,
        align_tokens,
        empty,
        limit_tokens,
    )
    if bsz > 0:
        spent_flops += chunk_flops(
            pair_flops, index_pair_flops, token_flops, window_tokens, cached, bsz
        )
    return bsz, spent_flops


def largest_chunk(
    pair_flops: float,
    index_pair_flops: float,
    token_flops: float,
    window_tokens: int,
    allowed_flops: float,
    cached: int,
    remaining: int,
    align_tokens: int,
    empty: bool,
    limit_tokens: int,
) -> int:
    """Return how many of ``remaining`` tokens fit ``allowed_flops``, ``limit_tokens`` at most.

    Binary search over chunk ends, which are multiples of ``align_tokens`` or the very end.  An
    ``empty`` batch takes one chunk whatever it costs.
    """
    most = min(remaining, limit_tokens)
    if most <= 0:
        return 0
    if most == remaining:
        whole = chunk_flops(
            pair_flops, index_pair_flops, token_flops, window_tokens, cached, remaining
        )
        if whole <= allowed_flops:
            return remaining
    first_end = cached // align_tokens + 1
    low, high = first_end - 1, (cached + most) // align_tokens
    while low < high:
        middle = (low + high + 1) // 2
        bsz = middle * align_tokens - cached
        flops = chunk_flops(pair_flops, index_pair_flops, token_flops, window_tokens, cached, bsz)
        if flops <= allowed_flops:
            low = middle
        else:
            high = middle - 1
    if low >= first_end:
        return low * align_tokens - cached
    return min(most, first_end * align_tokens - cached) if empty else 0


def chunk_flops(
    pair_flops: float,
    index_pair_flops: float,
    token_flops: float,
    window_tokens: int,
    cached: int,
    bsz: int,
) -> float:
    """Return the FLOP of ``bsz`` causal queries behind ``cached`` tokens, ``window_tokens`` seen.

    Coefficients in seconds instead of FLOP give seconds.
    """
    pairs = bsz * cached + bsz * (bsz + 1) // 2
    short = min(max(window_tokens - cached, 0), bsz)
    seen = short * cached + short * (short + 1) // 2 + (bsz - short) * window_tokens
    return pair_flops * seen + index_pair_flops * pairs + token_flops * bsz
