"""Commands of experiments: their flags, running, checking and drawing them.

A group of experiments is a table of names with one-line helps and the places of the ``Experiment``
objects, which are imported when one is chosen: `dualpath lab bench` and `dualpath eval` are groups.
"""

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dualpath.cli.main import OutputFolder, Parser
from dualpath.cli.output import print_progress, warn_if_no_plots
from dualpath.cli.settings import Part, add_parts, add_settings, configuration, flag_settings
from dualpath.cli.signals import sigterm_as_interrupt
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Settings, declared

if TYPE_CHECKING:
    from dualpath_sim.harness.experiment import Experiment, Page, RawData

#: Exit codes beside 0: a test of the system failed, the machine was too busy, or a rerun differs
#: from the recorded results; a rerun that was compared was made on a too busy machine.
EXIT_FAILED = EXIT_DIFFERS = 1
EXIT_CHECKED_TOO_BUSY = 2
#: Flags of the harness that do not belong to the command that repeats an experiment, with a value.
_NOT_REPEATED = ("--out", "--check", "--redraw", "--logs", "--docs", "--lab")


class Entry(NamedTuple):
    """One row of a group's table; ``place`` is ``module:attribute`` of the ``Experiment``."""

    help: str
    place: str

    def load(self) -> "Experiment[Any, Any]":
        """Import the experiment."""
        module, _, attribute = self.place.partition(":")
        found: Experiment[Any, Any] = getattr(importlib.import_module(module), attribute)
        return found


