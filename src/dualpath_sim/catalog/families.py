"""Families of models: from the keys of a ``config.json`` to a geometry.

A family is identified by its ``model_type``; it determines which attention and feed-forward layers
the keys describe, and which defaults keys have that a file leaves out (``catalog.defaults``).
Families are looked at first, so that a family that is not read is refused by name whatever its
keys are.  Keys that a family does not have are not looked at, and any other model can be described
in a TOML file.  Layers of multi-token prediction are counted in ``draft_layers`` only, since
speculative decoding is the operator's choice (§A.4 disables it); encoders of multi-modal models are
not counted.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from dualpath.core.errors import ConfigError
from dualpath_sim.catalog.defaults import defaults_of
from dualpath_sim.catalog.geometry import (
    Attention,
    CompressedAttention,
    Count,
    CountOrZero,
    DenseFeedForward,
    ExpertFeedForward,
    FeedForward,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    ModelGeometry,
    StateAttention,
)

T = TypeVar("T")

#: Bytes of a number of each type that checkpoints are published in.
VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}

FULL_LAYER = "full_attention"
WINDOW_LAYER = "sliding_attention"
CHUNK_LAYER = "chunked_attention"
STATE_LAYER = "linear_attention"
#: DeepSeek's sparse attention stores every token's KV, as full attention does.
_FULL_LAYERS = {FULL_LAYER, "indexed_attention"}
Layers = Annotated[int, msgspec.Meta(ge=1, le=100_000)]


# Quantisation of weights, which leaves the KV-cache as it is.


def _bytes_of(bits: float, group: float = 0, scale_bytes: float = 2) -> float:
    """Return the bytes of a weight of so many bits with a scale per ``group`` weights, 0: none."""
    return bits / 8 + (scale_bytes / group if group > 0 else 0)


_MXFP4_BYTES = _bytes_of(4, 32, 1)
"""4 bits and a byte of scale per 32 values."""
_NVFP4_BYTES = _bytes_of(4, 16, 1)
#: Methods of quantisation and the bytes of a weight, where they follow from the method's name.
_METHOD_BYTES = {
    "fp8": 1.0,
    "fbgemm_fp8": 1.0,
    "experts_int8": 1.0,
    "mxfp4": _MXFP4_BYTES,
    "mxfp8": _bytes_of(8, 32, 1),
}
#: Methods that quantise experts only.
_OF_EXPERTS = ("mxfp4", "experts_int8")
#: Methods that state bits and group size.
_GROUPED = ("awq", "gptq", "auto-round", "auto_round", "autoround", "hqq", "compressed-tensors")
_MODELOPT_BYTES = {"FP8": 1.0, "NVFP4": _NVFP4_BYTES, "W4A16_AWQ": _bytes_of(4, 128)}
_ALL_METHODS = (*_METHOD_BYTES, *_GROUPED, "bitsandbytes", "modelopt")


#: A module or pattern of modules that is the whole attention, such as ``re:.*self_attn.*``.
_WHOLE_ATTENTION = re.compile(r"attn[^a-z]*$")


class _WeightScheme(msgspec.Struct, frozen=True):
    num_bits: Count | None = None
    group_size: int | None = None
    scale_dtype: str | None = None


class _SchemeGroup(msgspec.Struct, frozen=True):
    weights: _WeightScheme | None = None


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How weights are stored, as several tools write it."""

    quant_method: str = ""
    quant_algo: str | None = None
    bits: Count | None = None
    group_size: int | None = None
    load_in_8bit: bool | None = None
    config_groups: dict[str, _SchemeGroup] | None = None
    ignore: tuple[str, ...] | None = None
    modules_to_not_convert: tuple[str, ...] | None = None
    kv_cache_scheme: Any = None
    kv_cache_quant_algo: str | None = None

    @property
    def of_kv(self) -> bool:
        """Whether the KV-cache is quantised as well."""
        return bool(self.kv_cache_scheme or self.kv_cache_quant_algo)

    def weight_bytes(self, plain: float) -> tuple[float, float]:
        """Return bytes per weight of attention and dense layers, and of experts.

        Scales are counted as 2 bytes per group of weights.  Raises ``ConfigError`` for a method
        whose weights are not known.
        """
        if not self.quant_method:
            return plain, plain
        held = self._held_bytes()
        left_out = [*(self.ignore or ()), *(self.modules_to_not_convert or ())]
        keeps_attention = any(_WHOLE_ATTENTION.search(name) for name in left_out)
        of_experts = self.quant_method in _OF_EXPERTS or keeps_attention
        return (plain if of_experts else held), held

    def _held_bytes(self) -> float:
        method = self.quant_method
        if method in _METHOD_BYTES:
            return _METHOD_BYTES[method]
        if method.startswith("modelopt"):
            return known(_MODELOPT_BYTES, (self.quant_algo or "").upper(), "quant_algo")
        if method == "bitsandbytes":
            return 1.0 if self.load_in_8bit else _bytes_of(4, 64)
        if method not in _GROUPED:
            raise ConfigError(
                f"quant_method is {method!r}, known are {', '.join(_ALL_METHODS)}; describe the "
                "model in a TOML file (docs/reference/models.md)"
            )
        schemes = [group.weights for group in (self.config_groups or {}).values() if group.weights]
        if schemes:
            return max(self._scheme_bytes(scheme) for scheme in schemes)
        if self.bits is None:
            raise ConfigError(
                f"quantization_config of {method} states no bits per weight; add bits from the "
                "model's own config.json"
            )
        return _bytes_of(self.bits, self.group_size or 0)

    def _scheme_bytes(self, scheme: _WeightScheme) -> float:
        one_byte = scheme.scale_dtype == "torch.uint8"
        return _bytes_of(scheme.num_bits or 16, scheme.group_size or 0, 1 if one_byte else 2)


