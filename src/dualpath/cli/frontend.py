"""`dualpath frontend`: an OpenAI endpoint of its own process, before a router's scheduler."""

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
from dualpath.cli.termination import ended_by_sigterm

if TYPE_CHECKING:
    from dualpath.router.links.settings import LinkSettings
    from dualpath.router.settings import RouterSettings
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
        help="start one more front end of a router; N of them share its engines",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_parts(parser, PARTS)


def run(args: argparse.Namespace) -> int:
    """Run the front end until a signal ends it; returns 0.

    Raises:
        ConfigError: a setting is wrong or an address taken; nothing is left running.
    """
    settings = _settings(args)

    import uvloop

    from dualpath.vllm.frontend_process import run_front_end

    # A signal before the server handles it ends the start.
    with ended_by_sigterm():
        uvloop.run(run_front_end(*settings))
    return 0


def layers(args: argparse.Namespace) -> Configuration:
    """Return what flags, environment and file say; raises ``ConfigError``."""
    return configuration(args, PARTS)


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return the same after the settings were made of them."""
    _settings(args)
    return layers(args)


def _settings(
    args: argparse.Namespace,
) -> "tuple[RouterSettings, FrontEndSettings, LinkSettings]":
    from dualpath.router.links.settings import LinkSettings
    from dualpath.router.settings import RouterSettings
    from dualpath.vllm.front_end_settings import FrontEndSettings

    found = layers(args)
    return (
        found.settings(ROUTER, RouterSettings),
        found.settings(ENDPOINT, FrontEndSettings),
        found.settings(FRONTEND, LinkSettings),
    )
