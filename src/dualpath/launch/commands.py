"""The command lines of router and engines, the same that operators use on other machines."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dualpath.core.addresses import http_url, tcp_endpoint
from dualpath.core.cluster import Role, rank_name
from dualpath.core.modes import Handover
from dualpath.core.settings import arguments
from dualpath.launch.devices import DevicePlan, has_gpu_build
from dualpath.launch.ports import LOOPBACK
from dualpath.launch.settings import CPU_HBM_BYTES, LocalClusterSettings
from dualpath.router.settings import RouterSettings
from dualpath.vllm.engine_arguments import (
    CONNECTOR,
    CONNECTOR_MODULE,
    GUARD_CLASS,
    HASH_ALGORITHM,
    ONE_CACHE_GROUP,
    SCHEDULER_CLASS,
    SHUTDOWN_TIMEOUT_S,
    WORKER_CLASS,
    lora_arguments,
    tls_arguments,
)
from dualpath.vllm.front_end_settings import FrontEndSettings

#: The entry points of router and engine processes, as "module:function".
ROUTER_ENTRY = "dualpath.cli.main:main"
ENGINE_ENTRY = "vllm.entrypoints.launchers.api_server.entry:main"

#: Passed to engines if they are set; otherwise the configuration file may set them.
_STORAGE_LIMITS = (
    "storage_quota",
    "storage_namespace_quota",
    "storage_tenant_quota",
    "storage_ttl",
)

#: Environment of engines on every device.
_EVERY_ENGINE = {"VLLM_NO_USAGE_STATS": "1"}
#: Settings of vLLM's CPU build for small machines: one thread per engine, no pinning of threads to
#: cores, worker and scheduler in one process (otherwise a waiting request spins on a core).
ENGINE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    **_EVERY_ENGINE,
}
#: The share of a GPU's memory that vLLM takes by default, divided among engines of one GPU.
_GPU_MEMORY_SHARE = 0.9


def engine_environment(gpu_build: bool | None = None) -> dict[str, str]:
    """Return the variables that engines get unless the user has set them.

    vLLM's build for GPUs keeps its own threads and processes: the variables for CPUs would take
    cores from the host's part of its passes.  ``gpu_build`` is whether that build is installed.
    """
    with_gpus = has_gpu_build() if gpu_build is None else gpu_build
    return dict(_EVERY_ENGINE if with_gpus else ENGINE_ENVIRONMENT)


class DpRank(NamedTuple):
    """A rank of a data-parallel group of ``size``; the first one is at ``address``."""

    rank: int
    size: int
    rpc_port: int
    address: str = LOOPBACK


def router_command(
    settings: LocalClusterSettings,
    port: int,
    control_port: int,
    standby_lock: str = "",
    cluster_port: int = 0,
) -> list[str]:
    """Return the arguments after ``dualpath``; ports are those of the first unit."""
    router = RouterSettings(
        control_host=settings.control_host,
        control_port=control_port,
        mode=settings.mode,
        alpha_tokens=settings.alpha_tokens,
        beta_tokens=settings.beta_tokens,
        event_log=settings.event_log,
        standby_lock=standby_lock,
        allowed_hosts=settings.allowed_hosts,
        open_metrics=settings.open_metrics,
        dram_tier=settings.dram_tier,
        recompute_limit_s=settings.recompute_limit_s,
        append_at_decode_tokens=settings.append_at_decode_tokens,
        engine_groups=settings.engine_groups,
        handover=settings.handover,
        third_engine_reads=settings.third_engine_reads,
        front_ends=settings.front_ends,
        units=settings.units,
        cluster_port=cluster_port,
    )
    endpoint = FrontEndSettings(
        model=settings.model,
        host=settings.host,
        port=port,
        served_model_names=settings.served_model_names,
        max_model_len=settings.max_model_len,
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        lora_modules=settings.lora_modules,
        # The front end needs vLLM's arguments to parse tool calls and reasoning and to validate.
        vllm_args=("--disable-uvicorn-access-log", *settings.vllm_args),
    )
    file = ["--config", settings.config_file] if settings.config_file else []
    rest = arguments(endpoint, positional=("model",))
    return ["router", rest[0], *arguments(router), *file, *rest[1:]]


def engine_command(
    settings: LocalClusterSettings,
    role: Role,
    index: int,
    port: int,
    control_port: int,
    *,
    host: str = LOOPBACK,
    router_host: str = LOOPBACK,
    dp: DpRank | None = None,
    named_as: Role | None = None,
    on_cpus: bool = True,
) -> list[str]:
    """Return the arguments of vLLM's API server for a PE or DE; the first two name the model.

    ``dp``: the engine is a rank of a data-parallel group, with its own server.

    ``on_cpus``: the settings must give the memory for KV, as vLLM does not find it, and passes are
    eager by default.  Engines that share a GPU (``--devices 0,0``) get equal shares of its memory.
    ``named_as``: the role in the engine's name, if its role has changed since.
    ``host`` is the engine's address and ``router_host`` that of the router's control port; a local
    cluster has both on the loopback address.
    """
    unit = engine_id(named_as or role, index)
    name = rank_id(named_as or role, index, dp.rank, dp.size) if dp is not None else unit
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": engine_extra_config(
            settings,
            role,
            unit,
            name,
            http_url(host, port),
            tcp_endpoint(router_host, control_port),
        ),
    }
    cached_in_hbm = settings.decode_prefix_caching and role is Role.DECODE
    prefix_caching = "--enable-prefix-caching" if cached_in_hbm else "--no-enable-prefix-caching"
    command = [
        "--model", settings.model,
        "--host", host,
        "--port", str(port),
        "--dtype", settings.dtype,
        "--block-size", str(settings.block_tokens),
        "--prefix-caching-hash-algo", HASH_ALGORITHM,
        prefix_caching,
        "--no-async-scheduling",
        "--enable-scale-out",
        "--middleware", GUARD_CLASS,
        "--disable-uvicorn-access-log",
        "--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S),
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    if hbm_bytes := settings.hbm_bytes or (CPU_HBM_BYTES if on_cpus else 0):
        command += ["--kv-cache-memory-bytes", str(hbm_bytes)]
    command += lora_arguments(settings.lora_modules)
    devices = settings.devices_per_rank(role)
    if devices > 1:
        command += ["--tensor-parallel-size", str(devices)]
    if settings.max_model_len:
        command += ["--max-model-len", str(settings.max_model_len)]
    if on_cpus if settings.enforce_eager is None else settings.enforce_eager:
        command.append("--enforce-eager")
    sharers = DevicePlan(settings, settings.devices).sharers(
        named_as or role, index, dp.rank if dp is not None else 0
    )
    if sharers > 1:
        # vLLM refuses to start on a GPU that has less than this share free.
        share = math.floor(100 * _GPU_MEMORY_SHARE / sharers) / 100
        command += ["--gpu-memory-utilization", str(share)]
    if dp is not None:
        command += [
            "--data-parallel-size", str(dp.size),
            "--data-parallel-rank", str(dp.rank),
            "--data-parallel-address", dp.address,
            "--data-parallel-rpc-port", str(dp.rpc_port),
            "--enable-expert-parallel",
        ]  # fmt: skip
    if role is Role.PREFILL:
        command += [ONE_CACHE_GROUP, "--scheduler-cls", SCHEDULER_CLASS]
        if settings.effective_layer_buffers:
            command += ["--worker-cls", WORKER_CLASS]
    # The router's certificate is for its clients; engines of this machine listen on loopback.
    return [*command, *tls_arguments(settings.vllm_args).rest]


class Commands(NamedTuple):
    """Entry points ("module:function") and command lines of a router and its engines.

    ``router`` has the signature of ``router_command``, ``engine`` that of ``engine_command``.
    """

    router_entry: str
    router: Callable[..., list[str]]
    engine_entry: str
    engine: Callable[..., list[str]]


VLLM = Commands(ROUTER_ENTRY, router_command, ENGINE_ENTRY, engine_command)


def router_keys(settings: LocalClusterSettings) -> frozenset[str]:
    """Return keys of ``RouterSettings`` set by ``router_command``, overriding a file."""
    keys = {"control_host", "control_port", "mode", "cluster_secret_file", "api_keys"}
    keys |= {"front_ends", "units", "cluster_port"}
    given = ("allowed_hosts", "open_metrics", "alpha_tokens", "beta_tokens", "event_log")
    lock = {"standby_lock", "standby_lease"} if settings.standby else set()
    tier = set() if settings.dram_tier else {"dram_tier"}
    return frozenset(keys | lock | tier | {key for key in given if getattr(settings, key)})


def engine_keys(settings: LocalClusterSettings) -> frozenset[str]:
    """Return keys of ``EngineSettings`` set by ``engine_command``, overriding a file."""
    roles = (Role.PREFILL, Role.DECODE)
    keys = {key for role in roles for key in engine_extra_config(settings, role, "", "", "", "")}
    return frozenset(keys | {"cluster_secret_file"})


def engine_id(role: Role, index: int) -> str:
    """Return an engine's name: pe-0, de-0 and so on."""
    return f"{'pe' if role is Role.PREFILL else 'de'}-{index}"


