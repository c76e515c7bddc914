"""Costs for the simulator: a model's geometry × a GPU's rates × how engines share its weights.

Tensor parallelism divides an engine's attention by heads, projections and feed-forward layers by
its GPUs.  Not divided are the parts that vLLM has on each GPU (indexers, down-projections and KV of
latent attention, KV heads that are fewer than GPUs) and the time of a decode step per layer and
request.  Two all-reduces per layer are added, at the rate of the all-to-all within a node, which no
computation hides: both are assumptions.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.policy.events import TYPICAL_APPEND_TOKENS, TYPICAL_CONTEXT_TOKENS
from dualpath.vllm.profile_settings import Measurement, PassTime, StepTime
from dualpath_sim.catalog.families import KvCacheDtype
from dualpath_sim.catalog.geometry import (
    FLOP_PER_PARAMETER,
    Kernel,
    ModelGeometry,
    StateAttention,
)
from dualpath_sim.catalog.gpu import AttentionRates, GpuRates, PrefillRates
from dualpath_sim.catalog.load import load_described, load_gpu
from dualpath_sim.simulator.settings import (
    ClusterSettings,
    DecodeCosts,
    ModelCosts,
    PrefillCosts,
    WindowLayers,
)

DEFAULT_GPU = "hopper"
#: After attention and after the feed-forward layer.
ALL_REDUCES_PER_LAYER = 2


def load_model_costs(
    name_or_path: str | Path,
    gpu: str | Path,
    cluster: ClusterSettings,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> ModelCosts:
    """Return the costs of a model on a GPU in a cluster.

    ``name_or_path`` is a model of the catalog, a file of another model's geometry, or a TOML file
    of measured ``ModelCosts``, which contains the times, so that ``gpu`` is not used.
    Raises ``ConfigError``.
    """
    described = load_described(name_or_path, kv_cache_dtype)
    if isinstance(described, ModelCosts):
        _check_measured(str(name_or_path), described)
        return described
    return model_costs(described, load_gpu(gpu), cluster)


def single_engine_costs(name_or_path: str | Path, gpu: str | Path, gpus: int = 1) -> ModelCosts:
    """Return the costs of one engine for itself: without lock-step no other engine matters.

    It has so many GPUs.  Takes and raises what ``load_model_costs`` does.
    """
    alone = ClusterSettings(
        prefill_nodes=1,
        decode_nodes=1,
        gpus_per_node=gpus,
        prefill_tp=gpus,
        decode_tp=gpus,
        lockstep=False,
    )
    return load_model_costs(name_or_path, gpu, alone)


def model_costs(geometry: ModelGeometry, gpu: GpuRates, cluster: ClusterSettings) -> ModelCosts:
    """Return the costs that geometry and rates give; the PEs and DEs of a group share experts.

    Raises ``ConfigError`` for heads that cannot be divided among an engine's GPUs.
    """
    for role in Role:
        geometry.check_gpus_per_engine(cluster.gpus_per_engine(role))
    prefill = _prefill_costs(geometry, gpu, cluster)
    return ModelCosts(
        name=geometry.name,
        layers=geometry.layers,
        kv_bytes_per_token=geometry.kv_bytes_per_token_all_layers,
        prefill=prefill,
        decode=_decode_costs(geometry, gpu, cluster),
        prefill_tokens_per_s=prompt_tokens_per_s(prefill, cluster.compute_quota_s),
        context_limit_tokens=geometry.context_limit_tokens,
        prefill_replicas=geometry.replicas(cluster.gpus_per_engine(Role.PREFILL)),
        decode_replicas=geometry.replicas(cluster.gpus_per_engine(Role.DECODE)),
        window_layers=_window_layers(geometry),
    )


def _window_layers(geometry: ModelGeometry) -> tuple[WindowLayers, ...]:
    by_window: dict[int, float] = {}
    for part in geometry.attention:
        for stored in part.stored:
            if window := stored.window_tokens:
                held = part.layers * sum(stored.part_bytes)
                by_window[window] = by_window.get(window, 0.0) + held
    return tuple(
        WindowLayers(window_tokens=window, kv_bytes_per_token=held)
        for window, held in sorted(by_window.items())
    )


class Sharing(NamedTuple):
    """Over how many GPUs a role's weights are spread: those of an engine, and the experts'."""

    engine: int = 1
    experts: int = 1

    @property
    def exchanging(self) -> bool:
        """Whether engines send tokens to one another's experts (all-to-all)."""
        return self.experts > self.engine


