"""What a vLLM server needs to be a PE or DE, by name, and how it gets it.

vLLM fixes scheduler and worker class, hash algorithm and routes before it makes a connector.  So a
vLLM plugin (entry point ``dualpath`` of ``vllm.general_plugins``) completes the *parsed command
line* of a server whose ``--kv-transfer-config`` names our connector: arguments that were left out
get the values below, as if they had been typed, and the log says which.  Nothing that was typed is
changed; if it cannot work, the connector refuses it at start.  One function of vLLM is wrapped for
that, ``EngineArgs.from_cli_args``, which every server calls once with its arguments.

Where the plugin is not loaded (``VLLM_PLUGINS`` without it), the connector prints the arguments to
add.  Importing this module does not import vLLM.
"""

import logging
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.engine.settings import EngineSettings, parse_settings
from dualpath.vllm.engine_settings import engine_values

log = logging.getLogger(__name__)

#: The version of vLLM that is installed and on which all tests run.
SUPPORTED_VLLM = "0.32.0"
#: Those on which real engines have answered as plain ones do (docs/reference/versions.md).
TESTED_VLLM = ("0.31.0", SUPPORTED_VLLM)
#: Those that have every hook, by their source; no engine of them has run with the connector.
READ_VLLM = ("0.33.0",)

#: Name of our entry point in ``vllm.general_plugins``.
PLUGIN = "dualpath"

CONNECTOR = "DualPathConnector"
CONNECTOR_MODULE = "dualpath.vllm.connector"
SCHEDULER_CLASS = "dualpath.vllm.quota_scheduler.QuotaScheduler"
WORKER_CLASS = "dualpath.vllm.layerwise_worker.LayerwiseWorker"
GUARD_CLASS = "dualpath.vllm.engine_guard.EngineGuard"

#: The only algorithm of vLLM whose keys all processes agree on (``core.blocks``).
HASH_ALGORITHM = "sha256_cbor"

#: All layers of a model with sliding windows in one group, in which no block is freed before its
#: request ends; kernels still mask what is outside the window.
ONE_CACHE_GROUP = "--disable-hybrid-kv-cache-manager"

#: The router's default ``--block-tokens``; engines and router must agree.
BLOCK_TOKENS = 64
#: How long an engine may take to write queued blocks when it is ended.
SHUTDOWN_TIMEOUT_S = 5

#: Modes in which a PE holds the KV of all layers.
_WHOLE_LAYER_MODES = frozenset(mode.value for mode in Mode if not mode.layerwise)

_ANY_HOST = (None, "", "0.0.0.0", "::")


class EngineArgument(NamedTuple):
    """An argument of vLLM: its name, its value if nobody gave one, ours, and ours as typed.

    Lists are added to.
    """

    name: str
    unset: object
    value: object
    typed: str

    def add_to(self, args: Namespace) -> bool:
        """Set it where nobody did; return whether that was so."""
        given = getattr(args, self.name, self)
        if isinstance(self.value, list) and isinstance(given, list):
            missing = [each for each in self.value if each not in given]
            setattr(args, self.name, [*given, *missing])
            return bool(missing)
        if given != self.unset:
            return False
        setattr(args, self.name, self.value)
        return True


def lora_arguments(modules: Mapping[str, str]) -> list[str]:
    """Return vLLM's arguments for these LoRA adapters, for a router or an engine.

    All stay in memory: one that is loaded again could have changed, and be stored under its
    former digest.
    """
    if not modules:
        return []
    pairs = [f"{name}={path}" for name, path in modules.items()]
    return ["--enable-lora", "--max-cpu-loras", str(len(modules)), "--lora-modules", *pairs]


def engine_arguments(settings: EngineSettings) -> tuple[EngineArgument, ...]:
    """Return what an engine of these settings needs on its command line."""
    both = (
        EngineArgument("enable_scale_out", False, True, "--enable-scale-out"),
        EngineArgument(
            "prefix_caching_hash_algo",
            "sha256",
            HASH_ALGORITHM,
            f"--prefix-caching-hash-algo {HASH_ALGORITHM}",
        ),
        EngineArgument("enable_prefix_caching", None, False, "--no-enable-prefix-caching"),
        EngineArgument("async_scheduling", None, False, "--no-async-scheduling"),
        EngineArgument("block_size", None, BLOCK_TOKENS, f"--block-size {BLOCK_TOKENS}"),
        EngineArgument(
            "shutdown_timeout", 0, SHUTDOWN_TIMEOUT_S, f"--shutdown-timeout {SHUTDOWN_TIMEOUT_S}"
        ),
        EngineArgument("middleware", [], [GUARD_CLASS], f"--middleware {GUARD_CLASS}"),
    )
    if settings.role is Role.DECODE:
        return both
    one_group = EngineArgument("disable_hybrid_kv_cache_manager", None, True, ONE_CACHE_GROUP)
    scheduler = EngineArgument(
        "scheduler_cls", None, SCHEDULER_CLASS, f"--scheduler-cls {SCHEDULER_CLASS}"
    )
    if not settings.layer_buffers and not settings.mode.compute_quota:
        return (*both, one_group, scheduler)
    worker = EngineArgument("worker_cls", "auto", WORKER_CLASS, f"--worker-cls {WORKER_CLASS}")
    return (*both, one_group, scheduler, worker)


