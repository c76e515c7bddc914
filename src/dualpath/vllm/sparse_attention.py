"""Calls the connector around sparse attention for which vLLM calls none.

vLLM calls a connector in the operators of ``Attention`` and ``MLAAttention``.  The layers of
DeepseekV32ForCausalLM and GlmMoeDsaForCausalLM have a ``forward`` of their own, which goes past
them: a prefill engine would compute with whatever is in HBM.  One function of such a layer reads
all earlier KV, indexer keys and latent KV alike, so that the decorator with which vLLM marks its
own operators is put around it.  New KV is written before, as in any layer.  Both parts of the layer
are waited for where the first is read, so that a load overlaps with all of the layer before it.

AMD's GPUs have a class derived from that one, whose ``forward`` calls another function, which
writes new KV as well.  It is refused by its name: nothing of dualpath was ever read or run there.
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

#: What computes indexer and attention of a layer, and all that it is given.
READER = "_sparse_indexer_and_attn"
READER_PARAMETERS = (
    *("self", "positions", "q_c", "q_nope", "q_pe", "index_q_fp8", "index_k"),
    *("index_weights_out", "kv_c", "k_pe", "ql_nope", "mqa_q", "output"),
)


def announce_sparse_layers(config: "VllmConfig") -> None:
    """Have the connector called by such layers of a loaded model, in this process; idempotent.

    Before graphs are captured.  Raises ``ConfigError`` for a class of latent attention with a
    ``forward`` of its own that is not as it is known here.
    """
    for name, layer in config.compilation_config.static_forward_context.items():
        kind: Any = type(layer)
        if not issubclass(kind, MLAAttention) or calls_connector(kind):
            continue
        if not reads_at_one_place(kind):
            raise ConfigError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, whose attention goes past "
                f"vLLM's connector in a way that is not known here (known is {READER} of vLLM "
                "0.32's DeepseekV32Attention, on NVIDIA GPUs), so that nobody would know when its "
                "KV is used; serve another model, or this one on NVIDIA GPUs with vLLM 0.32"
            )
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
    if not hasattr(kind, READER):
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