def sharing(cluster: ClusterSettings, role: Role) -> Sharing:
    """Return how a role's engines share weights: in lock-step a group has one set of experts."""
    engine = cluster.gpus_per_engine(role)
    if not cluster.lockstep:
        return Sharing(engine, engine)
    return Sharing(engine, cluster.group_engines(role) * engine)


def hbm_for_kv_bytes(geometry: ModelGeometry, gpu: GpuRates, shared: Sharing) -> float:
    """Return what weights and reserves leave of one GPU's HBM; negative if they do not fit."""
    reserved = gpu.reserved_bytes
    if shared.exchanging and geometry.expert_layers:
        reserved += gpu.exchange_reserved_bytes
    weights = geometry.weight_bytes_per_gpu(shared.experts, shared.engine)
    return gpu.hbm_bytes - reserved - weights


def exchange_bytes_per_token(geometry: ModelGeometry, shared: Sharing, gpus_per_node: int) -> float:
    """Return dispatch and combine bytes of one prompt token over all expert layers, per GPU.

    An engine's GPUs send a part of its tokens each.  Between nodes a token crosses the network once
    per node that holds one of its experts and is forwarded inside; within one node it goes once to
    every GPU that does.
    """
    if not shared.exchanging:
        return 0.0
    width = shared.experts
    nodes = math.ceil(width / gpus_per_node)
    places = nodes if nodes > 1 else width
    reached = 0.0
    for part in geometry.expert_layers:
        expected = places * (1 - (1 - 1 / places) ** part.active_experts)
        if nodes > 1 and part.routed_nodes:
            expected = min(expected, part.routed_nodes)
        reached += part.layers * expected
    return reached * (geometry.dispatch_bytes + geometry.combine_bytes) / shared.engine


def _all_reduce_bytes(geometry: ModelGeometry, gpus: int) -> float:
    """Return what an engine's GPU sends of one token in the all-reduces of a pass, in BF16."""
    each = 2 * (gpus - 1) / gpus * geometry.hidden_size * 2
    return ALL_REDUCES_PER_LAYER * geometry.layers * each


def prompt_tokens_per_s(
    prefill: PrefillCosts,
    compute_quota_s: float,
    context: float = TYPICAL_CONTEXT_TOKENS,
    append: float = TYPICAL_APPEND_TOKENS,
) -> float:
    """Return prompt tokens, hits included, that a PE gets done of requests that are all alike.

    Batches are filled with requests of ``append`` tokens behind ``context`` cached ones up to the
    compute quota, one at least.
    """
    seen = min(context, prefill.window_tokens or context)
    pairs_s = append * (seen * prefill.pair_s + context * prefill.index_pair_s)
    attention_s = append * prefill.attention_token_s + pairs_s
    requests = max(1.0, (compute_quota_s - prefill.attention_batch_s) / attention_s)
    compute_s = requests * (attention_s + append * prefill.feed_forward_token_s)
    exchange_s = requests * append * prefill.exchange_token_s
    busy_s = max(compute_s, exchange_s) if prefill.interleaved else compute_s + exchange_s
    total_s = prefill.batch_s + prefill.attention_batch_s + busy_s
    return requests * (context + append) / total_s


class _Attention(NamedTuple):
    """Seconds of one query: fixed, per pair within the window and per pair whatever the window."""

    token_s: float
    pair_s: float
    index_pair_s: float
    window_tokens: int


