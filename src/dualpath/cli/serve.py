"""`dualpath serve`: router, prefill and decode engines on this machine."""

import argparse
import signal

from dualpath.cli.configuration import (
    CLUSTER,
    ENDPOINT,
    ENGINE,
    ROUTER,
    Configuration,
    Flag,
    configuration,
    from_arguments,
    make_configurable,
    scaled,
)
from dualpath.cli.nixl_arguments import add_nixl_arguments, nixl_engine_config
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.ops.launch.settings import MIB, LocalClusterSettings

#: Works with every build; the `vllm` command does not find itself in the CPU build.
ENGINE_MODULE = "vllm.entrypoints.openai.api_server"

_EPILOG = """\
The parts also start one by one, on any machine that reaches the others: `dualpath router MODEL`,
and plain vLLM servers with our --kv-transfer-config (`--dry-run` prints the commands).
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="start router, prefill and decode engines on this machine",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    make_configurable(parser)
    parser.add_argument("model", nargs="?", help="directory or name of the model; required")
    add_cluster_arguments(parser)
    parser.add_argument("--port", type=int, default=8000, help="of the endpoint; 0: any free port")
    parser.add_argument(
        "--event-log",
        default="",
        metavar="FILE",
        help="record what the scheduler is told and what it decides; replaces the file",
    )
    parser.add_argument(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help="what clients have to show, as vLLM has it; default: VLLM_API_KEY of the environment",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and exit")
    parser.add_argument(
        "--vllm-args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="everything that follows goes to the router's front end and every engine",
    )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a cluster; `dualpath demo` shares some."""
    parser.add_argument("--prefill", type=int, default=1, metavar="P", help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, metavar="D", help="decode engines")
    parser.add_argument(
        "--storage", metavar="PATH", help="directory of the external KV storage; required"
    )
    parser.add_argument(
        "--mode", choices=[mode.value for mode in Mode], default=Mode.DUALPATH.value
    )
    parser.add_argument("--host", default="127.0.0.1", help="where clients connect")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    parser.add_argument("--block-size", type=int, default=64, help="tokens per Full Block")
    parser.add_argument("--hbm-mib", type=int, default=512, help="KV memory of an engine")
    parser.add_argument("--buffer-mib", type=int, default=1024, help="PE or DE buffer of an engine")
    parser.add_argument(
        "--layer-buffers", type=int, default=2, help="layers of KV in a PE's memory, 0: all"
    )
    parser.add_argument(
        "--snic-mb-per-s",
        type=float,
        default=0.0,
        help="throttle every engine's storage reads to emulate a storage NIC, 0: not at all",
    )
    parser.add_argument("--compute-quota-s", type=float, default=0.3, help="0: no quota")
    add_nixl_arguments(parser)
    parser.add_argument("--alpha-tokens", type=int, help="alpha of Algorithm 1; default: derived")
    parser.add_argument("--beta-tokens", type=int, help="beta of Algorithm 1; default: no limit")
    parser.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--log-dir", default="", help="keep logs here; default: a temporary folder")
    parser.add_argument(
        "--trace-out", default="", metavar="DIR", help="write Chrome traces of the engines here"
    )


_FLAGS = (
    Flag("model", CLUSTER, "model", positional=True),
    Flag("storage", CLUSTER, "storage"),
    Flag("prefill", CLUSTER, "prefill"),
    Flag("decode", CLUSTER, "decode"),
    Flag("mode", CLUSTER, "mode"),
    Flag("host", CLUSTER, "host"),
    Flag("port", CLUSTER, "port"),
    Flag("dtype", CLUSTER, "dtype"),
    Flag("max_model_len", CLUSTER, "max_model_len"),
    Flag("block_size", CLUSTER, "block_tokens"),
    Flag("hbm_mib", CLUSTER, "hbm_bytes", scaled(MIB)),
    Flag("buffer_mib", CLUSTER, "buffer_bytes", scaled(MIB)),
    Flag("layer_buffers", CLUSTER, "layer_buffers"),
    Flag("snic_mb_per_s", CLUSTER, "snic_bytes_per_s", scaled(1e6)),
    Flag("compute_quota_s", CLUSTER, "compute_quota_s"),
    Flag("alpha_tokens", CLUSTER, "alpha_tokens"),
    Flag("beta_tokens", CLUSTER, "beta_tokens"),
    Flag("served_model_name", CLUSTER, "served_model_names"),
    Flag("trace_out", CLUSTER, "trace_dir"),
    Flag("event_log", CLUSTER, "router_args", lambda f: ("--event-log", f) if f else ()),
    Flag("log_dir", CLUSTER, "log_dir"),
    Flag("api_key", CLUSTER, "api_keys"),
    Flag("vllm_args", CLUSTER, "vllm_args"),
)


def layers(args: argparse.Namespace) -> Configuration:
    """Return what flags, environment and file say; raises ``ConfigError``."""
    config = nixl_engine_config(args)
    nixl = from_arguments(
        args, ("kv_ports", "nixl_engine_config"), CLUSTER, "nixl_engine_config", config
    )
    file = from_arguments(args, ("config",), CLUSTER, "config_file", args.config or "")
    return configuration(args, _FLAGS, (nixl, file))


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return the same after the checks of ``cluster_settings``."""
    cluster_settings(args)
    return layers(args)


def cluster_settings(args: argparse.Namespace) -> LocalClusterSettings:
    """Return the settings of the cluster; raises ``ConfigError``."""
    found = layers(args)
    settings = found.settings(CLUSTER, LocalClusterSettings)
    _refuse_overridden(found, settings)
    return settings


def _refuse_overridden(found: Configuration, settings: LocalClusterSettings) -> None:
    """Raise ``ConfigError`` for what router or engines are told otherwise by their command line."""
    from dualpath.ops.launch.commands import engine_keys, router_keys

    taken = {ENGINE: engine_keys(settings), ROUTER: router_keys(settings)}
    for given in [g for section in (ENGINE, ROUTER, ENDPOINT) for g in found.elsewhere(section)]:
        if given.section == ENDPOINT or given.key in taken[given.section]:
            raise ConfigError(
                f"{given.place} does not count here: `dualpath serve` tells its router and engines "
                f"what stands in [{CLUSTER}]; set it there"
            )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; returns 0.

    Raises ``ConfigError`` or ``EngineLostError``; nothing is left running then.
    """
    settings = cluster_settings(args)
    if args.dry_run:
        return _print_commands(settings)

    from dualpath.ops.launch.local_cluster import LocalCluster

    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with LocalCluster(settings, _say) as cluster:
            _say(f"endpoint {cluster.endpoint}/v1 (Ctrl-C ends it)")
            cluster.watch()
    except KeyboardInterrupt:
        _say("stopped")
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _print_commands(settings: LocalClusterSettings) -> int:
    import shlex

    from dualpath.core.cluster import Role
    from dualpath.ops.launch.commands import ENGINE_ENVIRONMENT, engine_command, router_command

    control_port = 5700
    print("dualpath " + shlex.join(router_command(settings, settings.port, control_port)))
    environment = " ".join(f"{name}={value}" for name, value in ENGINE_ENVIRONMENT.items())
    port = settings.port
    for role, count in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for index in range(count):
            port += 1
            command = engine_command(settings, role, index, port, control_port)
            print(f"{environment} python -m {ENGINE_MODULE} {shlex.join(command)}")
    return 0


def _say(text: str) -> None:
    print(f"dualpath: {text}", flush=True)


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
