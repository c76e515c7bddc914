"""Checks of the vLLM internals that the plugin relies on; `python -m` prints a report.

`dualpath doctor` runs this module as a separate process, because importing vLLM takes seconds and
may crash without an exception.
"""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from dualpath.vllm.engine_arguments import HASH_ALGORITHM

_CORE = "vllm.v1.core"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"


class HookReport(msgspec.Struct, frozen=True):
    """vLLM's version, the device it computes on, and descriptions of the missing hooks."""

    version: str
    device: str
    missing: tuple[str, ...]


def report() -> HookReport:
    """Import vLLM and check every hook; raises ``ImportError`` if vLLM cannot be imported."""
    version = import_module("vllm").__version__
    device = import_module("vllm.platforms").current_platform.device_type
    return HookReport(version=version, device=device, missing=tuple(missing()))


def missing() -> list[str]:
    """Return the names of hooks that this vLLM lacks or that differ from what we use."""
    return [name for name, is_there in HOOKS if not _holds(is_there)]


def _holds(is_there: Callable[[], bool]) -> bool:
    try:
        return is_there()
    except (ImportError, AttributeError):
        return False


def _of(module: str, *names: str) -> Any:  # noqa: ANN401 - any object of vLLM
    found: Any = import_module(module)
    for name in names:
        found = getattr(found, name)
    return found


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _quota_hook() -> bool:
    hook = _of(f"{_CORE}.sched.scheduler", "Scheduler", "_reserve_prefill_lookahead")
    return _parameters(hook) == ["self", "request", "num_computed_tokens", "num_new_tokens"]


def _quota_hook_is_called() -> bool:
    """Whether the hook is called once for running requests and once for waiting ones."""
    source = inspect.getsource(_of(f"{_CORE}.sched.scheduler", "Scheduler", "schedule"))
    running, _, waiting = source.partition("self.waiting")
    calls = "self._reserve_prefill_lookahead("
    return running.count(calls) == waiting.count(calls) == 1


def _connector_functions() -> bool:
    base = f"{_CONNECTOR}.v1.base"
    inherited = {*vars(_of(base, "KVConnectorBase_V1")), *vars(_of(base, "SupportsHMA"))}
    ours = _of("dualpath.vllm.connector", "DualPathConnector")
    own = {name for name, value in vars(ours).items() if callable(value) and name[:2] != "__"}
    return own <= inherited


def _layer_placement() -> bool:
    fields = _of("vllm.v1.kv_cache_interface", "KVCacheTensor", "__dataclass_fields__")
    return {"size", "layers", "layer_stride", "block_stride", "offset"} <= set(fields)


def _worker_functions() -> bool:
    ours = _of("dualpath.vllm.layerwise_worker", "LayerwiseWorker")
    names = (
        *("determine_available_memory", "initialize_from_config", "compile_or_warm_up_model"),
        "get_kv_cache_spec",
    )
    return all(_parameters(getattr(ours.__base__, n)) == _parameters(vars(ours)[n]) for n in names)


def _handmade_passes() -> bool:
    worker = _of("dualpath.vllm.layerwise_worker", "LayerwiseWorker")
    steps = (
        (worker.execute_model, ["self", "scheduler_output"]),
        (
            worker.sample_tokens,
            ["self", "grammar_output"],
        ),
    )
    return all(_parameters(step) == names for step, names in steps) and _handmade_step()


def _handmade_step() -> bool:
    self_profile = import_module("dualpath.vllm.profiling")
    step = self_profile.step_of(cached=16, bsz=48, block_tokens=16)
    return int(step.total_num_scheduled_tokens) == 48


def _block_keys() -> bool:
    from dualpath.core.blocks import CHAIN_SEED

    hashing = _of("vllm.utils.hashing", HASH_ALGORITHM)
    return callable(hashing) and _of(f"{_CORE}.kv_cache_utils", "DEFAULT_NONE_HASH_SEED") == (
        CHAIN_SEED
    )


def _token_route() -> bool:
    module = "vllm.entrypoints.scale_out.token_in_token_out.api_router"
    return any(route.path == "/inference/v1/generate" for route in _of(module, "router").routes)


def _guard_is_outermost() -> bool:
    """Whether middleware of ``--middleware`` is added last, around vLLM's own."""
    register = _of("vllm.entrypoints.serve.middleware.register", "init_entrypoints_middleware")
    *_, last = inspect.getsource(register).split("add_middleware(")
    return last.startswith("imported)")


def _failed_loads_end_requests() -> bool:
    scheduler = _of(f"{_CORE}.sched.scheduler", "Scheduler")
    fails = _of("vllm.config", "KVTransferConfig")().kv_load_failure_policy == "fail"
    return fails and callable(scheduler._handle_failed_recving)


#: Attributes of a layer that determine which tokens it attends to.
_WINDOW_FIELDS = ("sliding_window", "use_mm_prefix")


