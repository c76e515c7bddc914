"""`dualpath scheduler`: a router without clients, for front ends of their own processes."""

import argparse
from typing import TYPE_CHECKING

from dualpath.cli.settings import (
    ROUTER,
    SCHEDULER,
    SCHEDULER_OF_ROUTER,
    Configuration,
    Part,
    add_parts,
    configuration,
)
from dualpath.cli.termination import ended_by_sigterm

if TYPE_CHECKING:
    from dualpath.router.http.settings import SchedulerAddress
    from dualpath.router.settings import RouterSettings

PARTS = (
    Part(SCHEDULER, "cluster"),
    SCHEDULER_OF_ROUTER._replace(defaults={"control_port": 5700, "front_ends_port": 5701}),
)

_EXAMPLE = """\
dualpath scheduler --port 8001 --control-port 5700 --front-ends-port 5701
dualpath frontend MODEL --port 8000 --scheduler tcp://127.0.0.1:5701
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath scheduler`."""
    parser = subparsers.add_parser(
        "scheduler",
        help="start the scheduler alone; engines and front ends register with it",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_parts(parser, PARTS)


def run(args: argparse.Namespace) -> int:
    """Run the scheduler until a signal ends it; returns 0.

    Raises:
        ConfigError: a setting is wrong or an address taken; nothing is left running.
    """
    settings, address = _settings(args)

    from dualpath.cli.event_loop import run_served
    from dualpath.router.http.scheduler_process import run_scheduler

    # A signal before the server handles it ends the start.
    with ended_by_sigterm():
        run_served(run_scheduler(settings, address))
    return 0


def layers(args: argparse.Namespace) -> Configuration:
    """Return what flags, environment and file say; raises ``ConfigError``."""
    return configuration(args, PARTS)


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return the same after the settings were made of them."""
    _settings(args)
    return layers(args)


def _settings(args: argparse.Namespace) -> "tuple[RouterSettings, SchedulerAddress]":
    from dualpath.router.http.settings import SchedulerAddress
    from dualpath.router.settings import RouterSettings

    found = layers(args)
    return found.settings(ROUTER, RouterSettings), found.settings(SCHEDULER, SchedulerAddress)
