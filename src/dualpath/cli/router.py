"""`dualpath router`: the OpenAI endpoint and the central scheduler; engines register with it."""

import argparse
import signal
from typing import TYPE_CHECKING

from dualpath.cli.configuration import (
    ENDPOINT,
    ROUTER,
    ROUTER_FLAGS,
    Configuration,
    Flag,
    configuration,
    make_configurable,
)
from dualpath.cli.security_arguments import add_client_arguments, add_secret_argument
from dualpath.core.modes import Mode

if TYPE_CHECKING:
    from dualpath.router.settings import RouterSettings
    from dualpath.vllm.front_end_settings import FrontEndSettings


_SERVER_EXAMPLE = """\
Arguments after --vllm-args go to vLLM's own front end verbatim, for instance
  dualpath router MODEL --port 8000 --vllm-args --enable-auto-tool-choice --tool-call-parser hermes
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath router`."""
    parser = subparsers.add_parser(
        "router",
        help="start the router alone; engines register themselves with it",
        epilog=_SERVER_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    make_configurable(parser)
    parser.add_argument(
        "model", nargs="?", help="directory or name of the model the engines serve; required"
    )
    _add_endpoint_arguments(parser)
    _add_control_arguments(parser)
    clients = add_client_arguments(parser)
    clients.add_argument(
        "--max-samples", type=int, default=128, help="most samples (n) of a prompt"
    )
    parser.add_argument(
        "--vllm-args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="everything that follows goes to vLLM's front end",
    )


def _add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("endpoint")
    group.add_argument("--host", default="127.0.0.1", help="where clients connect")
    group.add_argument("--port", type=int, default=8000, help="0: any free port")
    group.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="default: MODEL"
    )
    group.add_argument("--max-model-len", type=int, help="tokens; default: the model's own")
    group.add_argument("--dtype", default="auto", help="as given to the engines")
    group.add_argument(
        "--block-size", type=int, default=64, help="tokens per Full Block, as given to the engines"
    )


def _add_control_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines and scheduling")
    group.add_argument("--control-host", default="127.0.0.1", help="where engines register")
    group.add_argument("--control-port", type=int, default=5700)
    add_secret_argument(group)
    group.add_argument(
        "--mode", choices=[mode.value for mode in Mode], help="default: the first engine's"
    )
    group.add_argument("--alpha-tokens", type=int, help="alpha of Algorithm 1; default: derived")
    group.add_argument("--beta-tokens", type=int, help="beta of Algorithm 1; default: derived")
    group.add_argument(
        "--read-deadline-s", type=float, help="a slower storage read is computed instead"
    )
    group.add_argument(
        "--engine-wait-s", type=float, help="how long requests wait for an engine to register"
    )
    group.add_argument("--request-deadline-s", type=float, help="bound of a whole request")
    group.add_argument(
        "--event-log",
        default="",
        metavar="FILE",
        help="record what the scheduler is told and what it decides; replaces the file",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="OpenTelemetry collector that gets a trace of every request, as for vLLM's engines",
    )


def run(args: argparse.Namespace) -> int:
    """Run the router until a signal ends it; returns 0.

    Raises:
        ConfigError: a setting is wrong or an address taken; nothing is left running.
    """
    router_settings, front_end_settings = _settings(args)

    import uvloop

    from dualpath.vllm.router_process import run_router

    # A signal before the server handles it ends the start.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        uvloop.run(run_router(router_settings, front_end_settings))
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


_FLAGS = (
    Flag("model", ENDPOINT, "model", positional=True),
    Flag("host", ENDPOINT, "host"),
    Flag("port", ENDPOINT, "port"),
    Flag("served_model_name", ENDPOINT, "served_model_names"),
    Flag("max_model_len", ENDPOINT, "max_model_len"),
    Flag("dtype", ENDPOINT, "dtype"),
    Flag("block_size", ENDPOINT, "block_tokens"),
    Flag("vllm_args", ENDPOINT, "vllm_arguments"),
    Flag("control_host", ROUTER, "control_host"),
    Flag("control_port", ROUTER, "control_port"),
    *ROUTER_FLAGS,
    Flag("max_samples", ROUTER, "max_samples"),
    Flag("read_deadline_s", ROUTER, "read_deadline_s"),
    Flag("engine_wait_s", ROUTER, "engine_wait_s"),
    Flag("request_deadline_s", ROUTER, "request_deadline_s"),
)


def layers(args: argparse.Namespace) -> Configuration:
    """Return what flags, environment and file say; raises ``ConfigError``."""
    return configuration(args, _FLAGS)


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return the same after the settings were made of them."""
    _settings(args)
    return layers(args)


def _settings(args: argparse.Namespace) -> "tuple[RouterSettings, FrontEndSettings]":
    from dualpath.router.settings import RouterSettings
    from dualpath.vllm.front_end_settings import FrontEndSettings

    found = layers(args)
    return found.settings(ROUTER, RouterSettings), found.settings(ENDPOINT, FrontEndSettings)


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