class _LinearAttention(msgspec.Struct, frozen=True):
    """Layers with a state as Kimi's files state them; layers are counted from 1."""

    kda_layers: tuple[int, ...] | None = None
    full_attn_layers: tuple[int, ...] | None = None
    head_dim: Count | None = None
    num_heads: Count | None = None
    short_conv_kernel_size: Count | None = None
    use_full_rank_gate: bool | None = None


class HubConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that sizes follow from; None where neither file nor family has one."""

    model_type: str
    hidden_size: Count | None = None
    num_hidden_layers: Layers | None = None
    num_attention_heads: Count | None = None
    vocab_size: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: CountOrZero | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: Count | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: Quantization | None = None
    expert_dtype: str | None = None
    attn_output_gate: bool | None = None
    # Layers of different kinds.
    layer_types: tuple[str, ...] | None = None
    sliding_window: CountOrZero | None = None
    sliding_window_pattern: Layers | str | None = None
    use_sliding_window: bool | None = None
    max_window_layers: CountOrZero | None = None
    attn_type_list: tuple[int, ...] | None = None
    attention_chunk_size: Count | None = None
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: Layers | None = None
    # Layers with a state.
    full_attention_interval: Layers | None = None
    linear_attn_config: _LinearAttention | None = None
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count | None = None
    linear_head_dim: Count | None = None
    linear_num_heads: Count | None = None
    mamba_ssm_dtype: str | None = None
    # Compressed layers.
    compress_ratios: tuple[int, ...] | None = None
    compress_rates: dict[str, Count] | None = None
    o_groups: Count | None = None
    o_lora_rank: Count | None = None
    # Experts.
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    n_routed_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    experts_per_token: Count | None = None
    n_shared_experts: CountOrZero | None = None
    moe_intermediate_size: Count | None = None
    num_shared_experts: CountOrZero | None = None
    shared_expert_intermediate_size: CountOrZero | None = None
    routed_expert_hidden_size: Count | None = None
    intermediate_size_mlp: Count | None = None
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: CountOrZero | None = None
    first_k_dense_replace: CountOrZero | None = None
    moe_layer_freq: int | tuple[int, ...] | None = None
    decoder_sparse_step: Layers | None = None
    mlp_only_layers: tuple[int, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    n_group: CountOrZero | None = None
    topk_group: CountOrZero | None = None
    # Multi-head latent attention and its indexer.
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    index_n_heads: Count | None = None
    index_head_dim: Count | None = None
    index_topk: Count | None = None
    indexer_types: tuple[str, ...] | None = None
    index_topk_freq: CountOrZero | None = None
    index_skip_topk_offset: CountOrZero | None = None
    index_topk_pattern: str | tuple[Any, ...] | None = None
    # Multi-token prediction.
    num_nextn_predict_layers: CountOrZero | None = None
    num_mtp_layers: CountOrZero | None = None
    num_mtp_modules: CountOrZero | None = None
    mtp_num_hidden_layers: CountOrZero | None = None
    mla_use_output_gate: bool | None = None

    def need(self, name: str, *others: str) -> int:
        """Return the first of these keys that the file has; raises ``ConfigError`` for none."""
        for key in (name, *others):
            value: int | None = getattr(self, key)
            if value is not None:
                return value
        raise ConfigError(
            f"there is no {' or '.join((name, *others))}, which a {self.model_type} model has; "
            "add it from the model's own config.json"
        )

    @property
    def layers(self) -> int:
        """All layers."""
        return self.need("num_hidden_layers")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.need("num_attention_heads")

    @property
    def draft_layers(self) -> int:
        """Layers of multi-token prediction that the checkpoint brings beside its own layers."""
        for stated in (
            self.num_nextn_predict_layers,
            self.num_mtp_layers,
            self.num_mtp_modules,
            self.mtp_num_hidden_layers,
        ):
            if stated:
                return stated
        return 0

    @property
    def value_bytes(self) -> float:
        """Bytes of a number where nothing is quantised."""
        name = (self.dtype or self.torch_dtype or "bfloat16").removeprefix("torch.")
        return known(VALUE_BYTES, name, "dtype")

    @property
    def weight_bytes(self) -> tuple[float, float]:
        """Bytes per weight of attention and dense layers, and of experts."""
        plain = self.value_bytes
        dense, experts = (self.quantization_config or Quantization()).weight_bytes(plain)
        # DeepSeek-V4 has experts in FP4 beside FP8 (MX scales).
        return dense, _MXFP4_BYTES if self.expert_dtype == "fp4" else experts

    def layer_kinds(self, unlisted: "LayerRule") -> tuple[str, ...]:
        """Return the kind of each layer: by ``layer_types``, else as the family has them."""
        if self.layer_types is None:
            return tuple(unlisted(self))
        if len(self.layer_types) != self.layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} layers, num_hidden_layers is "
                f"{self.layers}; correct one of them"
            )
        return self.layer_types

    @property
    def leading_dense_layers(self) -> int:
        """Layers without experts of a model that has them first, by either key.

        Raises ``ConfigError`` where the keys contradict each other.
        """
        dense, kinds = self.first_k_dense_replace or 0, self.mlp_layer_types
        if kinds is not None:
            dense = kinds.count("dense")
            expected = ("dense",) * dense + ("sparse",) * (self.layers - dense)
            if kinds != expected:
                raise ConfigError(
                    "mlp_layer_types are not dense layers followed by sparse ones, one for each of "
                    f"{self.layers} layers; describe the model in a TOML file "
                    "(docs/reference/models.md)"
                )
        return min(dense, self.layers)


LayerRule = Callable[[HubConfig], Sequence[str]]
"""Returns the kind of each layer of a file without ``layer_types``."""
CONFIG_KEYS = frozenset(field.name for field in msgspec.structs.fields(HubConfig))


def known(table: dict[str, T], name: str, key: str) -> T:
    """Return the table's entry; raises ``ConfigError`` for a name it does not have."""
    if name not in table:
        names = ", ".join(entry for entry in table if entry)
        raise ConfigError(
            f"{key} is {name!r}, known are {names}; describe the model in a TOML file "
            "(docs/reference/models.md)"
        )
    return table[name]


