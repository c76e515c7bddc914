"""Replaces the GPU below vLLM's and dualpath's code in this process.

``install`` changes modules when they are imported: torch's "cuda" tensors are CPU tensors, NVML has
one card, Triton's kernels run in its interpreter, and the few kernels of vLLM's libraries that a
dense model needs are written in torch.  What is above them is the code that runs on GPUs.

Streams and events are those of ``cuda_driver``.  CUDA graphs, times and memory limits are not
emulated.
"""

import contextlib
import importlib.abc
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from dualpath_lab.gpu.emulation import cuda_driver

#: Modules and objects of torch, vLLM and NVML.
Untyped = Any
NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
_GPU_BYTES = 80 << 30
#: Libraries of vLLM that need CUDA's; their operations are in ``_kernels`` and ``_attention``.
_LIBRARIES = (
    "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C",
)  # fmt: skip
#: A library without which vLLM works.
_ABSENT = "vllm.cumem_allocator"

# -------------------------------------------------------------------------------------------- NVML


def _nvml(module: Untyped) -> None:
    memory = SimpleNamespace(total=_GPU_BYTES, free=_GPU_BYTES, used=0)
    answers: dict[str, object] = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetName": NAME,
        "nvmlDeviceGetCudaComputeCapability": CAPABILITY, "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUUID": "GPU-0", "nvmlDeviceGetHandleByIndex": 0,
        "nvmlSystemGetDriverVersion": "580.0", "nvmlDeviceGetP2PStatus": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(module, name, _returning(answer))


def _returning(answer: object) -> Callable[..., object]:
    return lambda *arguments, **options: answer


# ------------------------------------------------------------------------------------------- torch


def _torch(torch: Untyped) -> None:
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Untyped) -> Untyped:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return "cpu" if isinstance(value, str) and value.startswith("cuda") else value

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]
        """Makes tensors of "cuda" on the CPU."""

        def __torch_function__(
            self,
            function: Untyped,
            types: object,
            args: Sequence[Untyped] = (),
            kwargs: Untyped = None,
        ) -> Untyped:
            options = dict(kwargs or {})
            if "device" in options:
                options["device"] = on_cpu(options["device"])
            options.pop("pin_memory", None)
            match getattr(function, "__name__", ""):
                case "to":
                    args = [on_cpu(value) for value in args]
                case "cuda" | "pin_memory":
                    return args[0]
                case "is_pinned":
                    return True
                case "record_stream":
                    return None
            return function(*args, **options)

    _torch_cuda(torch)
    torch.Stream, torch.Event = cuda_driver.Stream, cuda_driver.Event
    original = torch.Generator

    class Generator(original):  # type: ignore[misc,valid-type]
        """A generator of the CPU."""

        def __new__(cls, device: object = "cpu") -> Untyped:
            return original.__new__(cls, device="cpu")

    torch.Generator = Generator
    OnCpu().__enter__()
    run = threading.Thread.run

    def run_on_cpu(self: threading.Thread) -> None:
        with OnCpu():  # A mode is one thread's.
            run(self)

    threading.Thread.run = run_on_cpu  # type: ignore[method-assign]