class LazyParser(Parser):
    """A parser that adds its arguments when it parses or is printed."""

    add_arguments: Callable[["LazyParser"], None] | None = None

    def complete(self) -> None:
        """Add the arguments."""
        if self.add_arguments is not None:
            add, self.add_arguments = self.add_arguments, None
            add(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401 - as argparse has them
        """Parse after adding the arguments."""
        self.complete()
        return super().parse_known_args(args, namespace)


class Group:
    """Experiments that are subcommands of one command.

    ``parts`` has the structs that may also be set in a file and by variables.
    """

    def __init__(
        self, entries: Mapping[str, Entry], parts: Mapping[type[Settings], Part] = {}
    ) -> None:
        self.entries = entries
        self._parts = parts

    def add_parsers(self, parser: argparse.ArgumentParser) -> None:
        """Add a subcommand for every experiment."""
        choices = parser.add_subparsers(
            dest="experiment", metavar="EXPERIMENT", required=True, parser_class=LazyParser
        )
        for name, entry in self.entries.items():
            child = choices.add_parser(name, help=entry.help, allow_abbrev=False)
            child.add_arguments = lambda made, entry=entry: self._add(made, entry.load())

    def run(self, args: argparse.Namespace) -> int:
        """Run, check or redraw the chosen experiment; return the exit code."""
        return self.run_experiment(args, self.entries[args.experiment].load())

    def _add(self, parser: argparse.ArgumentParser, experiment: "Experiment[Any, Any]") -> None:
        line = self.entries[experiment.name].help
        parser.description = f"{line[0].upper()}{line[1:]}."
        self.add_arguments(parser, experiment)

    def add_arguments(
        self,
        parser: argparse.ArgumentParser,
        experiment: "Experiment[Any, Any]",
        *,
        named: bool = True,
    ) -> None:
        """Add the flags of the harness and of the experiment's settings.

        ``named``: ``--name`` is the name of the report.
        """
        add_harness_flags(parser, experiment.name if named else "")
        parser.set_defaults(report_name=experiment.name)
        self._add_settings(parser, experiment.settings, experiment.fixed)

    def _add_settings(
        self,
        parser: argparse.ArgumentParser,
        default: Settings,
        fixed: Sequence[str],
        title: str = "",
    ) -> None:
        kind = type(default)
        if (part := self._parts.get(kind)) is not None:
            add_parts(parser, (part._replace(defaults=values(default)),))
            return
        add_settings(parser, kind, title=title, without=fixed, defaults=values(default))
        for name, nested in nested_settings(default).items():
            if name not in fixed:
                self._add_settings(parser, nested, fixed, name.replace("_", " "))

    def settings(
        self, args: argparse.Namespace, default: Settings, fixed: Sequence[str] = ()
    ) -> Any:  # noqa: ANN401 - of the default's type
        """Return settings from flags, over those of ``default``.

        Raises ``ConfigError`` that names the flag.
        """
        kind = type(default)
        if (part := self._parts.get(kind)) is not None:
            part = part._replace(defaults=values(default))
            return configuration(args, (part,)).settings(part.section, kind)
        computed: dict[str, Any] = {
            name: getattr(default, name) for name in fixed if hasattr(default, name)
        }
        for name, nested in nested_settings(default).items():
            if name not in fixed:
                computed[name] = self.settings(args, nested, fixed)
        return flag_settings(args, kind, defaults=values(default), **computed)

    # ------------------------------------------------------------------------------------- running

    def run_experiment(self, args: argparse.Namespace, experiment: "Experiment[Any, Any]") -> int:
        """Run an experiment; or draw, or repeat and compare, what a file has recorded.

        Raises ``ConfigError`` for invalid settings and files, and what a run raises.
        """
        return self.page_of(args, experiment, command_line())[1]

    def page_of(
        self, args: argparse.Namespace, experiment: "Experiment[Any, Any]", command: str
    ) -> "tuple[Page, int]":
        """Make a page as ``run_experiment`` does; return it with the exit code."""
        from dualpath_sim.harness.files import read

        if args.redraw:
            path = Path(args.redraw)
            page = self.redrawn(experiment, read(path))
            self._finish(page, args.out or str(path.parent))
            return page, 0
        if not args.check:
            page = self._measured(args, experiment, command)
            self._finish(page, args.out)
            passed = experiment.passed(page.data) and not page.too_busy
            return page, 0 if passed else EXIT_FAILED
        return self._checked(args, experiment)

    def _checked(
        self, args: argparse.Namespace, experiment: "Experiment[Any, Any]"
    ) -> "tuple[Page, int]":
        """Repeat the runs of a file, with the flags given in addition, and compare."""
        from dualpath.report.text import print_blocks
        from dualpath_sim.harness.check import agrees, compare
        from dualpath_sim.harness.files import read

        recorded = read(Path(args.check))
        raw = self.raw_data(experiment, recorded)
        chosen = [run for run in raw.runs if args.only in run.cell]
        if not chosen:
            raise ConfigError(
                f"no run of {args.check} has {args.only!r} in its name; correct --only"
            )
        raw = msgspec.structs.replace(raw, runs=chosen)
        expected = experiment.page(raw, recorded.name, recorded.command)
        rerun = self._measured(args, experiment, recorded.command, raw)
        self._finish(rerun, args.out)
        table = compare(expected, rerun)
        print_blocks(table)
        if rerun.too_busy:
            return rerun, EXIT_CHECKED_TOO_BUSY
        return rerun, 0 if agrees(table) else EXIT_DIFFERS

    def raw_data(self, experiment: "Experiment[Any, Any]", recorded: "Page") -> "RawData[Any, Any]":
        """Return the raw data of a file; raises ``ConfigError`` for that of another experiment."""
        try:
            if (raw := experiment.recorded(recorded.data)) is not None:
                return raw
            if experiment.published is None:
                raise msgspec.ValidationError("it has no runs")
            return experiment.published(recorded, self._settings_of(experiment, recorded))
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{recorded.name} is no data of the experiment {experiment.name}: {error}"
            ) from None

    def _settings_of(self, experiment: "Experiment[Any, Any]", recorded: "Page") -> Any:  # noqa: ANN401 - of the experiment's type
        """Return the settings of the command of a file in an older format, or the defaults."""
        words, name = shlex.split(recorded.command), experiment.subcommand or experiment.name
        words = words[words.index(name) + 1 :] if name in words else []
        parser = argparse.ArgumentParser(prog=experiment.name, allow_abbrev=False)
        self.add_arguments(parser, experiment)
        return self.settings(parser.parse_args(words), experiment.settings, experiment.fixed)

    def redrawn(self, experiment: "Experiment[Any, Any]", recorded: "Page") -> "Page":
        """Return the page of a file drawn again; one in an older format is returned as stored."""
        raw = experiment.recorded(recorded.data)
        return recorded if raw is None else experiment.page(raw, recorded.name, recorded.command)

    def _measured(
        self,
        args: argparse.Namespace,
        experiment: "Experiment[Any, Any]",
        command: str,
        expected: "RawData[Any, Any] | None" = None,
    ) -> "Page":
        """Return the page of new runs: those of ``expected`` with its settings, if given."""
        from dualpath_sim.harness.files import stored, write_runs
        from dualpath_sim.harness.run import measure

        warn_if_no_plots(args.out)
        default = expected.settings if expected else experiment.settings
        settings = self.settings(args, default, experiment.fixed)
        folder = Path(args.out) if args.out else None
        earlier = None
        if args.resume:
            if folder is None:
                raise ConfigError(
                    "--resume needs the folder of the unfinished runs; give --out DIR"
                )
            earlier = resumed(experiment, settings, folder / f"{args.report_name}.json")

        def after_run(raw: "RawData[Any, Any]") -> None:
            if folder is not None:
                write_runs(raw, args.report_name, command, folder)

        # SIGTERM raises an exception, which removes labs and stops processes.
        with sigterm_as_interrupt():
            raw = measure(
                *(experiment, settings, print_progress),
                wanted=lambda cell: cell in expected.cells if expected else args.only in cell,
                earlier=earlier,
                after_run=after_run,
            )
        return experiment.page(stored(experiment, raw), args.report_name, command)

    def _finish(self, page: "Page", folder: str | None) -> None:
        """Print a page, and write its files if there is a folder."""
        from dualpath.report.text import print_report
        from dualpath_sim.harness.files import write

        print_report(page.report())
        for path in write(page, Path(folder)) if folder else ():
            print_progress(f"wrote {path}")


