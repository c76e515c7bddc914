"""``dualpath emulate``: emulated engines (real data plane, modelled compute) and their router."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from dualpath.cli.scaled_router import FrontEndCommand, run_scaled_router
from dualpath.cli.settings import (
    ENGINE,
    FRONT_END_OF_ROUTER,
    FRONTEND,
    LINK,
    ROUTER,
    Configuration,
    Part,
    add_parts,
    configuration,
)
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import DEFAULT_MODE
from dualpath.core.settings import Given, Origin, arguments
from dualpath_lab.cli import EMULATED

if TYPE_CHECKING:
    from dualpath.core.blocks import BlockGeometry
    from dualpath.launch.commands import Commands
    from dualpath.launch.settings import LocalClusterSettings
    from dualpath.router.settings import LinkSettings, RouterSettings
    from dualpath_lab.emulated.settings import EmulatedOptions, EmulatedSettings
    from dualpath_sim.simulator.settings import ModelCosts

#: The role with which the command starts router and engines.
CLUSTER = "cluster"
#: Modules that the processes of a cluster import once, together.
_PRELOAD = (
    "dualpath_lab.cli.emulate",
    "dualpath_lab.emulated.process",
    "dualpath_lab.emulated.router_server",
)

#: Pause of NIXL's progress thread: it also wakes on events, and many engines share a machine.
PROGRESS_DELAY_US = 5000

_ENGINE_PARTS = (
    Part(EMULATED, "HTTP server, and the model of an engine"),
    Part(
        ENGINE,
        "engine",
        defaults={
            "api_url": "",
            "router": "tcp://127.0.0.1:5700",
            "progress_delay_us": PROGRESS_DELAY_US,
        },
    ),
)
_ROUTER_PARTS = (
    Part(EMULATED, "HTTP server"),
    Part(ROUTER, "router", defaults={"control_port": 5700, "mode": DEFAULT_MODE}),
)
_CLUSTER_PARTS = (*_ENGINE_PARTS, *_ROUTER_PARTS[1:])
_FRONT_END_PARTS = (Part(EMULATED, "HTTP server"), LINK, FRONT_END_OF_ROUTER)

_DESCRIPTION = """Start one emulated engine, a router for emulated engines, a front end of it, or a
cluster: a router and --nodes engines on this machine, all with the same settings.
Everything except the kernels is real: scheduler, storage, buffers, transfers and checksums are
those of a vLLM engine. A forward pass takes the time of the simulator's cost model, and KV bytes
are a function of token prefix and layer, verified at every destination. Needs neither vLLM nor a
model."""
_EPILOG = """\
dualpath emulate cluster --port 8000 --nodes 2P4D --model qwen2.5-32b --storage kv
dualpath emulate router  --port 8000 --control-port 5700
dualpath emulate prefill --model qwen2.5-32b --storage kv --router tcp://127.0.0.1:5700
dualpath emulate decode  --model qwen2.5-32b --storage kv --router tcp://127.0.0.1:5700
dualpath replay trace.jsonl --endpoint http://127.0.0.1:8000
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath emulate`."""
    parser = subparsers.add_parser(
        "emulate",
        help="start an emulated engine, or a router for emulated engines",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("role", choices=[*(role.value for role in Role), ROUTER, FRONTEND, CLUSTER])
    parser.add_argument(
        "--nodes",
        metavar="xPyD",
        help="prefill and decode engines of a cluster, such as 2P4D (default: 1P1D)",
    )
    add_parts(parser, (*_ENGINE_PARTS, *_ROUTER_PARTS, LINK))


def run(args: argparse.Namespace) -> int:
    """Run the process until a signal stops it; returns 0.

    Raises:
        ConfigError: an invalid setting, or an address in use; no process is left running.
    """
    from dualpath.cli.signals import run_served
    from dualpath.node.certificates import serving

    if args.nodes is not None and args.role != CLUSTER:
        raise ConfigError(f"--nodes is of `emulate {CLUSTER}`; leave it out with {args.role}")
    if args.role == CLUSTER:
        _run_cluster(args)
    elif args.role == ROUTER:
        settings = router_settings(args)
        if settings.front_ends:
            certificate, key = certificate_files(args)
            serving(certificate, key)  # raises errors before anything starts
            return run_scaled_router(
                *(settings, *http_address(args), _front_end_command(args)),
                certificate=certificate,
                key=key,
            )

        from dualpath_lab.emulated.router_server import run_emulated_router

        tls = serving(*certificate_files(args))
        run_served(run_emulated_router(settings, *http_address(args), tls))
    elif args.role == FRONTEND:
        settings, link = router_settings(args), link_settings(args)

        from dualpath.router.observe.metrics import share_metrics
        from dualpath_lab.emulated.router_server import run_emulated_front_end

        share_metrics(link.front_end_name)
        tls = serving(*certificate_files(args))
        run_served(run_emulated_front_end(settings, link, *http_address(args), tls))
    else:
        engine_settings = emulated_settings(args)

        from dualpath_lab.emulated.process import run_engine

        run_engine(engine_settings)
    return 0


def _run_cluster(args: argparse.Namespace) -> None:
    """Run a router and its engines until Ctrl-C or SIGTERM; raises ``ConfigError``."""
    from dualpath.cli.signals import sigterm_as_interrupt, watch_until_stopped
    from dualpath.launch.executor import LocalExecutor
    from dualpath.launch.local_cluster import LocalCluster

    def say(text: str) -> None:
        print(f"dualpath: {text}", flush=True)

    settings, commands = cluster_settings(args)
    executor = LocalExecutor(settings, _PRELOAD)
    with sigterm_as_interrupt():
        try:
            with LocalCluster(settings, say, executor, commands) as cluster:
                say(f"endpoint {cluster.endpoint}/v1 (Ctrl-C stops it)")
                watch_until_stopped(cluster, say)
        except KeyboardInterrupt:
            say("stopped")


def cluster_settings(args: argparse.Namespace) -> "tuple[LocalClusterSettings, Commands]":
    """Return the settings and the commands of a cluster; raises ``ConfigError``."""
    from dualpath.engine.settings import EngineSettings
    from dualpath.launch.settings import LocalClusterSettings
    from dualpath.router.settings import RouterSettings
    from dualpath_lab.emulated.commands import emulated_commands
    from dualpath_lab.emulated.settings import EmulatedOptions

    found = layers(args)
    options = found.settings(EMULATED, EmulatedOptions)
    router = found.settings(ROUTER, RouterSettings)
    emulated_settings(args)  # raises errors before anything starts
    engine = found.settings(ENGINE, EngineSettings)
    if options.ssl_certfile or options.dp_size > 1 or router.front_ends:
        raise ConfigError(
            f"`emulate {CLUSTER}` starts one router and engines without groups, with HTTP; leave "
            "out --ssl-certfile, --dp-size and --front-ends, or start the processes one by one"
        )
    settings = LocalClusterSettings(
        nodes=args.nodes or "1P1D",
        model=options.model,
        storage=engine.storage,
        mode=engine.mode,
        host=options.host,
        port=options.port,
        block_tokens=options.block_tokens,
        buffer_bytes=engine.buffer_bytes,
        layer_buffers=engine.layer_buffers,
        compute_quota_s=engine.compute_quota_s,
        transport=engine.transport,
    )
    return settings, emulated_commands(options, router, engine)


def _front_end_command(args: argparse.Namespace) -> FrontEndCommand:
    host, _ = http_address(args)
    certificate, key = certificate_files(args)
    tls = ["--ssl-certfile", certificate, "--ssl-keyfile", key] if certificate else []

    def command(own: "RouterSettings", link: "LinkSettings", port: int) -> list[str]:
        address = ["--host", host, "--port", str(port)]
        return ["emulate", FRONTEND, *address, *tls, *arguments(own), *arguments(link)]

    return command


def layers(args: argparse.Namespace) -> Configuration:
    """Return the settings of flags, environment and file; raises ``ConfigError``."""
    if args.role == ROUTER:
        return configuration(args, _ROUTER_PARTS)
    if args.role == FRONTEND:
        return configuration(args, _FRONT_END_PARTS)
    parts: tuple[Part, ...] = _ENGINE_PARTS
    if args.role == CLUSTER:
        # The commands of a cluster name the role and the name of each engine.
        parts, args = _CLUSTER_PARTS, argparse.Namespace(**{**vars(args), "role": Role.PREFILL})
    name = f"{args.role}-{os.getpid()}"
    return configuration(
        args,
        parts,
        [
            Given(ENGINE, "role", Role(args.role), Origin.FLAG, "ROLE"),
            Given(ENGINE, "engine_id", name, Origin.DEFAULT, ""),
        ],
    )


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return ``layers`` after validating the settings."""
    if args.role == ROUTER:
        router_settings(args)
    elif args.role == FRONTEND:
        router_settings(args)
        link_settings(args)
    elif args.role == CLUSTER:
        cluster_settings(args)
    else:
        emulated_settings(args)
    return layers(args)


def http_address(args: argparse.Namespace) -> tuple[str, int]:
    """Return host and port of the HTTP server; raises ``ConfigError``."""
    from dualpath_lab.emulated.settings import EmulatedOptions

    options = layers(args).settings(EMULATED, EmulatedOptions)
    return options.host, options.port


def certificate_files(args: argparse.Namespace) -> tuple[str, str]:
    """Return the PEM files of the HTTP server's certificate and key; raises ``ConfigError``."""
    from dualpath_lab.emulated.settings import EmulatedOptions

    options = layers(args).settings(EMULATED, EmulatedOptions)
    return options.ssl_certfile, options.ssl_keyfile


def router_settings(args: argparse.Namespace) -> "RouterSettings":
    """Return the router's settings; raises ``ConfigError``."""
    from dualpath.router.settings import RouterSettings

    return layers(args).settings(ROUTER, RouterSettings)


def link_settings(args: argparse.Namespace) -> "LinkSettings":
    """Return a front end's settings; raises ``ConfigError``."""
    from dualpath.router.settings import LinkSettings

    return layers(args).settings(FRONTEND, LinkSettings)


def emulated_settings(args: argparse.Namespace) -> "EmulatedSettings":
    """Return an engine's settings; raises ``ConfigError``."""
    from dualpath.engine.settings import EngineSettings
    from dualpath_lab.emulated.settings import EmulatedOptions, EmulatedSettings
    from dualpath_sim.catalog.costs import single_engine_costs

    found = layers(args)
    engine = found.settings(ENGINE, EngineSettings)
    options = found.settings(EMULATED, EmulatedOptions)
    if not options.model:
        raise ConfigError(
            f"--model is missing; give it for a {args.role} engine as a flag, as "
            "DUALPATH_EMULATED_MODEL or as model in [emulated] of a --config file"
        )
    costs = single_engine_costs(options.model, options.gpu, options.tensor_parallel_size)
    context_limit = options.max_model_len or costs.context_limit_tokens
    bounds: dict[str, Any] = {} if context_limit is None else {"max_model_len": context_limit}
    return EmulatedSettings(
        engine=engine,
        geometry=_geometry(options, costs),
        costs=costs,
        kv_heads=_kv_heads(options),
        host=options.host,
        port=options.port,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        speedup=options.speedup,
        hbm_bytes=options.hbm_bytes,
        batch_cap_tokens=options.batch_cap_tokens,
        verify=options.verify,
        dp_size=options.dp_size,
        dp_rank=options.dp_rank,
        dp_address=options.dp_address,
        tensor_parallel_size=options.tensor_parallel_size,
        vocab_size=options.vocab_size,
        **bounds,
    )


def _geometry(options: "EmulatedOptions", costs: "ModelCosts") -> "BlockGeometry":
    from dualpath_lab.emulated.settings import block_geometry, part_geometry

    layers, kv_bytes = options.layers, options.kv_bytes_per_token
    if options.layer_parts:
        if (layers, kv_bytes) != (None, None):
            raise ConfigError(
                f"{{layer_parts}} is {options.layer_parts!r}, which defines number and size of the "
                "layers; omit {layers} and {kv_bytes_per_token}"
            )
        return part_geometry(options.layer_parts, options.block_tokens)
    return block_geometry(
        costs.layers if layers is None else layers,
        options.block_tokens,
        costs.kv_bytes_per_token if kv_bytes is None else kv_bytes,
        _kv_heads(options),
    )


def _kv_heads(options: "EmulatedOptions") -> int:
    from dualpath_sim.catalog.load import kv_heads

    if options.kv_heads is not None:
        return options.kv_heads
    own_sizes = options.layer_parts or options.layers or options.kv_bytes_per_token
    return 1 if own_sizes else kv_heads(options.model)
