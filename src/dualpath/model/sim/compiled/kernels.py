"""The policy's kernels, made known to numba: compiled code calls them under their own names.

``register_jitable`` leaves the functions as they are for Python.  There is no second version of
any rule.
"""

from numba.extending import register_jitable

from dualpath.core.blocks import holding_blocks
from dualpath.policy.batching import chunk_flops, largest_chunk
from dualpath.policy.decode import assign_decode, choose_group, unfragmented_hbm
from dualpath.policy.prefill import assign_prefill
from dualpath.policy.read_side import (
    choose_by_queue,
    pe_charged_less,
    split_end_s,
    split_head_tokens,
)

__all__ = [
    "KERNELS",
    "assign_decode",
    "assign_prefill",
    "choose_by_queue",
    "choose_group",
    "chunk_flops",
    "largest_chunk",
    "split_head_tokens",
    "unfragmented_hbm",
]

KERNELS = (
    assign_decode,
    assign_prefill,
    choose_by_queue,
    choose_group,
    chunk_flops,
    holding_blocks,
    largest_chunk,
    pe_charged_less,
    split_end_s,
    split_head_tokens,
    unfragmented_hbm,
)

for kernel in KERNELS:
    register_jitable(kernel)