def _attention_times(
    geometry: ModelGeometry,
    rates: AttentionRates,
    gpus: int,
    memory_bytes_per_s: float | None = None,
) -> _Attention:
    """Combine all attention layers into the one form that the simulator has.

    A sparse model's window is its indexer's choice; layers that see everything go to the indexer's
    coefficient then.  A sliding window is taken as full, its cost per query constant.  With
    ``memory_bytes_per_s`` a pair takes at least the time to read its KV (decode: no reuse).  Of an
    engine's ``gpus`` each has its share of the heads and its slice of the KV.
    """
    token_s = pair_s = index_s = full_s = 0.0
    window = 0
    for part in geometry.attention:
        if isinstance(part, StateAttention):
            token_s += _state_s(part, rates, gpus, memory_bytes_per_s)
        for scan in part.scans:
            # Each GPU has a whole indexer.
            shares = (1, 1) if scan.kernel == "indexer" else (gpus, part.slices(gpus))
            per_pair = part.layers * scan.flop / _flop_per_s(scan.kernel, rates) / shares[0]
            if memory_bytes_per_s is not None:
                read_s = part.layers * scan.read_bytes / shares[1] / memory_bytes_per_s
                per_pair = max(per_pair, read_s)
            if scan.kernel == "indexer":
                index_s += per_pair
            elif scan.selected:
                if window and window != scan.window_tokens:
                    raise ConfigError(
                        f"indexers select {window} and {scan.window_tokens} tokens; "
                        "the simulator takes one number, make them equal"
                    )
                window = scan.window_tokens
                pair_s += per_pair
            elif scan.window_tokens:
                token_s += per_pair * scan.window_tokens
            else:
                full_s += per_pair
    if window:
        return _Attention(token_s, pair_s, index_s + full_s, window)
    return _Attention(token_s, full_s, 0.0, 0)


def _state_s(
    part: StateAttention, rates: AttentionRates, gpus: int, memory_bytes_per_s: float | None
) -> float:
    """Return the seconds of a token in layers with a state, which a decode step reads and writes.

    States are computed at the rate of grouped-query attention: an assumption.
    """
    computed_s = part.layers * part.token_flop / rates.grouped_query_flop_per_s / gpus
    if memory_bytes_per_s is None:
        return computed_s
    moved_bytes = 2 * part.layers * part.state_bytes / part.slices(gpus)
    return max(computed_s, moved_bytes / memory_bytes_per_s)


def _flop_per_s(kernel: Kernel, rates: AttentionRates) -> float:
    by_kernel: dict[Kernel, float] = {
        "grouped": rates.grouped_query_flop_per_s,
        "latent": rates.latent_flop_per_s,
        "sparse": rates.sparse_latent_flop_per_s,
        "indexer": rates.indexer_flop_per_s,
    }
    return by_kernel[kernel]


def _prefill_costs(
    geometry: ModelGeometry, gpu: GpuRates, cluster: ClusterSettings
) -> PrefillCosts:
    rates, shared = gpu.prefill, sharing(cluster, Role.PREFILL)
    gpus = shared.engine
    attention = _attention_times(geometry, rates.attention, gpus)
    projections = geometry.rank_attention_parameters(gpus)
    reduce_s = _all_reduce_bytes(geometry, gpus) / rates.exchange_in_node_bytes_per_s
    efficiency = rates.efficiency * geometry.prefill_efficiency
    linear_s = FLOP_PER_PARAMETER / (rates.linear_flop_per_s * efficiency)
    expert_s = FLOP_PER_PARAMETER / (rates.expert_flop_per_s * efficiency)
    exchange_s = _exchange_token_s(geometry, rates, shared, cluster.gpus_per_node)
    # The output head works on a prompt's last token alone and is left out.
    return PrefillCosts(
        batch_s=rates.pass_s
        + rates.layer_s * geometry.layers
        + rates.exchange_layer_s * _spread_layers(geometry, shared),
        attention_token_s=projections * linear_s + attention.token_s / efficiency,
        pair_s=attention.pair_s / efficiency,
        index_pair_s=attention.index_pair_s / efficiency,
        window_tokens=attention.window_tokens,
        feed_forward_token_s=geometry.dense_parameters * linear_s / gpus
        + geometry.active_expert_parameters * expert_s / gpus
        + reduce_s,
        exchange_token_s=exchange_s,
        interleaved=rates.interleaved and exchange_s > 0,
    )


