"""From the arguments of `dualpath emulate`, environment and file to settings."""

import argparse
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from dualpath.cli.configuration import (
    EMULATED,
    ENGINE,
    MIB,
    ROUTER,
    ROUTER_FLAGS,
    Configuration,
    Flag,
    configuration,
    from_arguments,
    scaled,
)
from dualpath.cli.nixl_arguments import nixl_engine_config
from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from dualpath.core.blocks import BlockGeometry
    from dualpath.laboratory.emulated.settings import EmulatedOptions, EmulatedSettings
    from dualpath.model.sim.settings import ModelCosts
    from dualpath.router.settings import RouterSettings

_HTTP_FLAGS = (Flag("host", EMULATED, "host"), Flag("port", EMULATED, "port"))

_ROUTER_FLAGS = (*_HTTP_FLAGS, *ROUTER_FLAGS)

_ENGINE_FLAGS = (
    *_HTTP_FLAGS,
    Flag("role", ENGINE, "role", positional=True),
    Flag("control", ENGINE, "router"),
    Flag("cluster_secret_file", ENGINE, "cluster_secret_file"),
    Flag("mode", ENGINE, "mode"),
    Flag("api_url", ENGINE, "api_url"),
    Flag("storage", ENGINE, "storage"),
    Flag("node", ENGINE, "node"),
    Flag("group", ENGINE, "group"),
    Flag("buffer_mib", ENGINE, "buffer_bytes", scaled(MIB)),
    Flag("layer_buffers", ENGINE, "layer_buffers"),
    Flag("compute_quota_s", ENGINE, "compute_quota_s"),
    Flag("snic_mb_per_s", ENGINE, "snic_bytes_per_s", scaled(1e6)),
    Flag("ucx_tls", ENGINE, "ucx_tls"),
    Flag("progress_delay_us", ENGINE, "progress_delay_us"),
    Flag("trace_out", ENGINE, "trace_out"),
    Flag("model", EMULATED, "model"),
    Flag("gpu", EMULATED, "gpu"),
    Flag("layers", EMULATED, "layers"),
    Flag("kv_bytes_per_token", EMULATED, "kv_bytes_per_token"),
    Flag("block_size", EMULATED, "block_tokens"),
    Flag("speedup", EMULATED, "speedup"),
    Flag("hbm_mib", EMULATED, "hbm_bytes", scaled(MIB)),
    Flag("batch_cap_tokens", EMULATED, "batch_cap_tokens"),
    Flag("verify", EMULATED, "verify", lambda verify: None if verify == "auto" else verify),
    Flag("vocab_size", EMULATED, "vocab_size"),
    Flag("max_model_len", EMULATED, "max_model_len"),
)


def layers(args: argparse.Namespace) -> Configuration:
    """Return what flags, environment and file say; raises ``ConfigError``."""
    if args.role == ROUTER:
        host, port = _control_address(args.control)
        control = (("control_host", host), ("control_port", port))
        given = [from_arguments(args, ("control",), ROUTER, key, value) for key, value in control]
        return configuration(args, _ROUTER_FLAGS, given)
    name = args.engine_id or f"{args.role}-{os.getpid()}"
    config = nixl_engine_config(args)
    nixl = ("kv_ports", "nixl_engine_config")
    given = [
        from_arguments(args, ("engine_id",), ENGINE, "engine_id", name),
        from_arguments(args, nixl, ENGINE, "nixl_engine_config", config),
    ]
    return configuration(args, _ENGINE_FLAGS, given)


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return the same after the settings were made of them."""
    if args.role == ROUTER:
        router_settings(args)
    else:
        emulated_settings(args)
    return layers(args)


def http_address(args: argparse.Namespace) -> tuple[str, int]:
    """Return host and port of the HTTP server; raises ``ConfigError``."""
    from dualpath.laboratory.emulated.settings import EmulatedOptions

    options = layers(args).settings(EMULATED, EmulatedOptions)
    return options.host, options.port


def router_settings(args: argparse.Namespace) -> "RouterSettings":
    """Return the router's settings; raises ``ConfigError``."""
    from dualpath.router.settings import RouterSettings

    return layers(args).settings(ROUTER, RouterSettings)


def emulated_settings(args: argparse.Namespace) -> "EmulatedSettings":
    """Return an engine's settings; raises ``ConfigError``."""
    from dualpath.engine.settings import EngineSettings
    from dualpath.laboratory.emulated.settings import EmulatedOptions, EmulatedSettings
    from dualpath.model.catalog.costs import single_engine_costs

    found = layers(args)
    engine = found.settings(ENGINE, EngineSettings)
    options = found.settings(EMULATED, EmulatedOptions)
    if not options.model:
        raise ConfigError(
            f"--model is missing; a {args.role} engine needs it, as a flag, as "
            "DUALPATH_EMULATED_MODEL or as model in [emulated] of a --config file"
        )
    costs = single_engine_costs(options.model, options.gpu)
    settings = EmulatedSettings(
        engine=engine,
        geometry=_geometry(options, costs),
        costs=costs,
        host=options.host,
        port=options.port,
        speedup=options.speedup,
        hbm_bytes=options.hbm_bytes,
        batch_cap_tokens=options.batch_cap_tokens,
        verify=options.verify,
        vocab_size=options.vocab_size,
    )
    context_limit = options.max_model_len or costs.context_limit_tokens
    if context_limit is not None:
        settings = msgspec.structs.replace(settings, max_model_len=context_limit)
    return settings.checked()


def _control_address(address: str) -> tuple[str, int]:
    try:
        control = urlsplit(address)
        port = control.port
    except ValueError:  # a port that is no number
        port = None
    if port is None or control.scheme != "tcp" or not control.hostname:
        raise ConfigError(f"--control {address!r}: use the form tcp://host:port")
    return control.hostname, port


def _geometry(options: "EmulatedOptions", costs: "ModelCosts") -> "BlockGeometry":
    from dualpath.laboratory.emulated.settings import block_geometry

    layers, kv_bytes = options.layers, options.kv_bytes_per_token
    return block_geometry(
        costs.layers if layers is None else layers,
        options.block_tokens,
        costs.kv_bytes_per_token if kv_bytes is None else kv_bytes,
    )
