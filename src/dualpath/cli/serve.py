"""`dualpath serve`: router, prefill and decode engines on this machine."""

import argparse
import signal

from dualpath.core.modes import Mode
from dualpath.launch.settings import MIB, ClusterSettings

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
    parser.add_argument("model", help="directory or name of the model")
    add_cluster_arguments(parser)
    parser.add_argument("--port", type=int, default=8000, help="of the endpoint; 0: any free port")
    parser.add_argument(
        "--event-log",
        default="",
        metavar="FILE",
        help="record what the scheduler is told and what it decides; replaces the file",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and exit")
    parser.add_argument(
        "--vllm-args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="everything that follows goes to every engine",
    )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a cluster; `dualpath demo` shares some."""
    parser.add_argument("--prefill", type=int, default=1, metavar="P", help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, metavar="D", help="decode engines")
    parser.add_argument(
        "--storage", required=True, metavar="PATH", help="directory of the external KV storage"
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
    parser.add_argument("--alpha-tokens", type=int, help="alpha of Algorithm 1; default: derived")
    parser.add_argument("--beta-tokens", type=int, help="beta of Algorithm 1; default: no limit")
    parser.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--log-dir", default="", help="keep logs here; default: a temporary folder")
    parser.add_argument(
        "--trace-out", default="", metavar="DIR", help="write Chrome traces of the engines here"
    )


def cluster_settings(args: argparse.Namespace) -> ClusterSettings:
    """Return the settings that the arguments describe."""
    return ClusterSettings(
        model=args.model,
        storage=args.storage,
        prefill=args.prefill,
        decode=args.decode,
        mode=Mode(args.mode),
        host=args.host,
        port=args.port,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        block_tokens=args.block_size,
        hbm_bytes=args.hbm_mib * MIB,
        buffer_bytes=args.buffer_mib * MIB,
        layer_buffers=args.layer_buffers,
        snic_bytes_per_s=args.snic_mb_per_s * 1e6,
        compute_quota_s=args.compute_quota_s,
        alpha_tokens=args.alpha_tokens,
        beta_tokens=args.beta_tokens,
        served_model_names=tuple(args.served_model_name),
        trace_dir=args.trace_out,
        router_args=("--event-log", args.event_log) if args.event_log else (),
        log_dir=args.log_dir,
        vllm_args=tuple(args.vllm_args),
    ).checked()


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; returns 0.

    Raises ``ConfigError`` or ``EngineLostError``; nothing is left running then.
    """
    settings = cluster_settings(args)
    if args.dry_run:
        return _print_commands(settings)

    from dualpath.launch.local_cluster import LocalCluster

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


def _print_commands(settings: ClusterSettings) -> int:
    import shlex

    from dualpath.core.cluster import Role
    from dualpath.launch.commands import ENGINE_ENVIRONMENT, engine_command, router_command

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
