"""`dualpath chaos`: fault injection.

An action is a module `dualpath.cli.chaos_<name>` with `add_action(actions)`, which adds its parser
and sets `act` to the function that does the work and returns the exit code.
"""

import argparse
from types import ModuleType

from dualpath.cli import chaos_fuzz, chaos_run, chaos_simulate

_DESCRIPTION = """Fault injection: checks that no request is lost or hangs and that all KV is
correct."""

ACTIONS: tuple[ModuleType, ...] = (chaos_fuzz, chaos_run, chaos_simulate)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of `dualpath chaos`."""
    parser = subparsers.add_parser(
        "chaos",
        help="inject faults and check that nothing is lost, late or wrong",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for module in ACTIONS:
        module.add_action(actions)


def run(args: argparse.Namespace) -> int:
    """Run the action; return its exit code."""
    exit_code: int = args.act(args)
    return exit_code