def decode_config(content: bytes) -> HubConfig:
    """Return a ``config.json``'s keys with its family's defaults; of a multi-modal model its text.

    The file is JSON as Python writes it, which has ``NaN`` and ``Infinity``.  Raises
    ``ConfigError``, also for a family that is not read, or the errors of JSON and msgspec.
    """
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ConfigError("is not a JSON object; give a model's config.json")
    text = document.get("text_config")
    if isinstance(text, dict):
        outer = {key: document[key] for key in _OUTER_KEYS if key in document}
        document = {**outer, **text}
    model_type = document.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(
            f"model_type is {model_type!r}, must be the name of the model's family; give the "
            "model's own config.json"
        )
    source = _family(model_type).defaults
    defaults = defaults_of(source).only(CONFIG_KEYS)
    renamed = {defaults.aliases.get(key, key): value for key, value in document.items()}
    # A key given under its own name counts, not under another.
    given = {key: value for key, value in {**renamed, **document}.items() if key in CONFIG_KEYS}
    return msgspec.convert({**defaults.values, **given}, HubConfig)


def _family(model_type: str) -> "_Family":
    """Return a family; raises ``ConfigError`` for one that is not read."""
    if model_type in _STATE_FAMILIES:
        raise ConfigError(
            f"{model_type} has layers with a state: {STATE_LAYERS}; choose another model, or "
            "describe this one in a TOML file (docs/reference/models.md)"
        )
    return known(FAMILIES, model_type, "model_type")


#: Why some models with such layers are refused.
STATE_LAYERS = "only the states of gated delta rules (Qwen3-Next, Kimi Linear) are known here"


#: Keys that multi-modal models give beside their text model.
_OUTER_KEYS = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings", "model_type")


KvCacheDtype = Literal["auto", "fp8"]
"""As vLLM's ``--kv-cache-dtype``: the model's own type, or FP8."""

