"""Entry point of the `dualpath` command.

A subcommand is a module `<package>.<name>`, with `_` for `-`, that has two functions:

    add_parser(subparsers) -> None     adds the parser called <name> with its arguments
    run(args) -> int                   does the work and returns the exit code

`--help` and `--version` must be fast, and vLLM and torch take seconds to import.  So each package
of subcommands has a table ``SUBCOMMANDS`` with one-line helps, and only the module of the given
subcommand is imported.  The packages are `dualpath.cli` and those that installed distributions name
in the entry points `dualpath.commands`: the simulator's and the lab's.

Exit codes: 0 success, 1 a defect of dualpath (with traceback), 2 invalid input or a failure outside
dualpath (one line on standard error), 130 interrupted, 141 the reader of standard output has gone
(what a shell reports for a program that SIGPIPE ended).
"""

import argparse
import difflib
import errno
import importlib
import io
import logging
import os
import select
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from dualpath import __version__, cli
from dualpath.core.errors import ConfigError, DualPathError
from dualpath.core.extras import not_installed
from dualpath.core.settings import nearest
from dualpath.node.log_level import LEVELS, LOG_LEVEL_VARIABLE, log_level
from dualpath.node.output_files import not_creatable, not_writable

# --------------------------------------------------------------------------------------- log lines
# Logging of commands, to standard error: time, level, logger, message.
#
# Of dualpath the level of ``--log-level`` (``node.log_level``) and above, of libraries WARNING and
# above.  Processes with vLLM switch to vLLM's log format once vLLM is imported
# (``vllm.engine_arguments.join_vllm_logging``).

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging() -> None:
    """Configure logging of this process, unless it has handlers already.

    Raises ``ConfigError`` for an unknown level in the environment.
    """
    level = log_level()
    logging.basicConfig(format=_FORMAT)
    for package in ("dualpath", "dualpath_sim", "dualpath_lab"):
        logging.getLogger(package).setLevel(level)


EXIT_DEFECT = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code.

    Raises:
        SystemExit: by argparse, for `--help`, `--version` and arguments that do not parse (2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _accept_every_character(sys.stdout)
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except OSError as error:  # of standard output: its reader has gone, or the disk is full
        _discard_output()
        if isinstance(error, BrokenPipeError):
            return EXIT_BROKEN_PIPE
        return _refuse(f"standard output cannot be written: {error.strerror or error}")


def _accept_every_character(stream: object) -> None:
    """Let a stream print a replacement for characters that its encoding does not have."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """Drop what standard output holds, which cannot be written, so that Python's exit does not."""
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # a stream without a descriptor has nothing to write


#: Errors of a disk, also of one that standard output is redirected to.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _is_of_output(error: OSError) -> bool:
    """Whether a write to standard output failed: such an error names no file."""
    if error.filename is not None:
        return False
    if error.errno in _DISK_ERRORS:
        return True
    return isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout)


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError):
        return False  # a stream without a descriptor
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _main(arguments: Sequence[str]) -> int:
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
    except OSError as error:
        if _is_of_output(error):
            raise
        traceback.print_exc()
        return EXIT_DEFECT
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
    _add_log_level(parser)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse_unknown(_chosen_parser(parser, args), unknown)
    if args.log_level is not None:
        os.environ[LOG_LEVEL_VARIABLE] = (
            args.log_level
        )  # also for the processes that this one starts
    try:
        _refuse_nul(arguments)
        _require_writable(args, _flags(parser))
        configure_logging()
        exit_code: int = module.run(args)
    except DualPathError as error:
        return _refuse(error.spelled(_flags(parser)))
    except OSError as error:
        if error.filename is None:
            raise
        return _refuse(_unusable_path(error, args, _flags(parser)))
    return exit_code


def _refuse_nul(arguments: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a character that no path and no address can have."""
    for text in arguments:
        if "\0" in text:
            raise ConfigError(f"argument {text!r} has a NUL character; correct it")


class OutputPath(str):
    """The ``type`` of an argument that names a file to write.

    It is checked before the command runs, which may take hours.  ``-`` is standard output.
    """

    __slots__ = ()

    def problem(self) -> str | None:
        """Return why it cannot be written, with the remedy; None if it can."""
        reason = None if self == "-" else not_writable(self)
        return reason and f"{self}: cannot be written ({reason}); give a file in a writable folder"


class OutputFolder(OutputPath):
    """The same for a folder to write files to, which is created if needed."""

    __slots__ = ()

    def problem(self) -> str | None:
        """See ``OutputPath``."""
        reason = not_creatable(Path(self))
        return reason and f"{self}: cannot be written ({reason}); give a writable folder"


def _require_writable(args: argparse.Namespace, flags: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for the first output that cannot be written."""
    for name, value in vars(args).items():
        if isinstance(value, OutputPath) and (problem := value.problem()) is not None:
            raise ConfigError(f"{flags.get(name, name)} {problem}")


def _unusable_path(error: OSError, args: argparse.Namespace, flags: Mapping[str, str]) -> str:
    """Return the message about a path that the operating system refuses, with its flag if known."""
    path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    why = f"cannot be used ({error.strerror or error}); check the path and its permissions"
    for key, value in vars(args).items():
        typed = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if any(isinstance(text, str) and text and str(path).startswith(text) for text in typed):
            return f"{flags.get(key, key.upper())} {path}: {why}"
    return f"{path}: {why}"


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


class Parser(argparse.ArgumentParser):
    """Refuses wrong arguments in one line that names the flag, what was typed and the remedy.

    Flags are not abbreviated: the beginning of one may be another one that does not exist.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:  # noqa: ANN401 - as argparse has them
        super().__init__(*positional, **{"allow_abbrev": False, **named})

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, which can have 30 lines, and exit."""
        self.exit(EXIT_WRONG_INPUT, f"dualpath: {message}; see `{self.prog} --help`\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{value!r} is unknown; {nearest(str(value), known)}"
            )


def _chosen_parser(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> argparse.ArgumentParser:
    """Return the parser of the subcommand, or of its action, that parsed ``args``."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _chosen_parser(action.choices[getattr(args, action.dest)], args)
    return parser


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Refuse arguments that the parser does not have, naming the most similar flag."""
    flag = next((text.partition("=")[0] for text in unknown if text.startswith("-")), "")
    if not flag:
        parser.error(
            f"argument {unknown[0]!r} is one more than `{parser.prog}` takes; leave it out"
        )
    known = list(parser._option_string_actions)
    longer = sorted((each for each in known if each.startswith(flag)), key=len)
    close = longer or difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
    parser.error(f"{flag} is unknown" + (f"; did you mean {close[0]}?" if close else ""))


def _add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add ``--log-level`` to every subcommand and action."""
    children = [
        child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for child in dict.fromkeys(action.choices.values())  # once if it has an alias
    ]
    for child in children:
        _add_log_level(child)
    if not children:
        parser.add_argument(
            "--log-level",
            choices=LEVELS,
            help="log lines of this level and above, also in processes that this one starts "
            f"(default: {LOG_LEVEL_VARIABLE} of the environment, else info)",
        )


def _base_parser() -> Parser:
    parser = Parser(
        prog="dualpath",
        description="Dual-path KV-cache loading for agentic LLM inference.",
        epilog="`dualpath SUBCOMMAND --help` explains a subcommand.",
    )
    parser.add_argument("--version", action="version", version=f"dualpath {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
