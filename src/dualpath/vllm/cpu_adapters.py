"""Mends vLLM's LoRA kernels for CPUs, with which requests without an adapter would get one.

vLLM 0.32 numbers the adapters of a batch's tokens, -1 for none.  Its kernels for GPUs skip those;
the ones in PyTorch take -1 for an index, which is the last adapter in memory.  A request for the
base model would so be answered, and stored, with the KV of another.  The functions that add an
adapter's output are wrapped to add nothing there; on kernels that are right this changes nothing.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from vllm.platforms import current_platform

#: Where the functions are called from.
_CALLERS = ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu")
_EXPANDS = ("bgmv_expand", "bgmv_expand_slice")


def mend_cpu_adapters() -> None:
    """Let tokens without an adapter get none, in this process; idempotent."""
    if current_platform.device_type != "cpu":
        return
    for module in map(import_module, _CALLERS):
        for name in _EXPANDS:
            original = getattr(module, name)
            if not hasattr(original, "__wrapped__"):
                setattr(module, name, without_strangers(original))


def without_strangers(expand: Callable[..., None]) -> Callable[..., None]:
    """Return ``expand`` with inputs of 0 for tokens whose index is -1."""

    def mended(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *rest: Any,  # noqa: ANN401 - vLLM's own
    ) -> None:
        expand(inputs.masked_fill((indices < 0).unsqueeze(1), 0), weights, output, indices, *rest)

    mended.__wrapped__ = expand  # type: ignore[attr-defined]
    return mended
