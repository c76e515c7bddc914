"""`dualpath config check`: the effective settings and the origin of each."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualpath.cli.main import command_module, configured_subcommands
from dualpath.cli.output import add_json_argument, wrote_json
from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from dualpath.core.settings import Given, Layers, Schema

#: Longer values are truncated in the table, not in JSON.
_WIDTH = 60

_EPILOG = """\
dualpath config check --config cluster.toml
dualpath config check --config cluster.toml router MODEL --alpha-tokens 200000
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of `dualpath config`."""
    parser = subparsers.add_parser(
        "config",
        help="check settings from flags, environment and file, and print the origin of each",
        description="Settings come from flags, DUALPATH_... variables, --config FILE.toml and "
        "defaults, in this order of precedence.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="print the effective settings with their origin",
        description="Print the effective settings with their origin: of a command if one is given, "
        "else of every section. Keys and secrets are never printed. Nothing is started.",
        allow_abbrev=False,
    )
    check.add_argument("--config", metavar="FILE.toml", help="settings of all parts")
    add_json_argument(check)
    command = check.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help=f"{', '.join(configured_subcommands())} with its arguments, as on a command line; "
        "default: none",
    )
    command.required = False  # argparse treats every positional as required


def run(args: argparse.Namespace) -> int:
    """Print the settings; return 0.

    Raises:
        ConfigError: an unknown section, key or variable, an invalid or a missing value.
    """
    from dualpath.cli.settings import SECTIONS as known
    from dualpath.cli.settings import outer_layers
    from dualpath.core.settings import effective, layered

    layers: Layers
    if args.command:
        layers = _layers_of(args.command, args.config)
        sections = sorted({section for section, _ in layers}, key=list(known).index)
    else:
        layers = layered(*outer_layers(args.config))
        _check_complete(known, layers)
        sections = list(known)
    rows = [row for section in sections for row in effective(known[section], section, layers)]
    if not wrote_json(args, [_as_data(row) for row in rows]):
        _print(rows)
    return 0


def _layers_of(command: Sequence[str], config: str | None) -> "Layers":
    """Return the effective settings of a command, after its own checks."""
    name, *arguments = command
    if name not in (known := configured_subcommands()):
        raise ConfigError(f"{name!r} has no settings; give one of {', '.join(known)}")
    module = command_module(name)
    assert module is not None, "a configured subcommand has a module"
    subparsers = argparse.ArgumentParser(prog="dualpath").add_subparsers()
    module.add_parser(subparsers)
    args = subparsers.choices[name].parse_args(arguments)
    if config is not None:
        if args.config not in (None, config):
            raise ConfigError(f"--config {config} and --config {args.config}; give one of them")
        args.config = config
    layers: Layers = module.checked_layers(args).layers
    return layers


def _check_complete(known: "Schema", layers: "Layers") -> None:
    """Validate every section that has all required values."""
    from dualpath.core.settings import build, declared

    for section, kind in known.items():
        if all((section, f.name) in layers for f in declared(kind) if f.required):
            build(kind, section, layers, {})


def _print(rows: "Sequence[Given]") -> None:
    section = ""
    width = max(len(row.key) for row in rows)
    for row in rows:
        if row.section != section:
            section = row.section
            print(f"[{section}]")
        shown = row.shown if len(row.shown) <= _WIDTH else f"{row.shown[: _WIDTH - 3]}..."
        origin = row.origin.value + (f": {row.place}" if row.place else "")
        print(f"  {row.key:{width}}  {shown or '-':20}  {origin}")


def _as_data(row: "Given") -> dict[str, object]:
    from dualpath.core.settings import is_secret

    return {
        "section": row.section,
        "key": row.key,
        "value": row.shown if is_secret(row.key) else row.value,
        "origin": row.origin,
        "place": row.place,
    }
