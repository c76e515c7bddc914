"""Patches vLLM's LoRA kernels for CPUs, which apply an adapter to requests that have none.

vLLM 0.32 gives each token of a batch the index of its adapter, -1 for none.  The GPU kernels skip
-1; the PyTorch kernels for CPUs use it as an index, which selects the last adapter in memory.  A
request for the base model would then be answered with that adapter, and its KV stored as the base
model's.  The functions that add an adapter's output are wrapped to add 0 for these tokens; correct
kernels are not affected.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.platforms import current_platform

from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# --------------------------------------------------------------------------------------- cpu tiles
# Enables AMX for vLLM's CPU kernels before an engine's first pass.
#
# Linux grants the AMX tile registers to a process on request; without it, a tile instruction ends
# the process with SIGILL.  vLLM 0.32 does not request them; oneDNN does at its first matrix
# product.  A plain engine's first pass is a prompt: its products go through oneDNN before its
# attention.  A DE's first pass may be one token: its small products do not go through oneDNN, and
# the attention after them would end the process.

log = logging.getLogger(__name__)


def enable_amx_tiles(device: torch.device) -> None:
    """Request the tile registers if ``device`` is a CPU that has them; idempotent.

    If Linux refuses them, a warning is logged and no error raised: only some dtypes need tiles.
    """
    if device.type != "cpu" or not torch.cpu._is_amx_tile_supported():
        return
    if not torch.cpu._init_amx():
        log.warning(
            "this CPU has AMX, but the operating system does not grant its tile registers; if the "
            "engine ends with SIGILL, start it with --dtype float32"
        )


# -------------------------------------------------------------------------------- sparse attention
# Adds calls of the connector to sparse attention layers, for which vLLM makes none.
#
# vLLM calls a connector in the operators of ``Attention`` and ``MLAAttention``.  The layers of
# DeepseekV32ForCausalLM and GlmMoeDsaForCausalLM override ``forward`` and bypass these operators: a
# prefill engine would compute with invalid KV.  One function of such a layer reads all earlier KV,
# both indexer keys and latent KV, so vLLM's own decorator for operators is applied to that
# function. New KV is written before it, as in any layer.  Both parts of the layer are awaited
# before the first is read, so that a load overlaps with all of the layer before it.
#
# The class for AMD GPUs is derived from that one, but its ``forward`` calls another function, which
# also writes new KV.  It is refused, because it has not been tested with dualpath.

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
                f"{name} is a {kind.__module__}.{kind.__qualname__}: its attention does not call "
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


#: Modules that call the functions.
_CALLERS = ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu")
_EXPANDS = ("bgmv_expand", "bgmv_expand_slice")


def patch_cpu_lora_kernels() -> None:
    """Patch the kernels of this process so that tokens without an adapter get none; idempotent."""
    if current_platform.device_type != "cpu":
        return
    for module in map(import_module, _CALLERS):
        for name in _EXPANDS:
            original = getattr(module, name)
            if not hasattr(original, "__wrapped__"):
                setattr(module, name, skip_missing_adapters(original))


def skip_missing_adapters(expand: Callable[..., None]) -> Callable[..., None]:
    """Return ``expand`` with inputs of 0 for tokens of index -1."""

    def patched(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *rest: Any,  # noqa: ANN401 - vLLM's own
    ) -> None:
        expand(inputs.masked_fill((indices < 0).unsqueeze(1), 0), weights, output, indices, *rest)

    patched.__wrapped__ = expand  # type: ignore[attr-defined]
    return patched