#: An indexer's key is FP8 with a scale of 4 bytes per so many values
#: (vLLM: ``DeepseekV32IndexerCache``).
_INDEX_SCALE_VALUES = 128
_SCALE_BYTES = 4
#: vLLM's ``fp8_ds_mla``: the latent's FP8 values with a scale per 128 of them, rotary part in BF16.
_LATENT_SCALE_VALUES = 128
#: DeepSeek-V4's KV (vLLM's ``fp8_ds_mla``): FP8 with a scale byte per 64 values and one of padding,
#: and this many rotary values in BF16.
_ENTRY_ROTARY_VALUES, _ENTRY_SCALE_VALUES = 64, 64
#: vLLM makes pages of attention at least as large as a state, in blocks of so many tokens
#: (``Platform._align_hybrid_block_size``); latent attention needs multiples of 128.
_STATE_BLOCK_TOKENS, _LATENT_STATE_BLOCK_TOKENS = 16, 128


class _Family(NamedTuple):
    """How a family's keys are read; ``defaults`` names the family that has its defaults."""

    attention: Callable[[HubConfig, KvCacheDtype], tuple[Attention, ...]]
    feed_forward: Callable[[HubConfig], tuple[FeedForward, ...]]
    defaults: str


def geometry_of(config: HubConfig, name: str, kv_cache_dtype: KvCacheDtype) -> ModelGeometry:
    """Return a model's geometry; raises ``ConfigError`` for a model that is not understood."""
    family = _family(config.model_type)
    quantization = config.quantization_config
    if quantization is not None and quantization.of_kv and kv_cache_dtype == "auto":
        raise ConfigError(
            "quantization_config quantises the KV-cache as well (kv_cache_scheme), which is read "
            "for FP8 only; set {kv_cache_dtype} to fp8 if it is"
        )
    dense_bytes, expert_bytes = config.weight_bytes
    geometry = ModelGeometry(
        name=name,
        title=name,
        hidden_size=config.need("hidden_size"),
        vocabulary=config.need("vocab_size"),
        attention=family.attention(config, kv_cache_dtype),
        feed_forward=family.feed_forward(config),
        weight_value_bytes=dense_bytes,
        expert_value_bytes=expert_bytes,
        head_value_bytes=config.value_bytes,
        tied_embedding=bool(config.tie_word_embeddings),
        context_limit_tokens=config.max_position_embeddings,
        draft_layers=config.draft_layers,
    )
    geometry.check()
    return geometry


# Kinds of layers in files without layer_types.


def _full(config: HubConfig) -> Sequence[str]:
    # MiniMax: 0 is a layer of linear attention.
    if 0 in (config.attn_type_list or ()):
        raise ConfigError(
            f"attn_type_list has layers with a state: {STATE_LAYERS}; describe the model in a TOML "
            "file (docs/reference/models.md)"
        )
    return (FULL_LAYER,) * config.layers


def _by_interval(interval: int, other: str) -> LayerRule:
    """Return the rule that every ``interval``-th layer is full."""

    def rule(config: HubConfig) -> Sequence[str]:
        pattern = config.sliding_window_pattern if other == WINDOW_LAYER else None
        if isinstance(pattern, str):
            raise ConfigError(
                f"sliding_window_pattern is {pattern!r}, of which only a number is understood; add "
                "layer_types"
            )
        every = pattern or interval
        if other == STATE_LAYER:
            every = config.full_attention_interval or interval
        return [other if (layer + 1) % every else FULL_LAYER for layer in range(config.layers)]

    return rule


def _windowed(config: HubConfig) -> Sequence[str]:
    """A window in all layers, or in none; some families need use_sliding_window for it."""
    if config.sliding_window and config.use_sliding_window:
        raise ConfigError(
            f"use_sliding_window is true, but no layer_types list the layers with the window "
            f"of {config.sliding_window}; add layer_types"
        )
    windowed = config.sliding_window and config.use_sliding_window is None
    return (WINDOW_LAYER if windowed else FULL_LAYER,) * config.layers


def _windowed_behind(config: HubConfig) -> Sequence[str]:
    """Qwen: a window that is used is in the layers from ``max_window_layers`` on."""
    if not (config.sliding_window and config.use_sliding_window):
        return (FULL_LAYER,) * config.layers
    full = min(config.need("max_window_layers"), config.layers)
    return (FULL_LAYER,) * full + (WINDOW_LAYER,) * (config.layers - full)


def _chunked(config: HubConfig) -> Sequence[str]:
    """Llama 4: layers without rotary embedding see everything, the others their chunk."""
    every = config.no_rope_layer_interval or 4
    rotary = config.no_rope_layers or [(n + 1) % every != 0 for n in range(config.layers)]
    if len(rotary) != config.layers:
        raise ConfigError(
            f"no_rope_layers has {len(rotary)} layers, num_hidden_layers is {config.layers}; "
            "correct one of them"
        )
    chunk = CHUNK_LAYER if config.attention_chunk_size else FULL_LAYER
    return [chunk if one else FULL_LAYER for one in rotary]


