"""Costs for the simulator: a model's geometry × a GPU's rates × how the experts are spread."""

import math
from pathlib import Path
from typing import NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.model.catalog.families import KvCacheDtype
from dualpath.model.catalog.geometry import FLOP_PER_PARAMETER, ModelGeometry
from dualpath.model.catalog.gpu import AttentionRates, GpuRates, PrefillRates
from dualpath.model.catalog.layers import Attention, LatentAttention
from dualpath.model.catalog.load import load_described, load_gpu
from dualpath.model.sim.settings import ClusterSettings, DecodeCosts, ModelCosts, PrefillCosts

#: The request whose throughput gives β (§A.4): the mean of the 64K dataset (§3, Table 2).
TYPICAL_CONTEXT_TOKENS = 32_721
TYPICAL_APPEND_TOKENS = 429

DEFAULT_GPU = "hopper"


def load_model_costs(
    name_or_path: str | Path,
    gpu: str | Path,
    cluster: ClusterSettings,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> ModelCosts:
    """Return the costs of a model on a GPU in a cluster.

    ``name_or_path`` is a model of the catalog, a file of another model's geometry, or a TOML file
    of measured ``ModelCosts``, which knows its own times: ``gpu`` is not looked at then.
    Raises ``ConfigError``.
    """
    described = load_described(name_or_path, kv_cache_dtype)
    if isinstance(described, ModelCosts):
        _check_measured(str(name_or_path), described)
        return described
    return model_costs(described, load_gpu(gpu), cluster)


def single_engine_costs(name_or_path: str | Path, gpu: str | Path) -> ModelCosts:
    """Return the costs of one engine for itself: without lock-step no other engine matters.

    Takes and raises what ``load_model_costs`` does.
    """
    alone = ClusterSettings(prefill_nodes=1, decode_nodes=1, gpus_per_node=1, lockstep=False)
    return load_model_costs(name_or_path, gpu, alone)


def model_costs(geometry: ModelGeometry, gpu: GpuRates, cluster: ClusterSettings) -> ModelCosts:
    """Return the costs that geometry and rates give; the PEs and DEs of a group share experts."""
    prefill = _prefill_costs(geometry, gpu, cluster)
    return ModelCosts(
        name=geometry.name,
        layers=geometry.layers,
        kv_bytes_per_token=geometry.kv_bytes_per_token,
        prefill=prefill,
        decode=_decode_costs(geometry, gpu, cluster),
        prefill_tokens_per_s=prompt_tokens_per_s(prefill, cluster.compute_quota_s),
        context_limit_tokens=geometry.context_limit_tokens,
    )


def expert_width(cluster: ClusterSettings, role: Role) -> int:
    """Return over how many GPUs experts are spread: those of a group, 1 without lock-step."""
    if not cluster.lockstep:
        return 1
    if role is Role.PREFILL:
        nodes, per_group = cluster.prefill_nodes, cluster.prefill_nodes_per_group
    else:
        nodes, per_group = cluster.decode_nodes, cluster.decode_nodes_per_group
    return (min(nodes, per_group) if per_group else nodes) * cluster.gpus_per_node


def hbm_for_kv_bytes(geometry: ModelGeometry, gpu: GpuRates, width: int) -> float:
    """Return what weights and reserves leave of one GPU's HBM; negative if they do not fit."""
    reserved = gpu.reserved_bytes
    if width > 1 and geometry.expert_layers:
        reserved += gpu.exchange_reserved_bytes
    return gpu.hbm_bytes - reserved - geometry.weight_bytes_per_gpu(width)


def exchange_bytes_per_token(geometry: ModelGeometry, width: int, gpus_per_node: int) -> float:
    """Return dispatch and combine bytes of one prompt token over all expert layers.

    Between nodes a token crosses the network once per node that holds one of its experts and is
    forwarded inside; within one node it goes once to every GPU that does.
    """
    if width <= 1:
        return 0.0
    nodes = math.ceil(width / gpus_per_node)
    places = nodes if nodes > 1 else width
    reached = 0.0
    for part in geometry.expert_layers:
        expected = places * (1 - (1 - 1 / places) ** part.active_experts)
        if nodes > 1 and part.routed_nodes:
            expected = min(expected, part.routed_nodes)
        reached += part.layers * expected
    return reached * (geometry.dispatch_bytes + geometry.combine_bytes)


def prompt_tokens_per_s(prefill: PrefillCosts, compute_quota_s: float) -> float:
    """Return prompt tokens, hits included, that a PE gets done of typical requests.

    Batches are filled with ``TYPICAL_*`` requests up to the compute quota, one at least.
    """
    context, append = TYPICAL_CONTEXT_TOKENS, TYPICAL_APPEND_TOKENS
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
    geometry: ModelGeometry, rates: AttentionRates, memory_bytes_per_s: float | None = None
) -> _Attention:
    """Fold all attention layers into the one form the simulator knows.

    A sparse model's window is its indexer's choice; layers that see everything go to the indexer's
    coefficient then.  A sliding window is taken as full, its cost per query constant.  With
    ``memory_bytes_per_s`` a pair takes at least the time to read its KV (decode: no reuse).
    """
    token_s = pair_s = index_s = full_s = 0.0
    window = 0
    for part in geometry.attention:
        per_pair = part.layers * part.pair_flop / _flop_per_s(part, rates)
        if memory_bytes_per_s is not None:
            read_s = part.layers * part.kv_bytes_per_token / memory_bytes_per_s
            per_pair = max(per_pair, read_s)
        if isinstance(part, LatentAttention) and part.indexer is not None:
            if window and window != part.window_tokens:
                raise ConfigError(
                    f"indexers keep {window} and {part.window_tokens} tokens; "
                    "the simulator takes one number, make them equal"
                )
            window = part.window_tokens
            pair_s += per_pair
            scan_s = part.layers * part.indexer_pair_flop / rates.indexer_flop_per_s
            if memory_bytes_per_s is not None:
                key_s = part.layers * part.indexer.key_bytes / memory_bytes_per_s
                scan_s = max(scan_s, key_s)
            index_s += scan_s
        elif part.window_tokens:
            token_s += per_pair * part.window_tokens
        else:
            full_s += per_pair
    if window:
        return _Attention(token_s, pair_s, index_s + full_s, window)
    return _Attention(token_s, full_s, 0.0, 0)


