"""The vLLM arguments that a PE or DE needs, and the plugin that adds them to the command line.

vLLM fixes scheduler class, worker class, hash algorithm and routes before it creates a connector.
So a vLLM plugin (entry point ``dualpath`` of ``vllm.general_plugins``) completes the *parsed
command line* of a server if its ``--kv-transfer-config`` names our connector: arguments that were
left out get the values below, as if they had been typed, and are logged.  Typed arguments are never
changed; if they cannot work, the connector refuses them at start.  For this the plugin wraps one
function of vLLM, ``EngineArgs.from_cli_args``, which every server calls once.

If the plugin is not loaded (``VLLM_PLUGINS`` without it), the connector prints the arguments to
add.  Importing this module does not import vLLM.
"""

import copy
import logging
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.settings import OTHER_VARIABLES, PREFIX, from_environment, from_tables, layered
from dualpath.engine.settings import EngineSettings, parse_settings, read_settings_file
from dualpath.node.home import with_homes
from dualpath.node.log_level import log_level
from dualpath.node.sockets import engine_url
from dualpath.router.api_keys import ApiKeys

# --------------------------------------------------------------------------------- engine settings
# Settings of an engine, from ``kv_connector_extra_config``, the environment and a settings file.
#
# The former override the latter.

SECTION = "engine"
#: Key of ``kv_connector_extra_config`` that names a settings file; only its ``[engine]`` is read.
FILE_KEY = "config"


def engine_settings(extra: Mapping[str, Any], environment: Mapping[str, str]) -> EngineSettings:
    """Return the settings of an engine; raises ``ConfigError`` for unknown or invalid ones."""
    return parse_settings(engine_values(extra, environment))


