"""Rates of a GPU: what it reaches in practice, per class of kernel.  Sizes are the model's part."""

from typing import Annotated

import msgspec

Rate = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e3)]
Bytes = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class AttentionRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """FLOP/s of attention kernels: grouped-query, dense latent, sparse latent, indexer."""

    grouped_query_flop_per_s: Rate
    latent_flop_per_s: Rate
    sparse_latent_flop_per_s: Rate
    indexer_flop_per_s: Rate


class PrefillRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A forward pass of a prefill engine.

    ``linear_flop_per_s`` holds for attention projections and dense layers, ``expert_flop_per_s``
    for experts; ``efficiency`` multiplies every kernel's rate.  A pass takes ``pass_s``,
    ``layer_s`` per layer and ``exchange_layer_s`` per expert layer that is spread over GPUs, on
    top of the kernels.  The all-to-all between the GPUs of one node and between nodes has the two
    ``*_bytes_per_s`` of a GPU.  ``interleaved``: two micro-batches hide it behind computation.
    """

    linear_flop_per_s: Rate
    expert_flop_per_s: Rate
    attention: AttentionRates
    efficiency: Share
    pass_s: Seconds
    layer_s: Seconds
    exchange_layer_s: Seconds
    exchange_in_node_bytes_per_s: Rate
    exchange_between_nodes_bytes_per_s: Rate
    interleaved: bool


class DecodeRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A step of a decode engine: weights and KV are read at ``memory_bytes_per_s``.

    A step takes ``step_s``, ``layer_s`` per layer and ``exchange_layer_s`` per expert layer that
    is spread over GPUs; every request adds ``request_layer_s`` per layer and its bytes of the
    low-latency all-to-all at one of the two ``exchange_*_bytes_per_s``.  An all-reduce of an
    engine's GPUs takes ``all_reduce_s`` and its bytes at the rate within a node.
    """

    memory_bytes_per_s: Rate
    attention: AttentionRates
    step_s: Seconds
    layer_s: Seconds
    request_layer_s: Seconds
    exchange_layer_s: Seconds
    exchange_in_node_bytes_per_s: Rate
    exchange_between_nodes_bytes_per_s: Rate
    all_reduce_s: Seconds = 0.0


class GpuRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU.

    Of ``hbm_bytes``, ``reserved_bytes`` (activations, context) and, with expert parallelism,
    ``exchange_reserved_bytes`` (all-to-all buffers) hold neither weights nor KV.
    """

    name: str
    title: str
    hbm_bytes: Bytes
    reserved_bytes: Bytes
    exchange_reserved_bytes: Bytes
    prefill: PrefillRates
    decode: DecodeRates
