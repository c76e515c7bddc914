"""`dualpath eval`: simulates the paper's evaluation and compares it with the paper's numbers."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath.cli.main import OutputFolder, OutputPath
from dualpath.cli.output import print_skipped, warn_if_no_plots
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.errors import ConfigError
from dualpath_sim.cli.experiments import EXIT_DIFFERS, values
from dualpath_sim.cli.simulation_inputs import CoreSettings, checked_core
from dualpath_sim.evaluation.settings import EvaluationSettings

if TYPE_CHECKING:
    from dualpath.workload.formats.lines import OnBroken
    from dualpath_sim.evaluation.report import FigureReport
    from dualpath_sim.evaluation.runs import Runs
    from dualpath_sim.evaluation.settings import Calibration, RunSpec
    from dualpath_sim.simulator.run import Core

FIGURE_NAMES = (
    "fig3",
    *(f"fig{number}" for number in range(7, 16)),
    "table3",
    "candidates",
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath eval`."""
    parser = subparsers.add_parser(
        "eval",
        help="reproduce the paper's evaluation in the simulator",
        description="Simulate figures of the paper's evaluation and write Markdown, JSON, PNG and "
        "HTML for each, with setting, seed, and the numbers that the paper's text quotes. `beyond` "
        "and `dram-tier` are experiments beyond the paper.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "figures",
        nargs="+",
        choices=[*FIGURE_NAMES, "all", "beyond", "dram-tier"],
        metavar="FIGURE",
        help=f"{', '.join(FIGURE_NAMES)}, all (of these), beyond, or dram-tier",
    )
    parser.add_argument("--out", type=OutputFolder, metavar="DIR", help="write the files here")
    parser.add_argument(
        "--docs",
        type=OutputPath,
        metavar="FILE.md",
        help="write one page with all of them, and plots next to it",
    )
    parser.add_argument(
        "--check",
        metavar="FILE.json",
        help="compare the one figure with the JSON that an earlier run wrote, with its settings; "
        "exit code 1 if a number differs",
    )
    add_settings(parser, EvaluationSettings, without=("tail_share",))
    add_settings(parser, CoreSettings)
    parser.add_argument(
        "--traces",
        metavar="DIR",
        help="folder with real traces for `beyond`; missing traces are left out and named",
    )
    parser.add_argument(
        "--skip-broken", action="store_true", help="skip and count invalid lines of these traces"
    )


def run(args: argparse.Namespace) -> int:
    """Run the simulations, print the comparison, write the files.

    Returns 0, or 1 if a number differs from that of ``--check``.  Raises ``ConfigError`` for
    invalid settings and files that cannot be read or written.
    """
    import msgspec

    from dualpath.report import markdown
    from dualpath.report.files import require_plots
    from dualpath.workload.formats.lines import SkippedLines
    from dualpath_sim.evaluation.beyond import existing_traces
    from dualpath_sim.evaluation.document import write_document, write_figure
    from dualpath_sim.evaluation.report import comparison_table, with_key_results
    from dualpath_sim.evaluation.settings import AS_WRITTEN, AT_48K
    from dualpath_sim.harness.check import agrees, compare

    warn_if_no_plots(args.out)
    if args.docs:
        require_plots("--docs")

    expected = _recorded(args)
    defaults = {} if expected is None else values(expected.evaluation)
    settings = flag_settings(args, EvaluationSettings, defaults=defaults)
    traces = existing_traces(Path(args.traces)) if args.traces else {}
    core = checked_core(args)
    skipped = SkippedLines()
    on_broken = skipped if args.skip_broken else None
    runs = _runs(settings, core, traces, AS_WRITTEN, on_broken)
    # Its reports are the same lines again.
    second = _runs(settings, core, traces, AT_48K, SkippedLines() if on_broken else None)
    reports = []
    for build in _chosen(args.figures, traces):
        report = build(runs)
        if report.compared:
            compared = build(second).compared
            report = msgspec.structs.replace(report, compared_at_48k=compared)
        report = with_key_results(report)
        reports.append(report)
        if args.out:
            write_figure(report, Path(args.out))
        else:
            print(markdown.page(report.report()))
    print_skipped(skipped)
    if args.docs:
        write_document(reports, Path(args.docs))
    all_compared = [one for report in reports for one in report.compared]
    at_48k = [one for report in reports for one in report.compared_at_48k]
    if all_compared and args.out:
        table = comparison_table(all_compared, quick=settings.quick, at_48k=at_48k)
        print(markdown.table(table))
    if expected is None:
        return 0
    differences = compare(expected, reports[0])
    print(markdown.table(differences))
    return 0 if agrees(differences) else EXIT_DIFFERS


def _recorded(args: argparse.Namespace) -> "FigureReport | None":
    """Return the figure of ``--check``, None without it; raises ``ConfigError``."""
    if not args.check:
        return None
    from dualpath_sim.evaluation.document import read_figure

    figure = read_figure(Path(args.check))
    if args.figures != [figure.name]:
        raise ConfigError(
            f"--check {args.check} is of {figure.name}; give `dualpath eval {figure.name}`"
        )
    return figure


def _chosen(
    names: Sequence[str], traces: Mapping[str, Path]
) -> "list[Callable[[Runs], FigureReport]]":
    """Return the builders of the selected reports, each once, in the order of the paper."""
    from dualpath_sim.evaluation import beyond, dram_tier
    from dualpath_sim.evaluation.figures import FIGURES

    chosen = [build for name, build in FIGURES.items() if name in names or "all" in names]
    if "beyond" in names:
        chosen.append(partial(beyond.build, traces=traces))
    if "dram-tier" in names:
        chosen.append(dram_tier.build)
    return chosen


def _runs(
    settings: "EvaluationSettings",
    core: "Core",
    traces: Mapping[str, Path],
    calibration: "Calibration",
    on_broken: "OnBroken | None",
) -> "Runs":
    from dualpath_sim.evaluation.inputs import CatalogInputs
    from dualpath_sim.evaluation.runs import Runs
    from dualpath_sim.simulator.run import simulate

    return Runs(
        settings,
        CatalogInputs(settings.tail, traces, calibration, on_broken),
        partial(simulate, core=core),
        _Progress(),
        calibration,
    )


class _Progress:
    """Prints to stderr which run begins, and the CPU time so far."""

    def __init__(self) -> None:
        self._made = 0
        self._start_cpu_s = time.process_time()

    def __call__(self, spec: "RunSpec") -> None:
        self._made += 1
        used_s = time.process_time() - self._start_cpu_s
        line = f"run {self._made}, {used_s:.0f} CPU-s so far: {spec.title}"
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr)
