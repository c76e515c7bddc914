"""On CPUs, tokens without an adapter get the base model's output in every batch."""

import pytest

pytest.importorskip("vllm")

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from dualpath.vllm.kernel_patches import patch_cpu_lora_kernels

#: Adapters with 3 inputs and 4 outputs, and five tokens, two of them without an adapter.
WEIGHTS = torch.ones(2, 1, 4, 3) * torch.tensor([1.0, 10.0])[:, None, None, None]
INDICES = torch.tensor([0, -1, 1, -1, 0])
INPUTS = torch.ones(5, 3)
ADDED = [3.0, 0.0, 30.0, 0.0, 3.0]


@pytest.fixture(autouse=True)
def mended(monkeypatch):
    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_expand", "bgmv_expand_slice"):
            monkeypatch.setattr(module, name, getattr(module, name))
    patch_cpu_lora_kernels()
    patch_cpu_lora_kernels()


@pytest.mark.parametrize("module", [lora_ops, punica_cpu])
def test_nothing_is_added_to_tokens_without_an_adapter(module):
    whole = torch.ones(5, 4)
    module.bgmv_expand(INPUTS, WEIGHTS, whole, INDICES, True)
    assert (whole - 1).tolist() == [[added] * 4 for added in ADDED]

    slices = torch.ones(5, 9)
    module.bgmv_expand_slice(INPUTS, WEIGHTS, slices, INDICES, 5, 4, True)
    assert (slices - 1).tolist() == [[0.0] * 5 + [added] * 4 for added in ADDED]


def test_prompts_are_expanded_by_the_same_functions():
    output = torch.ones(5, 4)
    lengths, adapters = torch.tensor([2, 3]), torch.tensor([1, -1])
    starts = torch.tensor([0, 2])
    lora_ops.sgmv_expand(INPUTS, WEIGHTS, output, starts, lengths, adapters, 2, 3, 5, True)
    assert (output - 1).tolist() == [[30.0] * 4] * 2 + [[0.0] * 4] * 3


def test_vllms_own_functions_still_need_the_patch():
    """If this fails, vLLM's kernels handle such tokens and the patch can be removed."""
    output = torch.ones(5, 4)
    lora_ops.bgmv_expand.__wrapped__(INPUTS, WEIGHTS, output, INDICES, True)
    assert (output[1] - 1).tolist() == [30.0] * 4
