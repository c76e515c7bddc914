"""Calls the connector around sparse attention for which vLLM calls none.

vLLM calls a connector in the operators of ``Attention`` and ``MLAAttention``.  The layers of
DeepseekV32ForCausalLM and GlmMoeDsaForCausalLM have a ``forward`` of their own, which goes past
them: a prefill engine would compute with whatever is in HBM.  One function of such a layer reads
all earlier KV, indexer keys and latent KV alike, so that the decorator with which vLLM marks its
own operators is put around it.  New KV is written before, as in any layer.  Both parts of the layer
are waited for where the first is read, so that a load overlaps with all of the layer before it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: What computes indexer and attention of a layer, and all that it is given.
READER = "_sparse_indexer_and_attn"
READER_PARAMETERS = (
    *("self", "positions", "q_c", "q_nope", "q_pe", "index_q_fp8", "index_k"),
    *("index_weights_out", "kv_c", "k_pe", "ql_nope", "mqa_q", "output"),
)


def announce_sparse_layers(config: "VllmConfig") -> None:
    """Have the connector called by such layers of a loaded model, in this process; idempotent.

    Before graphs are captured.  A layer that is not as it is known here is left alone, and then no
    layer around which the connector is called (``calls_connector``).
    """
    for layer in config.compilation_config.static_forward_context.values():
        kind: Any = type(layer)
        if not calls_connector(kind) and reads_at_one_place(kind):
            # vLLM breaks its graphs around this function, and what waits must run outside them.
            reader = announced(inspect.unwrap(getattr(kind, READER)))
            setattr(kind, READER, eager_break_during_capture(reader))
            kind.announced = True  # Also of layers of this class that are made later.


def calls_connector(kind: Any) -> bool:  # noqa: ANN401 - a class of vLLM's
    """Whether layers of this class call the connector before they read KV, and when it is there."""
    if getattr(kind, "announced", False):
        return True
    bases = (Attention, MLAAttention)
    return any(issubclass(kind, base) and kind.forward is base.forward for base in bases)


def announces_whole_layer(kind: type) -> bool:
    """Whether all parts of such a layer are read after the connector was called."""
    return bool(getattr(kind, "announced", False))


def reads_at_one_place(kind: Any) -> bool:  # noqa: ANN401 - a class of vLLM's
    """Whether a class is vLLM's sparse attention as it is known here."""
    if not issubclass(kind, MLAAttention) or not hasattr(kind, READER):
        return False
    parameters = inspect.signature(getattr(kind, READER)).parameters
    calls = inspect.getsource(kind.forward).count(f"self.{READER}(")
    return tuple(parameters) == READER_PARAMETERS and calls == 1


def announced(reader: Callable[..., None]) -> Callable[..., None]:
    """Return a layer's function with the connector called before and after it, by its name."""

    @maybe_transfer_kv_layer
    def hooked(layer_name: str, *arguments: Any) -> None:  # noqa: ANN401 - vLLM's own
        reader(*arguments)

    @functools.wraps(reader)
    def method(layer: MLAAttention, *arguments: Any) -> None:  # noqa: ANN401 - vLLM's own
        hooked(layer.layer_name, layer, *arguments)

    return method