def _layer_attributes() -> bool:
    layer = _of("vllm.model_executor.layers.attention.attention", "Attention")
    latent = _of("vllm.model_executor.layers.attention.mla_attention", "MLAAttention")
    cache = _of("vllm.config", "CacheConfig")
    kinds = (layer, latent)
    again = _of("vllm.config", "VllmConfig", "num_prefill_lookahead_tokens")
    return (
        isinstance(again, property)
        and callable(cache.get_resolved_kv_cache_layout)
        and all(
            callable(kind.get_attn_backend)
            and "self.kv_cache_dtype = " in inspect.getsource(kind.__init__)
            for kind in kinds
        )
        and all(f"self.{name} = " in inspect.getsource(layer) for name in _WINDOW_FIELDS)
    )


def _sparse_attention() -> bool:
    """Whether DeepSeek-V3.2 can be served; engines of other models do not need this hook."""
    ours = import_module("dualpath.vllm.kernel_patches")
    kind = _of("vllm.models.deepseek_v32.attention", "DeepseekV32Attention")
    return bool(ours.calls_connector(kind) or ours.reads_at_one_place(kind))


def _steps_of_both_runners() -> bool:
    """Whether both model runners begin and end steps: V2 through its own class, V1 by a mixin."""
    second = _of("vllm.v1.worker.gpu.kv_connector", "ActiveKVConnector")
    before, after = (inspect.getsource(f) for f in (second.pre_forward, second.post_forward))
    first = inspect.getsource(
        _of("vllm.v1.worker.kv_connector_model_runner_mixin", "KVConnectorModelRunnerMixin")
    )
    ends = (".wait_for_save()", ".get_transfer_results(", ".build_connector_worker_meta()")
    return all(
        ".bind_connector_metadata(" in begin and all(call in end for call in ends)
        for begin, end in ((before, after), (first, first))
    )


def _kinds_of_caches() -> bool:
    specs = import_module("vllm.v1.kv_cache_interface")
    return "kv_cache_layout" in specs.KVCacheConfig.__dataclass_fields__ and all(
        issubclass(getattr(specs, name), specs.KVCacheSpec)
        for name in ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec")
    )


def _trainers_calls() -> bool:
    """Whether all that a trainer calls passes functions that ``weight_updates`` wraps."""
    core = _of("vllm.v1.engine.core", "EngineCore")
    pool = _of(f"{_CORE}.block_pool", "BlockPool")
    client = inspect.getsource(_of("vllm.v1.engine.async_llm", "AsyncLLM"))
    return (
        _parameters(core.collective_rpc) == ["self", "method", "timeout", "args", "kwargs"]
        and _parameters(core.set_weight_version) == ["self", "weight_version"]
        and _parameters(core.pause_scheduler) == ["self", "mode", "clear_cache"]
        and "self.resume_scheduler()" in inspect.getsource(core.wake_up)
        and "self.pause_scheduler(" in inspect.getsource(core.sleep)
        and callable(core.resume_scheduler)
        and "return self._weight_version" in inspect.getsource(core.get_weight_version)
        and callable(pool.evict_blocks)
        and all(
            f'self.collective_rpc("{call}")' in client
            for call in ("start_weight_update", "finish_weight_update")
        )
    )


def _command_line() -> bool:
    convert = _of("vllm.engine.arg_utils", "EngineArgs", "from_cli_args")
    return _parameters(convert) == ["args"] and callable(
        _of(f"{_CONNECTOR}.factory", "KVConnectorFactory", "register_connector")
    )


HOOKS: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("Scheduler._reserve_prefill_lookahead", _quota_hook),
    ("Scheduler.schedule calls it for running and for waiting requests", _quota_hook_is_called),
    ("KVConnectorBase_V1: functions the connector overrides", _connector_functions),
    ("KVCacheTensor: layers placed by offset and stride", _layer_placement),
    ("Worker: functions the layerwise worker overrides", _worker_functions),
    ("Worker: steps that the engine builds itself to time them", _handmade_passes),
    (f"block keys by {HASH_ALGORITHM} and their root", _block_keys),
    ("route /inference/v1/generate", _token_route),
    ("--middleware is outside vLLM's own", _guard_is_outermost),
    ("requests fail if their KV does not arrive", _failed_loads_end_requests),
    (
        "attention layers expose backend, KV dtype and window, the cache its layout",
        _layer_attributes,
    ),
    ("sparse attention reads all KV of a layer in one function", _sparse_attention),
    ("both model runners begin and end a step at the connector", _steps_of_both_runners),
    ("a KV cache exposes its kind and its layout", _kinds_of_caches),
    ("EngineCore: functions that serve trainers", _trainers_calls),
    ("EngineArgs.from_cli_args and KVConnectorFactory.register_connector", _command_line),
)


if __name__ == "__main__":
    # vLLM logs to standard output; the report is its last line.
    sys.stdout.write("\n" + msgspec.json.encode(report()).decode() + "\n")
