"""Families of models: from the keys of a ``config.json`` to a geometry.

A family is identified by its ``model_type``; it determines which attention and feed-forward layers
the keys describe.  Nothing is guessed: keys that a family does not have are refused by name, and
any other model can be described in a TOML file.  Layers of multi-token prediction are counted in
``draft_layers`` only, since speculative decoding is the operator's choice (§A.4 disables it), and
so is a multi-modal model's encoder.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from dualpath.core.errors import ConfigError
from dualpath_sim.catalog.geometry import (
    Attention,
    Count,
    CountOrZero,
    DenseFeedForward,
    ExpertFeedForward,
    FeedForward,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    ModelGeometry,
)

T = TypeVar("T")

#: Bytes of a number of each type that checkpoints are published in.
VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_MXFP4_BYTES = 0.53125
"""4 bits and a byte of scale per 32 values."""

FULL_LAYER = "full_attention"
WINDOW_LAYER = "sliding_attention"
#: DeepSeek's sparse attention stores every token's KV, as full attention does.
_KEEPING_LAYERS = {FULL_LAYER, "indexed_attention"}
Layers = Annotated[int, msgspec.Meta(ge=1, le=100_000)]


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How weights are stored."""

    quant_method: str = ""


class HubConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that sizes follow from; None where a file does not have one."""

    model_type: str
    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    vocab_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: CountOrZero | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: Count | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: Quantization | None = None
    # Layers of different kinds.
    layer_types: tuple[str, ...] | None = None
    sliding_window: CountOrZero | None = None
    sliding_window_pattern: Layers | None = None
    use_sliding_window: bool | None = None
    attn_type_list: tuple[int, ...] | None = None
    # Experts.
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    n_routed_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    experts_per_token: Count | None = None
    n_shared_experts: CountOrZero | None = None
    moe_intermediate_size: Count | None = None
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
    index_topk_freq: int | None = None
    index_topk_pattern: str | tuple[Any, ...] | None = None
    # Multi-token prediction.
    num_nextn_predict_layers: CountOrZero | None = None
    num_mtp_layers: CountOrZero | None = None
    num_mtp_modules: CountOrZero | None = None

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
    def draft_layers(self) -> int:
        """Layers of multi-token prediction that the checkpoint brings beside its own layers."""
        return self.num_nextn_predict_layers or self.num_mtp_layers or self.num_mtp_modules or 0

    @property
    def value_bytes(self) -> float:
        """Bytes of a number where nothing is quantised."""
        name = (self.dtype or self.torch_dtype or "bfloat16").removeprefix("torch.")
        return known(VALUE_BYTES, name, "dtype")

    @property
    def weight_bytes(self) -> tuple[float, float]:
        """Bytes per weight of attention and dense layers, and of experts."""
        plain = self.value_bytes
        method = self.quantization_config.quant_method if self.quantization_config else ""
        methods = {"": (plain, plain), "fp8": (1.0, 1.0), "mxfp4": (plain, _MXFP4_BYTES)}
        return known(methods, method, "quant_method")

    def window_layers(self, default_pattern: int = 0) -> int:
        """Return how many layers see a sliding window only.

        ``default_pattern`` n > 0: without a list every n-th layer sees everything.  Raises
        ``ConfigError`` for layers that are neither, and for a window that names no layers.
        """
        if self.layer_types is not None:
            return self._listed_window_layers(self.layer_types)
        pattern = self.sliding_window_pattern or default_pattern
        if pattern and self.sliding_window:
            return self.num_hidden_layers - self.num_hidden_layers // pattern
        if self.sliding_window and self.use_sliding_window:
            raise ConfigError(
                f"use_sliding_window is true, but no layer_types list the layers with the window "
                f"of {self.sliding_window}; add layer_types"
            )
        # Qwen's window is not used unless use_sliding_window is true.
        if self.sliding_window and self.use_sliding_window is None and not self._is_qwen:
            return self.num_hidden_layers
        return 0

    @property
    def _is_qwen(self) -> bool:
        return self.model_type.startswith("qwen")

    @property
    def leading_dense_layers(self) -> int:
        """Layers without experts of a model that has them first, by either key.

        Raises ``ConfigError`` where the keys contradict each other.
        """
        dense, kinds = self.first_k_dense_replace or 0, self.mlp_layer_types
        if kinds is not None:
            dense = kinds.count("dense")
            expected = ("dense",) * dense + ("sparse",) * (self.num_hidden_layers - dense)
            if kinds != expected:
                raise ConfigError(
                    "mlp_layer_types are not dense layers followed by sparse ones, one for each of "
                    f"{self.num_hidden_layers} layers; describe the model in a TOML file "
                    "(docs/reference/models.md)"
                )
        return min(dense, self.num_hidden_layers)

    def _listed_window_layers(self, kinds: Sequence[str]) -> int:
        if len(kinds) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(kinds)} layers, num_hidden_layers is "
                f"{self.num_hidden_layers}; correct one of them"
            )
        if strange := sorted(set(kinds) - _KEEPING_LAYERS - {WINDOW_LAYER}):
            raise ConfigError(
                f"layers of type {', '.join(strange)}: {STATE_LAYERS}; choose a model of attention "
                "layers only"
            )
        return kinds.count(WINDOW_LAYER)


#: Why models with such layers are refused.
STATE_LAYERS = (
    "only full and sliding-window attention store KV per token; layers with a state have one per "
    "prefix, which dualpath does not store"
)


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
    """Return a ``config.json``'s keys; of a multi-modal model those of its text model.

    Raises ``ConfigError``, or msgspec's errors for another kind of file.
    """
    document = msgspec.json.decode(content, type=dict[str, Any])
    text = document.get("text_config")
    if isinstance(text, dict):
        outer = {key: document[key] for key in _OUTER_KEYS if key in document}
        document = {**outer, **text}
    return msgspec.convert(document, HubConfig)


#: Keys that multi-modal models give beside their text model.
_OUTER_KEYS = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings", "model_type")


KvCacheDtype = Literal["auto", "fp8"]
"""As vLLM's ``--kv-cache-dtype``: the model's own type, or FP8."""

#: In Gemma 3 every n-th layer sees everything; n where the file does not state it.
_GEMMA3_PATTERN = 6
#: An indexer's key is FP8 with a scale of 4 bytes per so many values
#: (vLLM: ``DeepseekV32IndexerCache``).
_INDEX_SCALE_VALUES = 128
_SCALE_BYTES = 4
#: vLLM's ``fp8_ds_mla``: the latent's FP8 values with a scale per 128 of them, rotary part in BF16.
_LATENT_SCALE_VALUES = 128


class _Family(NamedTuple):
    """How a family's keys are read."""

    attention: Callable[[HubConfig, KvCacheDtype], tuple[Attention, ...]]
    feed_forward: Callable[[HubConfig], tuple[FeedForward, ...]]
    tied: bool = False