def _exchange_token_s(
    geometry: ModelGeometry, rates: PrefillRates, shared: Sharing, gpus_per_node: int
) -> float:
    in_node = shared.experts <= gpus_per_node
    rate = (
        rates.exchange_in_node_bytes_per_s if in_node else rates.exchange_between_nodes_bytes_per_s
    )
    return exchange_bytes_per_token(geometry, shared, gpus_per_node) / rate


def _spread_layers(geometry: ModelGeometry, shared: Sharing) -> int:
    return sum(part.layers for part in geometry.expert_layers) if shared.exchanging else 0


def _decode_costs(geometry: ModelGeometry, gpu: GpuRates, cluster: ClusterSettings) -> DecodeCosts:
    """Costs of a step bound by memory: up to about 100 requests per GPU weights hide the FLOP."""
    rates, shared = gpu.decode, sharing(cluster, Role.DECODE)
    gpus = shared.engine
    attention = _attention_times(geometry, rates.attention, gpus, rates.memory_bytes_per_s)
    spread = _spread_layers(geometry, shared)
    reduces = ALL_REDUCES_PER_LAYER * geometry.layers if gpus > 1 else 0
    # The low-latency all-to-all sends a token to each of its experts.
    sends = sum(part.layers * part.active_experts for part in geometry.expert_layers)
    per_send_bytes = geometry.dispatch_bytes + geometry.combine_bytes if spread else 0.0
    in_node = shared.experts <= cluster.gpus_per_node
    exchange_bytes_per_s = (
        rates.exchange_in_node_bytes_per_s if in_node else rates.exchange_between_nodes_bytes_per_s
    )
    return DecodeCosts(
        step_s=rates.step_s
        + rates.layer_s * geometry.layers
        + rates.exchange_layer_s * spread
        + rates.all_reduce_s * reduces
        + geometry.step_weight_bytes(shared.experts, gpus) / rates.memory_bytes_per_s,
        request_s=rates.request_layer_s * geometry.layers
        + sends * per_send_bytes / exchange_bytes_per_s / gpus
        + _all_reduce_bytes(geometry, gpus) / rates.exchange_in_node_bytes_per_s
        + attention.token_s,
        pair_s=attention.pair_s,
        index_pair_s=attention.index_pair_s,
        window_tokens=attention.window_tokens,
    )


def _check_measured(file: str, costs: ModelCosts) -> None:
    """Raise ``ConfigError`` for measured numbers that cannot be."""
    positive = {
        "layers": costs.layers,
        "kv_bytes_per_token": costs.kv_bytes_per_token,
        "prefill_tokens_per_s": costs.prefill_tokens_per_s,
    }
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{file}: {name} is {value}, must be above 0; profile again")
    windowed = sum(run.kv_bytes_per_token for run in costs.window_layers)
    if windowed > costs.kv_bytes_per_token or not all(
        run.window_tokens > 0 and run.kv_bytes_per_token > 0 for run in costs.window_layers
    ):
        raise ConfigError(
            f"{file}: window_layers take {windowed:g} of {costs.kv_bytes_per_token:g} bytes per "
            "token; each needs window_tokens and bytes above 0, at most kv_bytes_per_token "
            "together; correct the file"
        )
    for part in (costs.prefill, costs.decode):
        for field in msgspec.structs.fields(part):
            value = getattr(part, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"{file}: {field.name} is {value}, must be at least 0; profile again"
                )


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
    stated, hits included, one round per pass.  Raises ``ConfigError`` for points that do not
    determine the coefficients.
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
            f"{len(rows)} measured {what} do not determine {columns or 3} coefficients; measure "
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
