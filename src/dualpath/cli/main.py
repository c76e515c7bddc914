"""Entry point of the `dualpath` command.

A subcommand is a module `<package>.<name>`, with `_` for `-`, that has two functions:

    add_parser(subparsers) -> None     adds the parser called <name> with its arguments
    run(args) -> int                   does the work and returns the exit code

`--help` and `--version` must be fast, and vLLM and torch take seconds to import.  So each package
of subcommands has a table ``SUBCOMMANDS`` with one-line helps, and only the module of the given
subcommand is imported.  The packages are `dualpath.cli` and those that installed distributions name
in the entry points `dualpath.commands`: the simulator's and the lab's.

Exit codes: 0 success, 1 a defect of dualpath (with traceback), 2 invalid input or a failure outside
dualpath (one line on standard error), 130 interrupted.
"""

import argparse
import importlib
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from types import ModuleType

from dualpath import __version__, cli
from dualpath.core.errors import DualPathError
from dualpath.core.extras import not_installed

# --------------------------------------------------------------------------------------- log lines
# Logging of commands, to standard error: time, level, logger, message.
#
# INFO and above of dualpath, WARNING and above of libraries.  Processes with vLLM switch to vLLM's
# log format once vLLM is imported (``vllm.engine_arguments.join_vllm_logging``).

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging() -> None:
    """Configure logging of this process, unless it has handlers already."""
    logging.basicConfig(format=_FORMAT)
    for package in ("dualpath", "dualpath_sim", "dualpath_lab"):
        logging.getLogger(package).setLevel(logging.INFO)


EXIT_DEFECT = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code.

    Raises:
        SystemExit: by argparse, for `--help`, `--version` and arguments that do not parse (2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = _chosen_subcommand(arguments)
    try:
        module = None if chosen is None else command_module(chosen)
        if module is None:
            # argparse prints the help or an error for the unknown subcommand.
            _overview_parser().parse_args(arguments or ["--help"])
            return EXIT_WRONG_INPUT
        return _run(module, arguments)
    except DualPathError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if (missing := not_installed(error)) is None:
            traceback.print_exc()
            return EXIT_DEFECT
        return _refuse(f"`dualpath {chosen}` needs {missing}")
    except Exception:
        traceback.print_exc()
        return EXIT_DEFECT


def subcommands() -> dict[str, str]:
    """Return the one-line help of every installed subcommand, by name."""
    return {
        name: line for package in command_packages() for name, line in package.SUBCOMMANDS.items()
    }


def configured_subcommands() -> tuple[str, ...]:
    """Return the installed subcommands that read settings from a file and the environment."""
    return tuple(
        name for package in command_packages() for name in getattr(package, "CONFIGURED", ())
    )


def command_module(name: str) -> ModuleType | None:
    """Import the module of a subcommand; None if no installed package has it."""
    for package in command_packages():
        if name in package.SUBCOMMANDS:
            return importlib.import_module(f"{package.__name__}.{name.replace('-', '_')}")
    return None


def command_packages() -> Iterator[ModuleType]:
    """Yield the packages of subcommands; installed distributions are searched on demand only."""
    yield cli
    for entry in sorted(entry_points(group="dualpath.commands"), key=lambda entry: entry.value):
        yield entry.load()


def _chosen_subcommand(arguments: Sequence[str]) -> str | None:
    """Return the first argument unless it is an option, or None."""
    return arguments[0] if arguments and not arguments[0].startswith("-") else None


def _run(module: ModuleType, arguments: Sequence[str]) -> int:
    parser = _base_parser()
    commands = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND")
    module.add_parser(commands)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:  # argparse itself would print the usage of `dualpath` only
        commands.choices[args.subcommand].error(f"unrecognized arguments: {' '.join(unknown)}")
    configure_logging()
    try:
        exit_code: int = module.run(args)
    except DualPathError as error:
        return _refuse(error.spelled(_flags(parser)))
    return exit_code


def _flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the flags of the settings of a command and of its subcommands."""
    found: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found |= _flags(child)
        elif action.option_strings:
            found[action.dest] = action.option_strings[0]
    return found


def _refuse(message: str) -> int:
    # Print the message as one line.
    print(f"dualpath: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_WRONG_INPUT


def _overview_parser() -> argparse.ArgumentParser:
    parser = _base_parser()
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND")
    for name, help_line in subcommands().items():
        subparsers.add_parser(name, help=help_line)
    return parser


def _base_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dualpath",
        description="Dual-path KV-cache loading for agentic LLM inference.",
        epilog="`dualpath SUBCOMMAND --help` explains a subcommand.",
    )
    parser.add_argument("--version", action="version", version=f"dualpath {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