def engine_values(extra: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return all given settings, from whatever source; raises ``ConfigError``."""
    values = dict(extra)
    file = values.pop(FILE_KEY, "")
    if not isinstance(file, str):
        raise ConfigError(
            f"kv_connector_extra_config: {FILE_KEY} is {file!r}; give the path of a TOML file"
        )
    schema = {SECTION: EngineSettings}
    prefix = f"{PREFIX}{SECTION}_".upper()
    variables = {name: text for name, text in environment.items() if name.startswith(prefix)}
    table = read_settings_file(file).get(SECTION, {}) if file else {}
    outer = layered(
        from_tables(schema, {SECTION: table}, file),
        from_environment(schema, variables, OTHER_VARIABLES),
    )
    found = {given.key: given.value for given in outer.values()} | values
    return with_homes(EngineSettings, found)


log = logging.getLogger(__name__)

#: The version of vLLM that is installed and on which all tests run.
SUPPORTED_VLLM = "0.32.0"
#: Versions on which real engines gave the same answers as plain vLLM (docs/reference/versions.md).
TESTED_VLLM = ("0.31.0", SUPPORTED_VLLM)
#: Versions that have every hook in their source; no engine of these has run with the connector.
READ_VLLM = ("0.33.0",)

#: Name of our entry point in ``vllm.general_plugins``.
PLUGIN = "dualpath"

CONNECTOR = "DualPathConnector"
CONNECTOR_MODULE = "dualpath.vllm.connector"
SCHEDULER_CLASS = "dualpath.vllm.quota_scheduler.QuotaScheduler"
WORKER_CLASS = "dualpath.vllm.layerwise_worker.LayerwiseWorker"
GUARD_CLASS = "dualpath.vllm.engine_guard.EngineGuard"

#: vLLM's only hash algorithm with the same keys in all processes (``core.blocks``).
HASH_ALGORITHM = "sha256_cbor"

#: Puts all layers of a model with sliding windows into one KV cache group: its blocks are freed
#: only when their request ends.  Kernels still mask tokens outside the window.
ONE_CACHE_GROUP = "--disable-hybrid-kv-cache-manager"

#: The router's default ``--block-tokens``; engines and router must agree.
BLOCK_TOKENS = 64
#: After this time vLLM kills an engine core that ends.  It has to be enough for what an engine does
#: when it leaves (``engine.threads.LEAVE_S``) and for vLLM's own end, of which two garbage
#: collections take 3 to 4 s on a busy machine.  Container runtimes kill 10 s after SIGTERM.
SHUTDOWN_TIMEOUT_S = 8

#: Overrides ``--kv-cache-memory-bytes`` in vLLM's CPU build.
KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"

#: Set to 1, it opens vLLM's development routes, those for trainers among them.
TRAINER_ROUTES_VARIABLE = "VLLM_SERVER_DEV_MODE"

#: Modes in which a PE holds the KV of all layers.
_WHOLE_LAYER_MODES = frozenset(mode.value for mode in Mode if not mode.layerwise)


class EngineArgument(NamedTuple):
    """An argument of vLLM: name, vLLM's default, our value, and our value as typed.

    If the value is a list, its elements are added to the given list.
    """

    name: str
    unset: object
    value: object
    typed: str

    def add_to(self, args: Namespace) -> bool:
        """Set the argument if it was not given; return whether it was set."""
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

    All adapters stay in memory: an adapter that is loaded a second time could have changed, and
    its KV would be stored under the former digest.
    """
    if not modules:
        return []
    pairs = [f"{name}={path}" for name, path in modules.items()]
    return ["--enable-lora", "--max-cpu-loras", str(len(modules)), "--lora-modules", *pairs]


class TlsArguments(NamedTuple):
    """vLLM's options of HTTPS among others: the files, and the arguments without these options."""

    certificate_file: str
    key_file: str
    rest: tuple[str, ...]


def tls_arguments(arguments: Sequence[str]) -> TlsArguments:
    """Split vLLM's options of HTTPS from ``arguments``."""
    files, rest, words = {}, [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in ("--enable-ssl-refresh", "--no-enable-ssl-refresh"):
            continue
        if not name.startswith("--ssl-"):
            rest.append(word)
            continue
        files[name] = value if equals else next(words, "")
    return TlsArguments(
        files.get("--ssl-certfile", ""), files.get("--ssl-keyfile", ""), tuple(rest)
    )


def ignore_kv_space_variable(kv_bytes: int | None) -> None:
    """Let KV memory that was given in bytes hold, which a variable overrides in vLLM's CPU build.

    The variable is removed from the environment of this process, with a warning.
    """
    if kv_bytes is not None and os.environ.get(KV_SPACE_VARIABLE):
        space = os.environ.pop(KV_SPACE_VARIABLE)
        log.warning(
            "%s=%s (GiB) of the environment is ignored, because KV memory is given as %d bytes",
            *(KV_SPACE_VARIABLE, space, kv_bytes),
        )


def engine_arguments(settings: EngineSettings) -> tuple[EngineArgument, ...]:
    """Return the arguments that an engine with these settings needs on its command line."""
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
    """Register the connector and wrap ``from_cli_args`` to complete command lines.

    This is the plugin's entry point; vLLM calls it in each of its processes, maybe more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    except ValueError:
        return  # already registered in this process
    # Only a process that parses a command line has imported this module.
    if arguments := sys.modules.get("vllm.engine.arg_utils"):
        _wrap(arguments.EngineArgs)


def _wrap(engine_args: Any) -> None:  # noqa: ANN401 - a class of vLLM
    original = engine_args.from_cli_args.__func__

    def from_cli_args(cls: type, args: Namespace) -> object:
        complete(args)
        return original(cls, args)

    engine_args.from_cli_args = classmethod(from_cli_args)


def complete(args: Namespace) -> list[str]:
    """Add missing arguments of a DualPath engine; return the added ones, as typed.

    The arguments of other servers are not changed.  Raises ``ConfigError`` for invalid settings.
    """
    transfer = getattr(args, "kv_transfer_config", None)
    if getattr(transfer, "kv_connector", None) != CONNECTOR:
        return []
    _check_server(args)
    ignore_kv_space_variable(getattr(args, "kv_cache_memory_bytes", None))
    extra: MutableMapping[str, Any] = transfer.kv_connector_extra_config  # type: ignore[union-attr]
    added = _identify(extra, args) + _add_adapters(extra, args)
    settings = parse_settings(engine_values(extra, os.environ))
    for argument in engine_arguments(settings):
        if argument.add_to(args):
            added.append(argument.typed)
    if settings.rollouts and TRAINER_ROUTES_VARIABLE not in os.environ:
        os.environ[TRAINER_ROUTES_VARIABLE] = "1"
        added.append(f"{TRAINER_ROUTES_VARIABLE}=1")
    if added:
        join_vllm_logging()
        log.info("engine %s of a DualPath cluster: added %s", settings.engine_id, " ".join(added))
    return added


def _check_server(args: Namespace) -> None:
    """Raise ``ConfigError`` for servers without our guard middleware, or with an empty API key."""
    rust = os.environ.get("VLLM_USE_RUST_FRONTEND", "0")
    unguarded = {
        "--grpc": getattr(args, "grpc", False),
        "--grpc-port": getattr(args, "grpc_port", None) is not None,
        "--headless": getattr(args, "headless", False),
        f"VLLM_USE_RUST_FRONTEND={rust}": rust not in ("", "0"),
    }
    if found := [name for name, there in unguarded.items() if there]:
        raise ConfigError(
            f"{' and '.join(found)}: an engine of a DualPath cluster needs vLLM's HTTP server in "
            "Python, which runs the guard middleware; leave this option out"
        )
    ApiKeys(getattr(args, "api_key", None) or ())


def _identify(extra: MutableMapping[str, Any], args: Namespace) -> list[str]:
    """Set defaults for the engine's id, which is the same after a restart, and for its URL."""
    given = set(extra)
    values = engine_values(extra, os.environ)
    if "layer_buffers" not in values and values.get("mode") in _WHOLE_LAYER_MODES:
        extra["layer_buffers"] = 0
    host, port = getattr(args, "host", None), getattr(args, "port", None)
    tls = bool(getattr(args, "ssl_certfile", None))
    if "api_url" not in values:
        extra["api_url"] = _url(host, port, str(values.get("router", "")), tls=tls)
    elif tls and not str(values["api_url"]).startswith("https://"):
        raise ConfigError(
            f"this engine has an --ssl-certfile and its api_url is {values['api_url']!r}; write "
            "https:// there, or leave out one of them"
        )
    if "engine_id" not in values:
        extra["engine_id"] = f"{values.get('role', 'engine')}-{socket.gethostname()}-{port}"
    return [f"{key}={value}" for key, value in extra.items() if key not in given]


def _add_adapters(extra: MutableMapping[str, Any], args: Namespace) -> list[str]:
    """Add the LoRA adapters to the engine's settings, and let all of them stay in memory."""
    modules = getattr(args, "lora_modules", None) or ()
    if not modules:
        return []
    if any(module.is_3d_lora_weight for module in modules):
        raise ConfigError(
            "an adapter of --lora-modules has is_3d_lora_weight, which has not been tested in a "
            "DualPath cluster; leave it out"
        )
    extra["lora_modules"] = {module.name: module.path for module in modules}
    count = max(len(modules), args.max_loras)
    argument = EngineArgument("max_cpu_loras", None, count, f"--max-cpu-loras {count}")
    return [argument.typed] if argument.add_to(args) else []


def _url(host: str | None, port: int | None, router: str, *, tls: bool) -> str:
    """Return the URL at which the router reaches a server that listens on ``host``."""
    if not port:
        raise ConfigError(
            f"port is {port}, so the router cannot reach this engine; give --port, or api_url in "
            "kv_connector_extra_config"
        )
    return engine_url(host or "0.0.0.0", port, router, tls=tls)  # vLLM's default: every address.


def join_vllm_logging() -> None:
    """Give the ``dualpath`` logger vLLM's handlers and level; idempotent.

    A level of ``node.log_level`` in the environment overrides vLLM's.  vLLM sets them when its
    server's arguments are parsed, not when it is imported.  Raises ``ConfigError`` for an unknown
    level.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("dualpath")
    ours.handlers = [copy.copy(handler) for handler in theirs.handlers]
    for handler in ours.handlers:
        handler.setLevel(logging.NOTSET)  # vLLM's drops lines below VLLM_LOGGING_LEVEL
    ours.setLevel(log_level(theirs.level or logging.INFO))
    ours.propagate = False