def _torch_cuda(torch: Untyped) -> None:
    properties = SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=_GPU_BYTES,
        multi_processor_count=132, warp_size=32, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, gcnArchName="", is_integrated=False, L2_cache_size=50 << 20,
        uuid="GPU-0", shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        pci_domain_id=0, pci_bus_id=1, pci_device_id=0,
    )  # fmt: skip
    stream = cuda_driver.DEFAULT_STREAM
    device = torch.device("cuda", 0)
    memory = (_GPU_BYTES, _GPU_BYTES)
    statistics = {
        f"{kind}_bytes.all.{which}": 0
        for kind in ("allocated", "reserved", "active")
        for which in ("peak", "current")
    }
    answers: dict[str, object] = {
        "is_available": True,
        "device_count": 1, "_device_count_nvml": 1, "_lazy_init": None, "init": None,
        "is_initialized": False, "current_device": 0, "get_device_properties": properties,
        "get_device_capability": CAPABILITY, "get_device_name": NAME,
        "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None,
        "mem_get_info": memory, "memory_stats": statistics, "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "is_current_stream_capturing": False, "manual_seed_all": None, "manual_seed": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _returning(answer))
    torch.cuda.memory.get_allocator_backend = _returning("cudaMallocAsync")
    for name, call in cuda_driver.torch_cuda().items():
        setattr(torch.cuda, name, call)
    torch.cuda.stream = torch.cuda.set_stream = _computing
    accelerator = {
        "set_device_index": None, "set_device_idx": None, "set_stream": None, "device_count": 1,
        "current_device_index": 0, "is_available": True, "current_stream": stream,
        "memory_stats": statistics, "get_memory_info": memory, "current_accelerator": device,
        "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None,
        "empty_host_cache": None, "memory_allocated": 0, "max_memory_allocated": 0,
        "memory_reserved": 0, "max_memory_reserved": 0,
    }  # fmt: skip
    for name, answer in accelerator.items():
        setattr(torch.accelerator, name, _returning(answer))
    torch.accelerator.device_index = lambda _: contextlib.nullcontext()


def _computing(stream: cuda_driver.Stream | None = None) -> contextlib.nullcontext[None]:
    """Make a stream one in which torch computes."""
    if stream is not None:
        stream.computes = True
    return contextlib.nullcontext()


# ------------------------------------------------------------------------------------------ kernels

_libraries: list[object] = []
#: Questions whether a kernel of quantised models is there; it is not.
_SUPPORTS = (
    "cutlass_scaled_mm_supports_fp4", "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported",
    "mxfp4_experts_quant_supported",
)  # fmt: skip
_SCHEMAS = {
    "_C": (
        "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
        "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
        "silu_and_mul(Tensor! result, Tensor input) -> ()",
        "rotary_embedding(Tensor positions, Tensor! query, Tensor(a!)? key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
    ),
    "_C_cache_ops": (
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, "
        "Tensor! value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, "
        "Tensor v_scale) -> ()",
    ),
}


def _kernels() -> None:
    """Define the operations of vLLM's libraries that a dense model needs."""
    import torch

    def normal(values: Untyped, weight: Untyped, epsilon: float) -> Untyped:
        wide = values.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return (wide if weight is None else wide * weight.float()).to(values.dtype)

    def rms_norm(result: Untyped, values: Untyped, weight: Untyped, epsilon: float) -> None:
        result.copy_(normal(values, weight, epsilon))

    def fused_add_rms_norm(
        values: Untyped, residual: Untyped, weight: Untyped, epsilon: float
    ) -> None:
        residual.add_(values)
        values.copy_(normal(residual, weight, epsilon))

    def silu_and_mul(result: Untyped, values: Untyped) -> None:
        gate, up = values.float().chunk(2, -1)
        result.copy_((torch.nn.functional.silu(gate) * up).to(result.dtype))

    def rotary_embedding(
        positions: Untyped,
        query: Untyped,
        key: Untyped,
        head_values: int,
        cache: Untyped,
        neox: bool,
        *offsets: object,
    ) -> None:
        assert neox, "only rotation of halves is written here"
        cosine, sine = (part[:, None] for part in cache[positions.flatten()].float().chunk(2, -1))
        half = cosine.shape[-1]
        for tensor in (query, key):
            if tensor is None:
                continue
            heads = tensor.view(positions.numel(), -1, head_values)
            one, two = heads[..., :half].float(), heads[..., half : 2 * half].float()
            heads[..., :half] = (one * cosine - two * sine).to(tensor.dtype)
            heads[..., half : 2 * half] = (two * cosine + one * sine).to(tensor.dtype)

    def reshape_and_cache_flash(
        key: Untyped,
        value: Untyped,
        key_cache: Untyped,
        value_cache: Untyped,
        slots: Untyped,
        *scales: object,
    ) -> None:
        used, block_tokens = slots >= 0, key_cache.shape[1]
        block, place = slots[used] // block_tokens, slots[used] % block_tokens
        key_cache[block, place] = key[: len(slots)][used]
        value_cache[block, place] = value[: len(slots)][used]

    written = {
        one.__name__: one
        for one in (
            rms_norm,
            fused_add_rms_norm,
            silu_and_mul,
            rotary_embedding,
            reshape_and_cache_flash,
        )
    }
    for namespace, schemas in _SCHEMAS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for schema in schemas:
            library.define(schema)
            name = schema.partition("(")[0]
            library.impl(name, written[name], "CPU")
        _libraries.append(library)
    for name in _SUPPORTS:
        library = torch.library.Library("_C", "FRAGMENT")
        library.define(f"{name}(int cuda_device_capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
        _libraries.append(library)


def _attention(module: Untyped) -> None:
    """Replace FlashAttention with one that is written in torch."""
    import torch

    def flash_attn_varlen_func(
        q: Untyped,
        k: Untyped,
        v: Untyped,
        *,
        cu_seqlens_q: Untyped,
        block_table: Untyped = None,
        seqused_k: Untyped = None,
        cu_seqlens_k: Untyped = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        out: Untyped = None,
        **options: object,
    ) -> Untyped:
        result = torch.empty_like(q) if out is None else out
        starts = cu_seqlens_q.tolist()
        for row, (first, end) in enumerate(itertools.pairwise(starts)):
            if first == end:
                continue
            if block_table is None:
                key, value = (t[cu_seqlens_k[row] : cu_seqlens_k[row + 1]] for t in (k, v))
            else:
                tokens = int(seqused_k[row])
                blocks = block_table[row, : -(-tokens // k.shape[1])].long()
                key, value = (t[blocks].flatten(0, 1)[:tokens] for t in (k, v))
            queries, keys = end - first, len(key)
            group = q.shape[1] // key.shape[1]
            one = q[first:end].float().transpose(0, 1)
            two, three = (
                t.float().transpose(0, 1).repeat_interleave(group, 0) for t in (key, value)
            )
            scores = one @ two.transpose(1, 2) * (softmax_scale or q.shape[-1] ** -0.5)
            if causal:
                last = torch.arange(queries)[:, None] + keys - queries
                scores = scores.masked_fill(torch.arange(keys)[None] > last, float("-inf"))
            result[first:end] = (scores.softmax(-1) @ three).transpose(0, 1).to(result.dtype)
        return result

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.get_scheduler_metadata = _returning(None)
    module.is_fa_version_supported = lambda version, device=None: version == 3
    module.fa_version_unsupported_reason = _returning(None)


# --------------------------------------------------------------------------------------------- vLLM


def _platform(module: Untyped) -> None:
    for name in ("CudaPlatformBase", "NvmlCudaPlatform"):
        platform = getattr(module, name)
        platform.dist_backend, platform.dispatch_key = "gloo", "CPU"


def _parallel(module: Untyped) -> None:
    original = module.init_distributed_environment

    def init_distributed_environment(*arguments: Untyped, **options: Untyped) -> Untyped:
        return original(*arguments[:4], **{**options, "backend": "gloo"})

    module.init_distributed_environment = init_distributed_environment


def _views(module: Untyped) -> None:
    module.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor


def _dualpath(module: Untyped) -> None:
    """Open dualpath's CUDA device though the tensors of KV are on the CPU."""
    import torch

    original, gpu = module.open_device, torch.device("cuda", 0)
    module.open_device = lambda device, device_copies: original(gpu, device_copies)


def _warm_up(module: Untyped) -> None:
    """Leave out the warm-up of kernels, which imports torchvision for models with images."""
    module.kernel_warmup = _returning(None)


_CHANGES: dict[str, Callable[[Untyped], None]] = {
    "torch": _torch,
    "pynvml": _nvml,
    "vllm.third_party.pynvml": _nvml,
    "vllm.platforms.cuda": _platform,
    "dualpath.vllm.cuda_device": _dualpath,
    "vllm.distributed.parallel_state": _parallel,
    "vllm.model_executor.warmup.kernel_warmup": _warm_up,
    "vllm.utils.torch_utils": _views,
    "vllm.vllm_flash_attn.flash_attn_interface": _attention,
}


class _Changes(importlib.abc.MetaPathFinder):
    """Finds modules as usual, and changes some after their import."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _ABSENT:
            raise ModuleNotFoundError(name)
        if name in self._finding or name not in (*_CHANGES, *_LIBRARIES):
            return None
        if name in _LIBRARIES:
            return importlib.util.spec_from_loader(name, _Library())
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _CHANGES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Library(importlib.abc.Loader):
    """An empty module in place of a library; the first one defines the operations of all."""

    def exec_module(self, module: ModuleType) -> None:
        if not _libraries:
            _kernels()


def install() -> None:
    """Let this process and those that it starts with its environment have an emulated GPU."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.modules["cuda.bindings.driver"] = cuda_driver.driver_module()
    sys.meta_path.insert(0, _Changes())
