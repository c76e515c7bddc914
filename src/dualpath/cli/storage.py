"""`dualpath storage`: what lies in a storage, whether it is whole, and what goes.

An action is a module `dualpath.cli.storage_<name>` with `add_action(actions)`, as in
`dualpath.cli.chaos`.
"""

import argparse
from types import ModuleType

from dualpath.cli import storage_change, storage_janitor, storage_look

ACTIONS: tuple[ModuleType, ...] = (storage_look, storage_change, storage_janitor)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of `dualpath storage`."""
    parser = subparsers.add_parser(
        "storage",
        help="what lies in a storage, whether it is whole, and what goes",
        description="Look after a storage: count what lies there, check it, pin or remove parts of "
        "it, keep it within limits. Engines may run meanwhile.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for module in ACTIONS:
        module.add_actions(actions)


def run(args: argparse.Namespace) -> int:
    """Do it; return the action's exit code."""
    exit_code: int = args.act(args)
    return exit_code