def _flop_per_s(part: Attention, rates: AttentionRates) -> float:
    if not isinstance(part, LatentAttention):
        return rates.grouped_query_flop_per_s
    return rates.sparse_latent_flop_per_s if part.indexer else rates.latent_flop_per_s


def _prefill_costs(
    geometry: ModelGeometry, gpu: GpuRates, cluster: ClusterSettings
) -> PrefillCosts:
    rates, width = gpu.prefill, expert_width(cluster, Role.PREFILL)
    attention = _attention_times(geometry, rates.attention)
    projections = geometry.attention_parameters + geometry.indexer_parameters
    linear_s = FLOP_PER_PARAMETER / (rates.linear_flop_per_s * rates.efficiency)
    expert_s = FLOP_PER_PARAMETER / (rates.expert_flop_per_s * rates.efficiency)
    exchange_s = _exchange_token_s(geometry, rates, width, cluster.gpus_per_node)
    # The output head works on a prompt's last token alone and is left out.
    return PrefillCosts(
        batch_s=rates.pass_s
        + rates.layer_s * geometry.layers
        + rates.exchange_layer_s * _spread_layers(geometry, width),
        attention_token_s=projections * linear_s + attention.token_s / rates.efficiency,
        pair_s=attention.pair_s / rates.efficiency,
        index_pair_s=attention.index_pair_s / rates.efficiency,
        window_tokens=attention.window_tokens,
        feed_forward_token_s=geometry.dense_parameters * linear_s
        + geometry.active_expert_parameters * expert_s,
        exchange_token_s=exchange_s,
        interleaved=rates.interleaved and exchange_s > 0,
    )


def _exchange_token_s(
    geometry: ModelGeometry, rates: PrefillRates, width: int, gpus_per_node: int
) -> float:
    in_node = width <= gpus_per_node
    rate = (
        rates.exchange_in_node_bytes_per_s if in_node else rates.exchange_between_nodes_bytes_per_s
    )
    return exchange_bytes_per_token(geometry, width, gpus_per_node) / rate


def _spread_layers(geometry: ModelGeometry, width: int) -> int:
    return sum(part.layers for part in geometry.expert_layers) if width > 1 else 0


def _decode_costs(geometry: ModelGeometry, gpu: GpuRates, cluster: ClusterSettings) -> DecodeCosts:
    """Costs of a step bound by memory: up to about 100 requests per GPU weights hide the FLOP."""
    rates, width = gpu.decode, expert_width(cluster, Role.DECODE)
    attention = _attention_times(geometry, rates.attention, rates.memory_bytes_per_s)
    spread = _spread_layers(geometry, width)
    # The low-latency all-to-all sends a token to each of its experts.
    sends = sum(part.layers * part.active_experts for part in geometry.expert_layers)
    per_send_bytes = geometry.dispatch_bytes + geometry.combine_bytes if spread else 0.0
    in_node = width <= cluster.gpus_per_node
    exchange_bytes_per_s = (
        rates.exchange_in_node_bytes_per_s if in_node else rates.exchange_between_nodes_bytes_per_s
    )
    return DecodeCosts(
        step_s=rates.step_s
        + rates.layer_s * geometry.layers
        + rates.exchange_layer_s * spread
        + geometry.step_weight_bytes(width) / rates.memory_bytes_per_s,
        request_s=rates.request_layer_s * geometry.layers
        + sends * per_send_bytes / exchange_bytes_per_s
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
    for part in (costs.prefill, costs.decode):
        for field in msgspec.structs.fields(part):
            value = getattr(part, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"{file}: {field.name} is {value}, must be at least 0; profile again"
                )
