"""What a model's ``config.json`` says, as its publisher wrote it and vLLM reads it.

Keys are those of the files on model hubs.  Which of them a family of models uses is said in
``families``; keys that say nothing of size are passed over.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.model.catalog.layers import Count, CountOrZero

T = TypeVar("T")

#: Bytes of a number of each type that checkpoints are published in.
VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_MXFP4_BYTES = 0.53125
"""4 bits and a byte of scale per 32 values."""

FULL_LAYER = "full_attention"
WINDOW_LAYER = "sliding_attention"
#: DeepSeek's sparse attention keeps every token's KV, as full attention does.
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
        ``ConfigError`` for layers that are neither, and for a window whose layers are not named.
        """
        if self.layer_types is not None:
            return self._listed_window_layers(self.layer_types)
        pattern = self.sliding_window_pattern or default_pattern
        if pattern and self.sliding_window:
            return self.num_hidden_layers - self.num_hidden_layers // pattern
        if self.sliding_window and self.use_sliding_window:
            raise ConfigError(
                f"use_sliding_window is true, but no layer_types say which layers have the window "
                f"of {self.sliding_window}; add layer_types"
            )
        # Qwen gives a window that it does not use unless use_sliding_window says so.
        if self.sliding_window and self.use_sliding_window is None and not self._is_qwen:
            return self.num_hidden_layers
        return 0

    @property
    def _is_qwen(self) -> bool:
        return self.model_type.startswith("qwen")

    @property
    def leading_dense_layers(self) -> int:
        """Layers without experts of a model that has them first, by either key.

        Raises ``ConfigError`` where the keys say something else of some layer.
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


#: Why such models are refused.
STATE_LAYERS = (
    "only full and sliding-window attention keep KV per token; layers with a state keep one per "
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

    Raises ``ConfigError``, or msgspec's errors for what is no such file.
    """
    document = msgspec.json.decode(content, type=dict[str, Any])
    text = document.get("text_config")
    if isinstance(text, dict):
        outer = {key: document[key] for key in _OUTER_KEYS if key in document}
        document = {**outer, **text}
    return msgspec.convert(document, HubConfig)


#: Keys that multi-modal models give beside their text model.
_OUTER_KEYS = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings", "model_type")
