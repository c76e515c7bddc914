"""Patches vLLM's LoRA kernels for CPUs, which apply an adapter to requests that have none.

vLLM 0.32 gives each token of a batch the index of its adapter, -1 for none.  The GPU kernels skip
-1; the PyTorch kernels for CPUs use it as an index, which selects the last adapter in memory.  A
request for the base model would then be answered with that adapter, and its KV stored as the base
model's.  The functions that add an adapter's output are wrapped to add 0 for these tokens; correct
kernels are not affected.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from vllm.platforms import current_platform

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
    """Return ``expand`` with inputs of 0 for tokens whose index is -1."""

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
