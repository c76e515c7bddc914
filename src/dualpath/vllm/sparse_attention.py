"""Adds calls of the connector to sparse attention layers, for which vLLM makes none.

vLLM calls a connector in the operators of ``Attention`` and ``MLAAttention``.  The layers of
DeepseekV32ForCausalLM and GlmMoeDsaForCausalLM override ``forward`` and bypass these operators: a
prefill engine would compute with invalid KV.  One function of such a layer reads all earlier KV,
both indexer keys and latent KV, so vLLM's own decorator for operators is applied to that function.
New KV is written before it, as in any layer.  Both parts of the layer are awaited before the first
is read, so that a load overlaps with all of the layer before it.

The class for AMD GPUs is derived from that one, but its ``forward`` calls another function, which
also writes new KV.  It is refused, because it has not been tested with dualpath.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: The method that computes indexer and attention of a layer, and its parameters.
READER = "_sparse_indexer_and_attn"
READER_PARAMETERS = (
    *("self", "positions", "q_c", "q_nope", "q_pe", "index_q_fp8", "index_k"),
    *("index_weights_out", "kv_c", "k_pe", "ql_nope", "mqa_q", "output"),
)


def patch_sparse_layers(config: "VllmConfig") -> None:
    """Patch such layers of a loaded model in this process to call the connector; idempotent.

    Must be called before graphs are captured.  Raises ``ConfigError`` for an unknown class of
    latent attention that overrides ``forward``.
    """
    for name, layer in config.compilation_config.static_forward_context.items():
        kind: Any = type(layer)
        if not issubclass(kind, MLAAttention) or calls_connector(kind):
            continue
        if not reads_at_one_place(kind):
            raise ConfigError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, whose attention does not call "
                f"the connector and is unknown (supported is {READER} of vLLM 0.32's "
                "DeepseekV32Attention on NVIDIA GPUs), so it is unknown when its KV is read; serve "
                "another model, or this one on NVIDIA GPUs with vLLM 0.32"
            )
        # vLLM breaks its graphs around this function; the waits must run outside the graphs.
        reader = announced(inspect.unwrap(getattr(kind, READER)))
        setattr(kind, READER, eager_break_during_capture(reader))
        kind.announced = True  # Applies to layers of this class that are created later, too.


def calls_connector(kind: Any) -> bool:  # noqa: ANN401 - a class of vLLM's
    """Whether layers of this class call the connector before they read and after they write KV."""
    if getattr(kind, "announced", False):
        return True
    bases = (Attention, MLAAttention)
    return any(issubclass(kind, base) and kind.forward is base.forward for base in bases)


def calls_connector_first(kind: type) -> bool:
    """Whether the connector is called before any part of such a layer is read."""
    return bool(getattr(kind, "announced", False))


def reads_at_one_place(kind: Any) -> bool:  # noqa: ANN401 - a class of vLLM's
    """Whether a class is vLLM's sparse attention in the form that can be patched."""
    if not hasattr(kind, READER):
        return False
    parameters = inspect.signature(getattr(kind, READER)).parameters
    calls = inspect.getsource(kind.forward).count(f"self.{READER}(")
    return tuple(parameters) == READER_PARAMETERS and calls == 1


def announced(reader: Callable[..., None]) -> Callable[..., None]:
    """Return a layer's method, wrapped to call the connector before and after it."""

    @maybe_transfer_kv_layer
    def hooked(layer_name: str, *arguments: Any) -> None:  # noqa: ANN401 - vLLM's own
        reader(*arguments)

    @functools.wraps(reader)
    def method(layer: MLAAttention, *arguments: Any) -> None:  # noqa: ANN401 - vLLM's own
        hooked(layer.layer_name, layer, *arguments)

    return method
