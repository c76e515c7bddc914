"""`dualpath chaos run`: faults on the real processes of a cluster under load."""

import argparse
import shlex
import sys
from pathlib import Path

from dualpath.cli.output import print_progress, warn_if_no_plots
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.cli.termination import sigterm_as_interrupt
from dualpath.core.errors import ConfigError
from dualpath.laboratory.chaos.points import EngineKind
from dualpath.laboratory.chaos.settings import (
    ChaosSettings,
    EmulatedEnginesSettings,
    LoadSettings,
    VllmEnginesSettings,
)

_DESCRIPTION = """Start a cluster of emulated engines, send requests of agents continuously, and
kill, stop and restart its processes, reset its connections, make its storage fail and corrupt
stored blocks, each fault at a step of a request. Every token is compared with the expected one,
every byte of KV at its destination. Exit code 1 if a request was late, wrong or ended without a
clear error, or if anything was left behind."""
_EXIT_UNCLEAN = 1


def add_action(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `dualpath chaos run`."""
    parser = actions.add_parser(
        "run",
        help="kill, stop and disconnect real processes, make storage fail",
        description=_DESCRIPTION,
    )
    parser.add_argument("--name", default="chaos-run", help="base name of the report's files")
    parser.add_argument("--out", metavar="DIR", help="write the report to this folder")
    parser.add_argument(
        "--logs", metavar="DIR", help="new folder for logs and storage (default: a temporary one)"
    )
    add_settings(parser, ChaosSettings)
    add_settings(parser, LoadSettings, title="agents")
    add_settings(parser, EmulatedEnginesSettings, title="engines")
    add_settings(parser, VllmEnginesSettings, title="vLLM engines")
    parser.set_defaults(act=run)


def run(args: argparse.Namespace) -> int:
    """Run a campaign and print its report; return 1 if there are findings.

    Raises:
        ConfigError: invalid settings, or a folder for logs that exists already.
        EngineLostError, DeadlineError: the cluster did not start.
    """
    import asyncio
    import tempfile

    from dualpath.laboratory.chaos.campaign import Campaign
    from dualpath.laboratory.chaos.kinds import EmulatedEngines, EnginesUnderTest, VllmEngines
    from dualpath.laboratory.chaos.report import chaos_report
    from dualpath.laboratory.experiments.report import as_report, write_experiment
    from dualpath.report.text import print_report

    warn_if_no_plots(args.out)
    settings = flag_settings(args, ChaosSettings)
    load = flag_settings(args, LoadSettings)
    engines: EnginesUnderTest
    if settings.engines is EngineKind.VLLM:
        engines = VllmEngines(flag_settings(args, VllmEnginesSettings))
    else:
        engines = EmulatedEngines(flag_settings(args, EmulatedEnginesSettings))
    with tempfile.TemporaryDirectory(prefix="dualpath-chaos-") as dropped:
        folder = _new_folder(args.logs) if args.logs else Path(dropped)
        # SIGTERM raises an exception, which stops all processes.
        with sigterm_as_interrupt():
            result = asyncio.run(Campaign(settings, load, engines, folder, print_progress).run())
    report = chaos_report(result, args.name, _command_line())
    print_report(as_report(report))
    if args.out:
        for path in write_experiment(report, Path(args.out)):
            print_progress(f"wrote {path}")
    return 0 if result.is_clean else _EXIT_UNCLEAN


def _new_folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--logs {path}: {error.strerror}; give a new folder") from None
    return folder


def _command_line() -> str:
    """Return the command line without the flags of output folders."""
    arguments = sys.argv[1:]
    for flag in ("--out", "--logs", "--storage"):
        if flag in arguments:
            place = arguments.index(flag)
            del arguments[place : place + 2]
    return shlex.join(["dualpath", *arguments])
