"""`dualpath storage`: lists, verifies, pins and removes stored blocks, and applies limits.

Actions are in modules `dualpath.cli.storage_<name>` with `add_actions(actions)`, as in
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
        help="list, verify, pin or remove stored blocks; keep a storage within limits",
        description="Maintain a storage: list, verify, pin or remove stored blocks, and keep the "
        "storage within limits. Engines may run at the same time.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for module in ACTIONS:
        module.add_actions(actions)


def run(args: argparse.Namespace) -> int:
    """Run the action; return its exit code."""
    exit_code: int = args.act(args)
    return exit_code
