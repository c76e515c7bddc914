"""Phase `libs`: which libraries load, and vLLM's kernels against torch in float32.

The kernels are checked in both KV layouts of a layer: LBHNC, which dualpath asks for, and LBNHC.
"""

import importlib
from typing import Any

from dualpath.transport.nixl import nixl_package
from dualpath_lab.gpu.results import Check
from dualpath_lab.gpu.settings import gpus

#: Largest relative error of a right kernel in float16.
TOLERANCE = 1e-2
_MODULES = (
    "torch", "vllm", "vllm._custom_ops", "vllm.v1.engine.core",
    "vllm.entrypoints.launchers.api_server.entry", "dualpath.vllm.connector",
)  # fmt: skip
#: What engines import on GPUs only.
_GPU_MODULES = ("triton", "cuda.bindings.driver")
_BLOCKS, _BLOCK_TOKENS, _KV_HEADS, _HEADS, _HEAD_VALUES = 40, 64, 8, 32, 128
_TOKENS, _QUERIES = 1000, 300


def libs(check: Check) -> None:
    """Import the libraries one by one, then check the kernels.

    Raises ``RuntimeError`` if a library or a kernel is wrong; all are tried first.
    """
    with_gpu = bool(gpus(check.settings.devices)) and check.settings.on_gpus
    imports = [_import(name) for name in (*_MODULES, f"{nixl_package()}._api", *_GPU_MODULES)]
    check.put("imports", imports)
    needed = (row for row in imports if with_gpu or row["module"] not in _GPU_MODULES)
    wrong = [row["module"] for row in needed if row["error"]]
    if not with_gpu:
        check.put("kernels", "not checked: they need a GPU")
    else:
        kernels = _Kernels()
        for name in ("rms_norm", "LBHNC", "LBNHC"):
            kernels.check(name)
            check.put("kernels", kernels.rows)
        wrong += [row["kernel"] for row in kernels.rows if not row["right"]]
    if wrong:
        raise RuntimeError(f"wrong or missing: {', '.join(wrong)}")


def _import(name: str) -> dict[str, str]:
    try:
        importlib.import_module(name)
    except Exception as error:  # A library that does not load may raise any error.
        return {"module": name, "error": f"{type(error).__name__}: {error}"[:300]}
    return {"module": name, "error": ""}


class _Kernels:
    """vLLM's kernels compared with torch's in float32; a kernel that raises is wrong."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def check(self, name: str) -> None:
        """Compare one kernel, or cache and attention of one layout."""
        try:
            self._rms_norm() if name == "rms_norm" else self._attention(name)
        except Exception as error:  # The kernels raise errors of torch, vLLM and CUDA.
            self.rows.append({"kernel": name, "right": False, "error": repr(error)[:300]})

    def _compare(self, name: str, found: Any, expected: Any) -> None:  # noqa: ANN401 - tensors
        off = float((found.float() - expected.float()).norm() / expected.float().norm())
        self.rows.append({"kernel": name, "right": off < TOLERANCE, "relative_error": off})

    def _rms_norm(self) -> None:
        import torch
        from vllm import _custom_ops as ops

        values = torch.randn(64, 4096, device="cuda", dtype=torch.float16)
        weight = torch.randn(4096, device="cuda", dtype=torch.float16)
        found = torch.empty_like(values)
        ops.rms_norm(found, values, weight, 1e-5)
        wide = values.float()
        norm = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        self._compare("rms_norm", found, wide * norm * weight.float())

    def _attention(self, layout: str) -> None:
        import torch
        from torch.nn.attention.bias import causal_lower_right
        from vllm import _custom_ops as ops
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        def random(*shape: int) -> Any:  # noqa: ANN401 - a tensor
            return torch.randn(*shape, device="cuda", dtype=torch.float16)

        # K and V of a token and head are adjacent; the layout is the order of heads and tokens.
        inner = (_KV_HEADS, _BLOCK_TOKENS) if layout == "LBHNC" else (_BLOCK_TOKENS, _KV_HEADS)
        memory = torch.zeros(_BLOCKS, *inner, 2 * _HEAD_VALUES, device="cuda", dtype=torch.float16)
        kv = memory.transpose(1, 2) if layout == "LBHNC" else memory
        key_cache, value_cache = kv.split(_HEAD_VALUES, dim=-1)
        key, value = (random(_TOKENS, _KV_HEADS, _HEAD_VALUES) for _ in range(2))
        table = torch.randperm(_BLOCKS, device="cuda")[: -(-_TOKENS // _BLOCK_TOKENS)].int()
        position = torch.arange(_TOKENS, device="cuda")
        slots = table[position // _BLOCK_TOKENS].long() * _BLOCK_TOKENS + position % _BLOCK_TOKENS
        scale = torch.ones(1, device="cuda")
        ops.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", scale, scale)
        stored = key_cache[table.long()].reshape(-1, _KV_HEADS, _HEAD_VALUES)[:_TOKENS]
        self._compare(f"{layout}: cache write", stored, key)
        query = random(_QUERIES, _HEADS, _HEAD_VALUES)
        found = flash_attn_varlen_func(
            q=query,
            k=key_cache,
            v=value_cache,
            max_seqlen_q=_QUERIES,
            cu_seqlens_q=torch.tensor([0, _QUERIES], device="cuda", dtype=torch.int32),
            max_seqlen_k=_TOKENS,
            seqused_k=torch.tensor([_TOKENS], device="cuda", dtype=torch.int32),
            causal=True,
            block_table=table[None],
            softmax_scale=_HEAD_VALUES**-0.5,
        )
        repeated = (part.repeat_interleave(_HEADS // _KV_HEADS, 1) for part in (key, value))
        heads_first = [part.float().transpose(0, 1)[None] for part in (query, *repeated)]
        expected = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=causal_lower_right(_QUERIES, _TOKENS)
        )
        self._compare(f"{layout}: attention", found, expected[0].transpose(0, 1))