def register() -> None:
    """Make the connector known by its name and complete command lines; vLLM calls this.

    vLLM loads plugins in each of its processes, possibly more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    except ValueError:
        return  # done before
    # Only a process that parses a command line has imported it.
    if arguments := sys.modules.get("vllm.engine.arg_utils"):
        _wrap(arguments.EngineArgs)


def _wrap(engine_args: Any) -> None:  # noqa: ANN401 - a class of vLLM
    original = engine_args.from_cli_args.__func__

    def from_cli_args(cls: type, args: Namespace) -> object:
        complete(args)
        return original(cls, args)

    engine_args.from_cli_args = classmethod(from_cli_args)


def complete(args: Namespace) -> list[str]:
    """Fill what the arguments of a DualPath engine leave open; return what was added, as typed.

    Arguments of other servers stay as they are.  Raises ``ConfigError`` for impossible settings.
    """
    transfer = getattr(args, "kv_transfer_config", None)
    if getattr(transfer, "kv_connector", None) != CONNECTOR:
        return []
    _check_server(args)
    extra: MutableMapping[str, Any] = transfer.kv_connector_extra_config  # type: ignore[union-attr]
    added = _identify(extra, args) + _keep_adapters(extra, args)
    settings = parse_settings(engine_values(extra, os.environ))
    for argument in engine_arguments(settings):
        if argument.add_to(args):
            added.append(argument.typed)
    if added:
        join_vllm_logging()
        log.info("engine %s of a DualPath cluster, added: %s", settings.engine_id, " ".join(added))
    return added


def _check_server(args: Namespace) -> None:
    """Raise ``ConfigError`` for a server that is not the one whose middleware is our guard."""
    rust = os.environ.get("VLLM_USE_RUST_FRONTEND", "0")
    unguarded = {
        "--grpc": getattr(args, "grpc", False),
        "--grpc-port": getattr(args, "grpc_port", None) is not None,
        "--headless": getattr(args, "headless", False),
        f"VLLM_USE_RUST_FRONTEND={rust}": rust not in ("", "0"),
    }
    if found := [name for name, there in unguarded.items() if there]:
        raise ConfigError(
            f"{' and '.join(found)}: an engine of a DualPath cluster serves vLLM's HTTP API in "
            "Python, where its guard stands; leave that out"
        )


def _identify(extra: MutableMapping[str, Any], args: Namespace) -> list[str]:
    """Give the engine a name that outlives a restart, and the URL it serves at."""
    given = set(extra)
    values = engine_values(extra, os.environ)
    if "layer_buffers" not in values and values.get("mode") in _WHOLE_LAYER_MODES:
        extra["layer_buffers"] = 0
    host, port = getattr(args, "host", None), getattr(args, "port", None)
    if "api_url" not in values:
        extra["api_url"] = _url(host, port, str(values.get("router", "")))
    if "engine_id" not in values:
        extra["engine_id"] = f"{values.get('role', 'engine')}-{socket.gethostname()}-{port}"
    return [f"{key}={value}" for key, value in extra.items() if key not in given]


def _keep_adapters(extra: MutableMapping[str, Any], args: Namespace) -> list[str]:
    """Tell the engine its LoRA adapters, and let all of them stay in memory."""
    modules = getattr(args, "lora_modules", None) or ()
    if not modules:
        return []
    if any(module.is_3d_lora_weight for module in modules):
        raise ConfigError(
            "an adapter of --lora-modules has is_3d_lora_weight, which no engine of a DualPath "
            "cluster has been tried with; leave it out"
        )
    extra["lora_modules"] = {module.name: module.path for module in modules}
    room = max(len(modules), args.max_loras)
    keeps = EngineArgument("max_cpu_loras", None, room, f"--max-cpu-loras {room}")
    return [keeps.typed] if keeps.add_to(args) else []


def _url(host: str | None, port: int | None, router: str) -> str:
    """Return where the router reaches a server that listens on ``host``."""
    if not port:
        raise ConfigError(
            f"port {port} does not say where the router reaches this engine; give --port, or "
            "api_url in kv_connector_extra_config"
        )
    name = _address_towards(router) if host in _ANY_HOST else str(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _address_towards(router: str) -> str:
    """Return this machine's address on the way to the router; no packet is sent."""
    try:
        parts = urlsplit(router)
        target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
            probe.connect(target[4])
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no way to the router {router!r} ({error}); give router as tcp://host:port, or "
            "api_url, in kv_connector_extra_config"
        ) from error


def join_vllm_logging() -> None:
    """Give the ``dualpath`` logger vLLM's handlers and level; idempotent.

    vLLM has them once its server's arguments are parsed, not when it is imported.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("dualpath")
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level or logging.INFO)
    ours.propagate = False