def geometry_of(config: HubConfig, name: str, kv_cache_dtype: KvCacheDtype) -> ModelGeometry:
    """Return a model's geometry; raises ``ConfigError`` for a model that is not understood."""
    # MiniMax: 0 is a layer of linear attention.
    if config.model_type in _STATE_FAMILIES or 0 in (config.attn_type_list or ()):
        raise ConfigError(
            f"{config.model_type} has layers with a state: {STATE_LAYERS}; choose a model of "
            "attention layers only"
        )
    family = known(FAMILIES, config.model_type, "model_type")
    dense_bytes, expert_bytes = config.weight_bytes
    tied = family.tied if config.tie_word_embeddings is None else config.tie_word_embeddings
    geometry = ModelGeometry(
        name=name,
        title=name,
        hidden_size=config.hidden_size,
        vocabulary=config.vocab_size,
        attention=family.attention(config, kv_cache_dtype),
        feed_forward=family.feed_forward(config),
        weight_value_bytes=dense_bytes,
        expert_value_bytes=expert_bytes,
        head_value_bytes=config.value_bytes,
        tied_embedding=tied,
        context_limit_tokens=config.max_position_embeddings,
        draft_layers=config.draft_layers,
    )
    geometry.check()
    return geometry


# Attention.


def _grouped_query(
    config: HubConfig, kv_cache_dtype: KvCacheDtype, pattern: int = 0
) -> tuple[Attention, ...]:
    window_layers = config.window_layers(pattern)
    window_tokens = config.need("sliding_window") if window_layers else 0
    heads = config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // heads
    if head_dim < 1:
        raise ConfigError(
            f"hidden_size is {config.hidden_size}, below the {heads} heads, and there is no "
            "head_dim; correct one of them"
        )
    runs = ((0, config.num_hidden_layers - window_layers), (window_tokens, window_layers))
    return tuple(
        GroupedQueryAttention(
            layers=layers,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=head_dim,
            kv_value_bytes=1.0 if kv_cache_dtype == "fp8" else config.value_bytes,
            window_tokens=tokens,
        )
        for tokens, layers in runs
        if layers
    )


def _gemma3(config: HubConfig, kv_cache_dtype: KvCacheDtype) -> tuple[Attention, ...]:
    return _grouped_query(config, kv_cache_dtype, _GEMMA3_PATTERN)


def _latent(config: HubConfig, kv_cache_dtype: KvCacheDtype) -> tuple[Attention, ...]:
    indexer = _indexer(config)
    fp8, plain, rank = kv_cache_dtype == "fp8", config.value_bytes, config.need("kv_lora_rank")
    # Sparse attention stores the rotary part in BF16 and a scale; dense FP8 has one scale for all.
    packed = fp8 and indexer is not None
    return (
        LatentAttention(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            query_rank=config.q_lora_rank or 0,
            kv_rank=rank,
            nope_dim=config.need("qk_nope_head_dim"),
            rope_dim=config.need("qk_rope_head_dim"),
            value_dim=config.need("v_head_dim"),
            latent_value_bytes=1.0 if fp8 else plain,
            latent_scale_bytes=rank // _LATENT_SCALE_VALUES * _SCALE_BYTES if packed else 0,
            rope_value_bytes=1.0 if fp8 and not packed else plain,
            indexer=indexer,
        ),
    )


