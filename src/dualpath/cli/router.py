"""`dualpath router`: an OpenAI endpoint and the scheduler; engines register with it."""

import argparse
from typing import TYPE_CHECKING

from dualpath.cli.scaled_router import run_scaled_router
from dualpath.cli.settings import (
    ENDPOINT,
    FRONTEND,
    ROUTER,
    Configuration,
    Part,
    add_parts,
    configuration,
)
from dualpath.cli.signals import sigterm_as_interrupt

if TYPE_CHECKING:
    from dualpath.router.settings import LinkSettings, RouterSettings
    from dualpath.vllm.front_end_settings import FrontEndSettings

PARTS = (
    Part(ENDPOINT, "endpoint", positional=("model",)),
    Part(ROUTER, "engines, scheduling and clients", defaults={"control_port": 5700}),
)

_SERVER_EXAMPLE = """\
Arguments after --vllm-args are passed to vLLM's front end verbatim, for instance
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
    add_parts(parser, PARTS)


def run(args: argparse.Namespace) -> int:
    """Run the router until a signal stops it; returns 0.

    Raises:
        ConfigError: an invalid setting, or an address in use; no process is left running.
    """
    router_settings, front_end_settings = settings_of(args)
    if router_settings.front_ends:
        return _run_several(router_settings, front_end_settings)

    import uvloop

    from dualpath.vllm.router_process import run_router

    # Until the server handles signals, SIGTERM interrupts the start.
    with sigterm_as_interrupt():
        uvloop.run(run_router(router_settings, front_end_settings))
    return 0


def _run_several(router: "RouterSettings", endpoint: "FrontEndSettings") -> int:
    import msgspec

    from dualpath.core.settings import arguments
    from dualpath.vllm.engine_arguments import tls_arguments

    def front_end(own: "RouterSettings", link: "LinkSettings", port: int) -> list[str]:
        endpoint_there = msgspec.structs.replace(endpoint, port=port)
        model, *rest = arguments(endpoint_there, positional=("model",))
        return [FRONTEND, model, *arguments(own), *arguments(link), *rest]

    tls = tls_arguments(endpoint.vllm_args)
    return run_scaled_router(
        *(router, endpoint.host, endpoint.port, front_end, endpoint.lora_modules),
        certificate=tls.certificate_file,
        key=tls.key_file,
    )


def layers(args: argparse.Namespace) -> Configuration:
    """Return the settings of flags, environment and file; raises ``ConfigError``."""
    return configuration(args, PARTS)


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return ``layers`` after validating the settings."""
    settings_of(args)
    return layers(args)


def settings_of(args: argparse.Namespace) -> "tuple[RouterSettings, FrontEndSettings]":
    """Return the settings of router and endpoint; raises ``ConfigError``."""
    from dualpath.router.settings import RouterSettings
    from dualpath.vllm.front_end_settings import FrontEndSettings

    found = layers(args)
    return found.settings(ROUTER, RouterSettings), found.settings(ENDPOINT, FrontEndSettings)
