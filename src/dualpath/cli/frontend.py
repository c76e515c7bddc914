"""`dualpath frontend`: an OpenAI endpoint in its own process, connected to a scheduler."""

import argparse
from typing import TYPE_CHECKING

from dualpath.cli.settings import (
    ENDPOINT,
    FRONT_END_OF_ROUTER,
    FRONTEND,
    LINK,
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
    LINK,
    FRONT_END_OF_ROUTER,
)

_EXAMPLE = """\
dualpath router   MODEL --port 8000 --front-ends-port 5701
dualpath frontend MODEL --port 8001 --scheduler tcp://127.0.0.1:5701
dualpath frontend MODEL --port 8002 --scheduler tcp://127.0.0.1:5701
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath frontend`."""
    parser = subparsers.add_parser(
        "frontend",
        help="start a further front end of a router; all front ends share its engines",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_parts(parser, PARTS)


def run(args: argparse.Namespace) -> int:
    """Run the front end until a signal stops it; returns 0.

    Raises:
        ConfigError: an invalid setting, or an address in use; no process is left running.
    """
    settings = _settings(args)

    import uvloop

    from dualpath.router.observe.metrics import share_metrics

    share_metrics(settings[-1].front_end_name)  # before vLLM defines metrics
    from dualpath.vllm.router_process import run_front_end

    # Until the server handles signals, SIGTERM interrupts the start.
    with sigterm_as_interrupt():
        uvloop.run(run_front_end(*settings))
    return 0


def layers(args: argparse.Namespace) -> Configuration:
    """Return the settings of flags, environment and file; raises ``ConfigError``."""
    return configuration(args, PARTS)


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return ``layers`` after validating the settings."""
    _settings(args)
    return layers(args)


def _settings(
    args: argparse.Namespace,
) -> "tuple[RouterSettings, FrontEndSettings, LinkSettings]":
    from dualpath.router.settings import LinkSettings, RouterSettings
    from dualpath.vllm.front_end_settings import FrontEndSettings

    found = layers(args)
    return (
        found.settings(ROUTER, RouterSettings),
        found.settings(ENDPOINT, FrontEndSettings),
        found.settings(FRONTEND, LinkSettings),
    )