def _indexer(config: HubConfig) -> Indexer | None:
    if config.index_topk is None:
        return None
    some = set(config.indexer_types or ()) - {"full"}
    if some or config.index_topk_pattern or (config.index_topk_freq or 1) > 1:
        raise ConfigError(
            "indexer_types, index_topk_freq or index_topk_pattern: only some layers have an "
            "indexer, which is not understood here; describe the model in a TOML file "
            "(docs/reference/models.md)"
        )
    dim = config.need("index_head_dim")
    return Indexer(
        heads=config.need("index_n_heads"),
        head_dim=dim,
        top_tokens=config.index_topk,
        key_bytes=dim + dim // _INDEX_SCALE_VALUES * _SCALE_BYTES,
        counted=True,
    )


# Feed-forward.


def _dense(config: HubConfig) -> tuple[FeedForward, ...]:
    width = config.need("intermediate_size")
    return (DenseFeedForward(layers=config.num_hidden_layers, intermediate_size=width),)


def _mixed(config: HubConfig, dense_layers: int, expert_width: int) -> tuple[FeedForward, ...]:
    """Return dense layers and layers of experts; several node groups limit routing (DeepSeek)."""
    found: list[FeedForward] = []
    if dense_layers:
        width = config.need("intermediate_size")
        found.append(DenseFeedForward(layers=dense_layers, intermediate_size=width))
    if expert_layers := config.num_hidden_layers - dense_layers:
        found.append(
            ExpertFeedForward(
                layers=expert_layers,
                experts=config.need("n_routed_experts", "num_local_experts", "num_experts"),
                active_experts=config.need("num_experts_per_tok", "experts_per_token"),
                shared_experts=config.n_shared_experts or 0,
                intermediate_size=expert_width,
                routed_nodes=(config.topk_group or 0) if (config.n_group or 1) > 1 else 0,
            )
        )
    return tuple(found)


def _experts_everywhere(config: HubConfig) -> tuple[FeedForward, ...]:
    return _mixed(config, 0, config.need("intermediate_size"))


def _experts_after_dense(config: HubConfig) -> tuple[FeedForward, ...]:
    if config.moe_layer_freq not in (None, 1):
        raise ConfigError(
            f"moe_layer_freq is {config.moe_layer_freq}, only 1 is understood here; describe the "
            "model in a TOML file (docs/reference/models.md)"
        )
    return _mixed(config, config.leading_dense_layers, config.need("moe_intermediate_size"))


def _experts_by_step(config: HubConfig) -> tuple[FeedForward, ...]:
    step, excepted = config.decoder_sparse_step or 1, set(config.mlp_only_layers or ())
    layers = range(config.num_hidden_layers)
    dense = sum(1 for layer in layers if layer in excepted or (layer + 1) % step)
    return _mixed(config, dense, config.need("moe_intermediate_size"))


FAMILIES = {
    "llama": _Family(_grouped_query, _dense),
    "mistral": _Family(_grouped_query, _dense),
    "qwen2": _Family(_grouped_query, _dense),
    "qwen2_5_vl": _Family(_grouped_query, _dense),
    "qwen2_5_vl_text": _Family(_grouped_query, _dense),
    "qwen3": _Family(_grouped_query, _dense),
    "qwen3_vl_text": _Family(_grouped_query, _dense),
    "gemma3": _Family(_gemma3, _dense, tied=True),
    "gemma3_text": _Family(_gemma3, _dense, tied=True),
    "mixtral": _Family(_grouped_query, _experts_everywhere),
    "qwen3_moe": _Family(_grouped_query, _experts_by_step),
    "qwen3_vl_moe_text": _Family(_grouped_query, _experts_by_step),
    "glm4_moe": _Family(_grouped_query, _experts_after_dense),
    "gpt_oss": _Family(_grouped_query, _experts_everywhere),
    "minimax_m2": _Family(_grouped_query, _experts_everywhere),
    "deepseek_v2": _Family(_latent, _experts_after_dense),
    "deepseek_v3": _Family(_latent, _experts_after_dense),
    "deepseek_v32": _Family(_latent, _experts_after_dense),
    "glm_moe_dsa": _Family(_latent, _experts_after_dense),
    "kimi_k2": _Family(_latent, _experts_after_dense),
}

#: Families with Mamba or linear-attention layers.
_STATE_FAMILIES = frozenset(
    (
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "minimax_text_01",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zamba",
        "zamba2",
    )
)