def _kimi_linear(config: HubConfig) -> Sequence[str]:
    linear = config.linear_attn_config
    if linear is None or linear.kda_layers is None:
        return [FULL_LAYER if n and n % 4 == 0 else STATE_LAYER for n in range(config.layers)]
    states = set(linear.kda_layers)
    return [STATE_LAYER if n + 1 in states else FULL_LAYER for n in range(config.layers)]


# Attention.


def _runs(kinds: Sequence[str], supported: Sequence[str]) -> dict[str, int]:
    """Return the number of layers of each kind; raises ``ConfigError`` for an unsupported one."""
    counted = dict.fromkeys(supported, 0)
    for kind in kinds:
        name = FULL_LAYER if kind in _FULL_LAYERS else kind
        if name not in counted:
            raise ConfigError(
                f"layers of type {name}: known for this family are {', '.join(supported)}; "
                "describe the model in a TOML file (docs/reference/models.md)"
            )
        counted[name] += 1
    return {kind: layers for kind, layers in counted.items() if layers}


def _grouped_query(unlisted: LayerRule) -> "_AttentionOf":
    def attention(config: HubConfig, kv_cache_dtype: KvCacheDtype) -> tuple[Attention, ...]:
        kinds = config.layer_kinds(unlisted)
        found: list[Attention] = []
        for kind, layers in _runs(kinds, (FULL_LAYER, WINDOW_LAYER, CHUNK_LAYER)).items():
            window = 0
            if kind == WINDOW_LAYER:
                window = config.need("sliding_window")
            elif kind == CHUNK_LAYER:
                window = config.need("attention_chunk_size")
            found.append(_grouped(config, kv_cache_dtype, layers, window))
        return tuple(found)

    return attention


_AttentionOf = Callable[[HubConfig, KvCacheDtype], tuple[Attention, ...]]


def _grouped(
    config: HubConfig, kv_cache_dtype: KvCacheDtype, layers: int, window: int, *, gate: bool = False
) -> GroupedQueryAttention:
    heads, hidden = config.heads, config.need("hidden_size")
    head_dim = config.head_dim or hidden // heads
    if head_dim < 1:
        raise ConfigError(
            f"hidden_size is {hidden}, below the {heads} heads, and there is no head_dim; correct "
            "one of them"
        )
    return GroupedQueryAttention(
        layers=layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=head_dim,
        kv_value_bytes=1.0 if kv_cache_dtype == "fp8" else config.value_bytes,
        window_tokens=window,
        output_gate=gate,
    )


def _gated_delta(config: HubConfig, kv_cache_dtype: KvCacheDtype) -> tuple[Attention, ...]:
    """Qwen3-Next and Qwen3.5: full attention with an output gate, and gated delta rules."""
    kinds = config.layer_kinds(_by_interval(4, STATE_LAYER))
    runs = _runs(kinds, (FULL_LAYER, STATE_LAYER))
    gate = config.attn_output_gate is not False
    full = _grouped(config, kv_cache_dtype, max(runs.get(FULL_LAYER, 0), 1), 0, gate=gate)
    found: list[Attention] = [full] if FULL_LAYER in runs else []
    if layers := runs.get(STATE_LAYER):
        plain = config.value_bytes
        stated = config.mamba_ssm_dtype
        state = StateAttention(
            layers=layers,
            heads=config.need("linear_num_value_heads"),
            key_heads=config.need("linear_num_key_heads"),
            key_dim=config.need("linear_key_head_dim"),
            value_dim=config.need("linear_value_head_dim"),
            conv_width=config.need("linear_conv_kernel_dim"),
            state_value_bytes=known(VALUE_BYTES, stated, "mamba_ssm_dtype") if stated else plain,
            conv_value_bytes=plain,
            checkpoint_tokens=1,
        )
        found.append(_checkpointed(state, full.kv_bytes_per_token, _STATE_BLOCK_TOKENS))
    return tuple(found)


