"""`dualpath scheduler`: the scheduler without an endpoint, for separate front ends."""

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
from dualpath.cli.signals import sigterm_as_interrupt

if TYPE_CHECKING:
    from dualpath.router.settings import RouterSettings, SchedulerAddress

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
    """Run the scheduler until a signal stops it; returns 0.

    Raises:
        ConfigError: an invalid setting, or an address in use; no process is left running.
    """
    settings, address = _settings(args)

    from dualpath.cli.signals import run_served
    from dualpath.router.http.scheduler_process import run_scheduler

    # Until the server handles signals, SIGTERM interrupts the start.
    with sigterm_as_interrupt():
        run_served(run_scheduler(settings, address))
    return 0


def layers(args: argparse.Namespace) -> Configuration:
    """Return the settings of flags, environment and file; raises ``ConfigError``."""
    return configuration(args, PARTS)


def checked_layers(args: argparse.Namespace) -> Configuration:
    """Return ``layers`` after validating the settings."""
    _settings(args)
    return layers(args)


def _settings(args: argparse.Namespace) -> "tuple[RouterSettings, SchedulerAddress]":
    from dualpath.router.settings import RouterSettings, SchedulerAddress

    found = layers(args)
    return found.settings(ROUTER, RouterSettings), found.settings(SCHEDULER, SchedulerAddress)