def rank_id(role: Role, index: int, rank: int, size: int) -> str:
    """Return the name of a rank of a group (pe-0-dp1), or the engine's name without a group."""
    return rank_name(engine_id(role, index), rank, size)


def engine_extra_config(
    settings: LocalClusterSettings,
    role: Role,
    unit: str,
    name: str,
    api_url: str,
    router: str,
) -> dict[str, Any]:
    """Return a connector's settings; ``name`` is the rank's name, ``unit`` that of its group."""
    extra: dict[str, Any] = {
        "role": role.value,
        "engine_id": unit,
        "router": router,
        "api_url": api_url,
        "storage": settings.storage,
        "mode": settings.mode.value,
        "buffer_bytes": settings.buffer_bytes,
        "snic_bytes_per_s": settings.snic_bytes_per_s,
    }
    for name_of_amount in (*_STORAGE_LIMITS, "dram_bytes"):
        if value := getattr(settings, name_of_amount):
            extra[name_of_amount] = value
    if settings.dram_dir:
        extra["dram_dir"] = str(Path(settings.dram_dir).absolute())
    if role is Role.PREFILL:
        extra["layer_buffers"] = settings.effective_layer_buffers
        extra["compute_quota_s"] = settings.effective_compute_quota_s
        extra["quota_flops_per_s"] = settings.quota_flops_per_s
        extra["profile"] = settings.profile
    elif settings.handover is not Handover.BUFFER:
        extra["receive_hbm_share"] = settings.receive_hbm_share
    if settings.rollouts:
        extra["rollouts"] = True
    if settings.storage_key_file:
        extra["storage_key_file"] = str(Path(settings.storage_key_file).absolute())
    if settings.storage_protection != "auto":
        extra["storage_protection"] = settings.storage_protection
    if settings.storage_codec != "off":
        extra["storage_codec"] = settings.storage_codec
    if settings.transport != "auto":
        extra["transport"] = settings.transport
    if settings.nixl_engine_config:
        extra["nixl_engine_config"] = settings.nixl_engine_config
    if settings.trace_dir:
        extra["trace_out"] = f"{settings.trace_dir}/{name}.json"
    if settings.config_file:
        extra["config"] = str(Path(settings.config_file).absolute())
    return extra