def _checkpointed(
    state: StateAttention, token_bytes: float, multiple_tokens: int
) -> StateAttention:
    """Return the layers with a state per block, as large as vLLM makes blocks beside such layers.

    The page of a layer of attention, which has ``token_bytes`` per token, holds a state.
    """
    blocks = -(-state.state_bytes // (multiple_tokens * token_bytes))
    return msgspec.structs.replace(state, checkpoint_tokens=int(blocks) * multiple_tokens)


def _latent(config: HubConfig, kv_cache_dtype: KvCacheDtype) -> tuple[Attention, ...]:
    """Latent attention; with an indexer in all layers, or in some that choose for the others."""
    if config.index_topk is None:
        return (_latent_layers(config, kv_cache_dtype, config.layers, None),)
    kinds = _indexer_kinds(config)
    found: list[Attention] = []
    for shared in (False, True):
        if layers := sum((kind == "shared") is shared for kind in kinds):
            indexer = _indexer(config, shared=shared)
            found.append(_latent_layers(config, kv_cache_dtype, layers, indexer))
    return tuple(found)


def _latent_layers(
    config: HubConfig, kv_cache_dtype: KvCacheDtype, layers: int, indexer: Indexer | None
) -> LatentAttention:
    fp8, plain, rank = kv_cache_dtype == "fp8", config.value_bytes, config.need("kv_lora_rank")
    # Sparse attention stores the rotary part in BF16 and a scale; dense FP8 has one scale for all.
    packed = fp8 and indexer is not None
    return LatentAttention(
        layers=layers,
        heads=config.heads,
        query_rank=config.q_lora_rank or 0,
        kv_rank=rank,
        nope_dim=config.need("qk_nope_head_dim"),
        rope_dim=config.need("qk_rope_head_dim"),
        value_dim=config.need("v_head_dim"),
        latent_value_bytes=1.0 if fp8 else plain,
        latent_scale_bytes=rank // _LATENT_SCALE_VALUES * _SCALE_BYTES if packed else 0,
        rope_value_bytes=1.0 if fp8 and not packed else plain,
        indexer=indexer,
        output_gate=bool(config.mla_use_output_gate),
    )


def _indexer_kinds(config: HubConfig) -> Sequence[str]:
    """Return ``full`` for each layer that has an indexer, ``shared`` for the others."""
    kinds = config.indexer_types
    if kinds is None and config.index_topk_pattern is not None:
        letters = {"F": "full", "S": "shared"}
        kinds = tuple(letters.get(str(one), str(one)) for one in config.index_topk_pattern)
    if kinds is None:
        every = config.index_topk_freq or 1
        offset = 2 if config.index_skip_topk_offset is None else config.index_skip_topk_offset
        return [
            "shared" if max(layer - offset + 1, 0) % every else "full"
            for layer in range(config.layers)
        ]
    if len(kinds) != config.layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise ConfigError(
            f"indexer_types or index_topk_pattern do not name one of {config.layers} layers each "
            "as full or shared, the first as full; correct them"
        )
    return kinds


def _indexer(config: HubConfig, *, shared: bool = False) -> Indexer:
    dim = config.need("index_head_dim")
    return Indexer(
        heads=config.need("index_n_heads"),
        head_dim=dim,
        top_tokens=config.need("index_topk"),
        key_bytes=dim + dim // _INDEX_SCALE_VALUES * _SCALE_BYTES,
        counted=True,
        shared=shared,
    )


def _latent_and_states(config: HubConfig, kv_cache_dtype: KvCacheDtype) -> tuple[Attention, ...]:
    """Kimi Linear and K3: latent attention, and Kimi delta attention with states in FP32."""
    runs = _runs(config.layer_kinds(_kimi_linear), (FULL_LAYER, STATE_LAYER))
    latent = _latent_layers(config, kv_cache_dtype, max(runs.get(FULL_LAYER, 0), 1), None)
    found: list[Attention] = [latent] if FULL_LAYER in runs else []
    if layers := runs.get(STATE_LAYER):
        linear = config.linear_attn_config or _LinearAttention()
        heads = linear.num_heads or config.need("linear_num_heads")
        dim = linear.head_dim or config.need("linear_head_dim")
        state = StateAttention(
            layers=layers,
            heads=heads,
            key_heads=heads,
            key_dim=dim,
            value_dim=dim,
            conv_width=linear.short_conv_kernel_size or config.need("linear_conv_kernel_dim"),
            state_value_bytes=4.0,
            conv_value_bytes=config.value_bytes,
            checkpoint_tokens=1,
            gate_rank=0 if linear.use_full_rank_gate else dim,
            decay_rank=dim,
        )
        token_bytes = latent.kv_bytes_per_token
        found.append(_checkpointed(state, token_bytes, _LATENT_STATE_BLOCK_TOKENS))
    return tuple(found)


#: DeepSeek-V4's kinds of layers, and the tokens of an entry where the file does not state them.
_COMPRESSED_LAYERS = {
    WINDOW_LAYER: 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def _compressed_kinds(config: HubConfig) -> Sequence[str]:
    if config.compress_ratios is None:
        sparse, heavy = list(_COMPRESSED_LAYERS)[1:]
        return [heavy if n < 2 or n % 2 == 0 else sparse for n in range(config.layers)]
    # vLLM reads 1 like 0; ratios of layers of multi-token prediction come behind the others.
    names = {ratio: kind for kind, ratio in _COMPRESSED_LAYERS.items()} | {1: WINDOW_LAYER}
    return [
        names.get(ratio, f"compressed {ratio}:1")
        for ratio in config.compress_ratios[: config.layers]
    ]


def _compressed(config: HubConfig, kv_cache_dtype: KvCacheDtype) -> tuple[Attention, ...]:
    """DeepSeek-V4; vLLM packs its KV as FP8 whatever ``kv_cache_dtype`` is."""
    kinds = config.layer_kinds(_compressed_kinds)
    if len(kinds) != config.layers:
        raise ConfigError(
            f"compress_ratios has {len(kinds)} layers, num_hidden_layers is {config.layers}; "
            "correct one of them"
        )
    dim = config.need("head_dim")
    plain_values = max(dim - _ENTRY_ROTARY_VALUES, 0)
    entry_bytes = plain_values + plain_values // _ENTRY_SCALE_VALUES + 1
    entry_bytes += 2 * (dim - plain_values)
    found: list[Attention] = []
    for kind, layers in _runs(kinds, tuple(_COMPRESSED_LAYERS)).items():
        ratio = (config.compress_rates or {}).get(kind, _COMPRESSED_LAYERS[kind])
        sparse = kind == "compressed_sparse_attention"
        found.append(
            CompressedAttention(
                layers=layers,
                heads=config.heads,
                head_dim=dim,
                query_rank=config.need("q_lora_rank"),
                output_groups=config.need("o_groups"),
                output_rank=config.need("o_lora_rank"),
                window_tokens=config.need("sliding_window"),
                entry_bytes=entry_bytes,
                ratio=ratio,
                indexer=_indexer(config) if sparse else None,
            )
        )
    return tuple(found)


# Feed-forward.


def _dense(config: HubConfig) -> tuple[FeedForward, ...]:
    width = config.need("intermediate_size")
    return (DenseFeedForward(layers=config.layers, intermediate_size=width),)


def _mixed(
    config: HubConfig, dense_layers: int, expert_width: int, dense_key: str = "intermediate_size"
) -> tuple[FeedForward, ...]:
    """Return dense layers and layers of experts; several node groups limit routing (DeepSeek)."""
    found: list[FeedForward] = []
    if dense_layers:
        width = config.need(dense_key)
        found.append(DenseFeedForward(layers=dense_layers, intermediate_size=width))
    if expert_layers := config.layers - dense_layers:
        found.append(
            ExpertFeedForward(
                layers=expert_layers,
                experts=config.need("n_routed_experts", "num_local_experts", "num_experts"),
                active_experts=config.need("num_experts_per_tok", "experts_per_token"),
                shared_experts=_shared_experts(config, expert_width),
                intermediate_size=expert_width,
                routed_nodes=(config.topk_group or 0) if (config.n_group or 1) > 1 else 0,
                expert_hidden_size=config.routed_expert_hidden_size or 0,
            )
        )
    return tuple(found)


def _shared_experts(config: HubConfig, expert_width: int) -> int:
    """Return the number of shared experts of the routed ones' width."""
    if width := config.shared_expert_intermediate_size:
        if width % expert_width:
            raise ConfigError(
                f"shared_expert_intermediate_size is {width}, must be a multiple of the experts' "
                f"{expert_width}; describe the model in a TOML file (docs/reference/models.md)"
            )
        return width // expert_width
    return config.n_shared_experts or config.num_shared_experts or 0


def _experts_everywhere(config: HubConfig) -> tuple[FeedForward, ...]:
    return _mixed(config, 0, config.need("intermediate_size"))


def _own_experts_everywhere(config: HubConfig) -> tuple[FeedForward, ...]:
    return _mixed(config, 0, config.need("moe_intermediate_size"))


def _experts_after_dense(config: HubConfig) -> tuple[FeedForward, ...]:
    if config.moe_layer_freq not in (None, 1):
        raise ConfigError(
            f"moe_layer_freq is {config.moe_layer_freq}, only 1 is understood here; describe the "
            "model in a TOML file (docs/reference/models.md)"
        )
    return _mixed(config, config.leading_dense_layers, config.need("moe_intermediate_size"))


def _kimi_experts(config: HubConfig) -> tuple[FeedForward, ...]:
    # transformers' class takes one dense layer where the key is missing.
    if config.first_k_dense_replace is None:
        config = msgspec.structs.replace(config, first_k_dense_replace=1)
    return _experts_after_dense(config)


def _experts_by_step(config: HubConfig) -> tuple[FeedForward, ...]:
    step, excepted = config.decoder_sparse_step or 1, set(config.mlp_only_layers or ())
    layers = range(config.layers)
    dense = sum(1 for layer in layers if layer in excepted or (layer + 1) % step)
    return _mixed(config, dense, config.need("moe_intermediate_size"))


def _llama4_experts(config: HubConfig) -> tuple[FeedForward, ...]:
    """Experts of ``intermediate_size`` and one shared; dense layers have a width of their own."""
    step = config.interleave_moe_layer_step
    layers = range(config.layers)
    if config.moe_layers is not None:
        listed = set(config.moe_layers)
    else:
        listed = set(range(step - 1, config.layers, step)) if step else set()
    dense = sum(layer not in listed for layer in layers)
    if config.n_shared_experts is None:
        config = msgspec.structs.replace(config, n_shared_experts=1)
    width = config.need("intermediate_size")
    return _mixed(config, dense, width, "intermediate_size_mlp")


_window_or_none = _grouped_query(_windowed)
_gemma3 = _grouped_query(_by_interval(6, WINDOW_LAYER))
_qwen = _grouped_query(_windowed_behind)
_llama4 = _grouped_query(_chunked)
_all_full = _grouped_query(_full)

FAMILIES = {
    "llama": _Family(_window_or_none, _dense, "llama"),
    "mistral": _Family(_window_or_none, _dense, "mistral"),
    "mistral3": _Family(_window_or_none, _dense, "mistral"),
    "ministral3": _Family(_window_or_none, _dense, "ministral3"),
    "qwen2": _Family(_qwen, _dense, "qwen2"),
    "qwen2_5_vl": _Family(_qwen, _dense, "qwen2_5_vl_text"),
    "qwen2_5_vl_text": _Family(_qwen, _dense, "qwen2_5_vl_text"),
    "qwen3": _Family(_qwen, _dense, "qwen3"),
    "qwen3_vl_text": _Family(_all_full, _dense, "qwen3_vl_text"),
    "gemma3": _Family(_gemma3, _dense, "gemma3_text"),
    "gemma3_text": _Family(_gemma3, _dense, "gemma3_text"),
    "olmo3": _Family(_grouped_query(_by_interval(4, WINDOW_LAYER)), _dense, "olmo3"),
    "seed_oss": _Family(_all_full, _dense, "seed_oss"),
    "mixtral": _Family(_window_or_none, _experts_everywhere, "mixtral"),
    "qwen3_moe": _Family(_qwen, _experts_by_step, "qwen3_moe"),
    "qwen3_vl_moe_text": _Family(_all_full, _experts_by_step, "qwen3_vl_moe_text"),
    "glm4_moe": _Family(_all_full, _experts_after_dense, "glm4_moe"),
    "gpt_oss": _Family(
        _grouped_query(_by_interval(2, WINDOW_LAYER)), _experts_everywhere, "gpt_oss"
    ),
    "minimax_m2": _Family(_all_full, _experts_everywhere, "minimax_m2"),
    "llama4": _Family(_llama4, _llama4_experts, "llama4_text"),
    "llama4_text": _Family(_llama4, _llama4_experts, "llama4_text"),
    "qwen3_next": _Family(_gated_delta, _experts_by_step, "qwen3_next"),
    "qwen3_5": _Family(_gated_delta, _dense, "qwen3_5_text"),
    "qwen3_5_text": _Family(_gated_delta, _dense, "qwen3_5_text"),
    "qwen3_5_moe": _Family(_gated_delta, _own_experts_everywhere, "qwen3_5_moe_text"),
    "qwen3_5_moe_text": _Family(_gated_delta, _own_experts_everywhere, "qwen3_5_moe_text"),
    "deepseek_v2": _Family(_latent, _experts_after_dense, "deepseek_v2"),
    "deepseek_v3": _Family(_latent, _experts_after_dense, "deepseek_v3"),
    "deepseek_v32": _Family(_latent, _experts_after_dense, "deepseek_v32"),
    "deepseek_v4": _Family(_compressed, _own_experts_everywhere, "deepseek_v4"),
    "glm_moe_dsa": _Family(_latent, _experts_after_dense, "glm_moe_dsa"),
    "kimi_k2": _Family(_latent, _experts_after_dense, "deepseek_v3"),
    "kimi_k25": _Family(_latent, _experts_after_dense, "deepseek_v3"),
    "kimi_linear": _Family(_latent_and_states, _kimi_experts, "kimi_linear"),
    "kimi_k3": _Family(_latent_and_states, _kimi_experts, "kimi_linear"),
}
DEFAULTS_OF_FAMILIES = {name: family.defaults for name, family in FAMILIES.items()}

#: Families with Mamba layers or another linear attention; their states are not known here.
_STATE_FAMILIES = frozenset(
    (
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "minimax_text_01",
        "nemotron_h",
        "olmo_hybrid",
        "zamba",
        "zamba2",
    )
)