def add_harness_flags(parser: argparse.ArgumentParser, name: str, *, cells: bool = True) -> None:
    """Add the flags that every experiment has.

    An empty ``name`` adds no ``--name``; without ``cells`` there is no ``--only``.
    """
    if name:
        parser.add_argument(
            "--name",
            dest="report_name",
            default=name,
            help="name of the report and its files",
        )
    parser.add_argument(
        "--out", type=OutputFolder, metavar="DIR", help="write table, plot and JSON there"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="make only the runs that the JSON in the folder of --out lacks",
    )
    parser.set_defaults(only="")
    if cells:
        parser.add_argument(
            "--only",
            default="",
            metavar="TEXT",
            help="run only cells with this text in their names",
        )
    parser.add_argument(
        "--check",
        metavar="FILE.json",
        help="repeat the experiment of this file and compare the key results; exit code 1 if they "
        "differ by more than its tolerances",
    )
    parser.add_argument(
        "--redraw", metavar="FILE.json", help="draw the page of this file again; run nothing"
    )


def values(settings: Settings) -> dict[str, Any]:
    """Return all settings with flags by name."""
    return {field.name: getattr(settings, field.name) for field in declared(type(settings))}


def nested_settings(settings: Settings) -> dict[str, Settings]:
    """Return the fields that are structs of settings."""
    fields = ((name, getattr(settings, name)) for name in settings.__struct_fields__)
    return {name: value for name, value in fields if isinstance(value, Settings)}


def resumed(
    experiment: "Experiment[Any, Any]", settings: Settings, path: Path
) -> "RawData[Any, Any] | None":
    """Return the unfinished runs of a file, None if there is none.

    Raises ``ConfigError`` if they have other settings or are of another processor.
    """
    from dualpath.node.machine import this_machine
    from dualpath_sim.harness.files import read
    from dualpath_sim.harness.run import without_folders

    raw = experiment.recorded(read(path).data) if path.exists() else None
    if raw is None:
        return None
    if raw.settings != without_folders(settings):
        raise ConfigError(
            f"{path} has runs with other settings; repeat the command that it names, or give "
            "another --name"
        )
    if raw.machine is None or raw.machine.cores != this_machine().cores:
        raise ConfigError(f"{path} has runs of another processor; give another --name")
    return raw


def command_line() -> str:
    """Return the command line without folders of output and without absolute paths."""
    words = _without_flags(sys.argv[1:], _NOT_REPEATED, ("--resume",))
    return shlex.join(["dualpath", *map(_without_folder, words)])


def _without_folder(word: str) -> str:
    """Return a word, or what follows its `=`, as a name instead of an absolute path."""
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if Path(value).is_absolute() else word


def _without_flags(
    words: Sequence[str], with_value: Sequence[str], alone: Sequence[str] = ()
) -> list[str]:
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in with_value:
            next(rest, None)
        elif word not in alone and word.partition("=")[0] not in with_value:
            found.append(word)
    return found
