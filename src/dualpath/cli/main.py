"""Entry point of the `dualpath` command.

A subcommand is a module `dualpath.cli.<name>` with two functions:

    add_parser(subparsers) -> None     adds the parser called <name> with its arguments
    run(args) -> int                   does the work and returns the exit code

`--help` and `--version` must be fast, and vLLM and torch take seconds to import, so the table below
has the one-line helps and only the module of the given subcommand is imported.

Exit codes: 0 success, 1 a defect of dualpath (with traceback), 2 invalid input or a failure outside
dualpath (one line on standard error), 130 interrupted.
"""

import argparse
import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from dualpath import __version__
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
    logging.getLogger("dualpath").setLevel(logging.INFO)


EXIT_DEFECT = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130

SUBCOMMANDS = (
    ("serve", "start router, prefill and decode engines on this machine"),
    ("router", "start the router alone; engines register themselves with it"),
    ("scheduler", "start the scheduler alone; engines and front ends register with it"),
    ("frontend", "start a further front end of a router; all front ends share its engines"),
    ("roles", "print or change the roles of engines while they serve"),
    ("replay", "replay agent trajectories against an endpoint"),
    ("record", "write live traffic as a trace: lengths, times and numbered blocks, no text"),
    ("report", "turn replay results into a table and an HTML page"),
    ("demo", "compare Basic, DualPath and Oracle on real sessions, on this machine"),
    ("model", "prepare a small model: SmolLM2 from its package, or a random tiny one"),
    ("table1", "print the paper's Table 1 from model geometry, beside the paper's figures"),
    ("bounds", "print Eq. 1-9 for a cluster, the bottleneck-free P/D range and the bottleneck"),
    ("workingset", "print the KV bytes of prompts, agents and the working set, per model"),
    ("simulate", "compare the modes on a simulated cluster, model and trace"),
    ("eval", "reproduce the paper's evaluation in the simulator"),
    ("plan", "find the best split of nodes into prefill and decode, and its capacity"),
    ("emulate", "start an emulated engine, or a router for emulated engines"),
    ("profile", "measure a model's costs on this machine for the simulator"),
    ("config", "check settings from flags, environment and file, and print the origin of each"),
    ("storage", "list, verify, pin or remove stored blocks; keep a storage within limits"),
    ("doctor", "check a node for everything that engines need, and print remedies"),
    ("qos", "print the settings that keep KV from delaying model communication"),
    ("lab", "emulate a cluster on this machine: nodes with shaped compute and storage NICs"),
    ("chaos", "inject faults and check that nothing is lost, late or wrong"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code.

    Raises:
        SystemExit: by argparse, for `--help`, `--version` and arguments that do not parse (2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = _chosen_subcommand(arguments)
    try:
        if chosen is None:
            # argparse prints the help or an error for the unknown subcommand.
            _overview_parser().parse_args(arguments or ["--help"])
            return EXIT_WRONG_INPUT
        return _run(importlib.import_module(f"dualpath.cli.{chosen}"), arguments)
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


def _chosen_subcommand(arguments: Sequence[str]) -> str | None:
    """Return the subcommand at the beginning of `arguments`, or None."""
    names = [name for name, _ in SUBCOMMANDS]
    return arguments[0] if arguments and arguments[0] in names else None


def _run(module: ModuleType, arguments: Sequence[str]) -> int:
    parser = _base_parser()
    commands = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND")
    module.add_parser(commands)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:  # argparse itself would print the usage of `dualpath` only
        commands.choices[args.subcommand].error(f"unrecognized arguments: {' '.join(unknown)}")
    # Imported here and not at the top, so that --help is fast.

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
    for name, help_line in SUBCOMMANDS:
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
