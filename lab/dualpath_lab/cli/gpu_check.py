"""`dualpath gpu-check`: checks and measures a machine with GPUs, phase by phase."""

import argparse
from pathlib import Path

from dualpath.cli.output import print_progress
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.cli.signals import sigterm_as_interrupt
from dualpath_lab.gpu.settings import GpuCheckSettings

_DESCRIPTION = """\
Checks and measures a machine with one GPU or two: facts and libs describe it, plain and pair
compare the answers of a plain vLLM with those of a prefill and a decode engine, nixl moves bytes
between processes, jct replays agents in several modes, bench measures prefill beside loads and
copies. Each phase is a process with a time limit; what a phase has found is kept if it fails. The
folder has a JSON file for each phase, their logs, and report.md. Exit code 1 if a phase failed or
there is no GPU. No GPU has run it yet."""
_EPILOG = """\
dualpath gpu-check --out report
dualpath gpu-check --phases facts,libs,bench --out report --limit-s 120
"""
EXIT_FAILED = 1


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath gpu-check`."""
    parser = subparsers.add_parser(
        "gpu-check",
        help="check and measure a machine with GPUs, phase by phase",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", default="runs/gpu-check", help="folder of results, logs and report.md"
    )
    add_settings(parser, GpuCheckSettings)


def run(args: argparse.Namespace) -> int:
    """Run the phases; returns 1 if one was not successful or there is no GPU.

    Raises ``ConfigError`` for invalid settings or a folder that cannot be written.
    """
    from dualpath_lab.gpu.page import PAGE
    from dualpath_lab.gpu.run import NO_GPU, run_phases
    from dualpath_lab.gpu.settings import gpus

    settings = flag_settings(args, GpuCheckSettings)
    if settings.rehearse:
        settings = settings.for_rehearsal()
    found = gpus(settings.devices)
    if not found and not settings.rehearse:
        print(f"dualpath: {NO_GPU}: only facts and libs run", flush=True)
    out = Path(args.out)
    with sigterm_as_interrupt():
        results = run_phases(settings, out, found, print_progress)
    print(f"dualpath: report: {out / PAGE}", flush=True)
    passed = all(result.ok for result in results)
    return 0 if passed and (found or settings.rehearse) else EXIT_FAILED
