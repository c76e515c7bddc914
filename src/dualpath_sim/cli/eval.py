"""`dualpath eval`: simulates the paper's evaluation and compares it with the paper's numbers."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath.cli.main import OutputPath
from dualpath.cli.output import print_skipped
from dualpath.cli.settings import add_settings
from dualpath.core.errors import ConfigError
from dualpath.report.model import Table
from dualpath_sim.cli.experiments import Group, add_harness_flags, command_line
from dualpath_sim.cli.simulation_inputs import CoreSettings, checked_core
from dualpath_sim.evaluation.settings import EvaluationSettings

if TYPE_CHECKING:
    from dualpath.workload.formats.lines import OnBroken
    from dualpath_sim.evaluation.experiment import FigureExperiment, Made
    from dualpath_sim.evaluation.runs import Inputs
    from dualpath_sim.evaluation.settings import Calibration
    from dualpath_sim.harness.experiment import Page
    from dualpath_sim.simulator.run import Core

#: In the order of the paper.
FIGURE_NAMES = (
    *("table1", "fig3", "table2"),
    *(f"fig{number}" for number in range(7, 15)),
    *("table3", "fig15"),
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath eval`."""
    parser = subparsers.add_parser(
        "eval",
        help="reproduce the paper's evaluation in the simulator",
        description="Simulate figures of the paper's evaluation and write Markdown, JSON, PNG and "
        "HTML for each, with setting, seed, and the numbers that the paper's text quotes. "
        "`three-rates` has all numbers with three fitted rates of the hardware, `candidates` asks "
        "what the model lacks; `beyond` and `dram-tier` are experiments beyond "
        "the paper. For several figures, give `--check` and `--redraw` the folder with a JSON of "
        "each.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "figures",
        nargs="+",
        choices=[*FIGURE_NAMES, "all", "three-rates", "candidates", "beyond", "dram-tier"],
        metavar="FIGURE",
        help=f"{', '.join(FIGURE_NAMES)}, all (of these), three-rates, candidates, beyond, or "
        "dram-tier",
    )
    add_harness_flags(parser, "", cells=False)
    parser.add_argument(
        "--docs",
        type=OutputPath,
        metavar="FILE.md",
        help="write one page with all of them, and plots next to it",
    )
    parser.add_argument(
        "--lab",
        metavar="DIR",
        help="folder with the JSON of the lab's experiments, for a column with its numbers",
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
    """Run, check or redraw the figures, print each and the comparison, write the files.

    Returns 0, or 1 if a number differs from that of ``--check``.  Raises ``ConfigError`` for
    invalid settings and files that cannot be read or written.
    """
    from dualpath.report.files import require_plots
    from dualpath.report.text import print_blocks
    from dualpath.workload.formats.lines import SkippedLines
    from dualpath_sim.evaluation.beyond import existing_traces
    from dualpath_sim.evaluation.document import write_document
    from dualpath_sim.evaluation.experiment import figure_of
    from dualpath_sim.evaluation.lab import lab_numbers, three_columns

    if args.docs:
        require_plots("--docs")
    lab = lab_numbers(Path(args.lab)) if args.lab else {}
    skipped = SkippedLines() if args.skip_broken else None
    traces = existing_traces(Path(args.traces)) if args.traces else {}
    experiments = _experiments(args.figures, traces, checked_core(args), skipped)
    check = _files("--check", args.check, experiments)
    redraw = _files("--redraw", args.redraw, experiments)
    figures = []
    codes: dict[str, int] = {}
    for name, experiment in experiments.items():
        args.report_name, args.check, args.redraw = name, check.get(name), redraw.get(name)
        page, code = _page(args, experiment)
        figures.append(figure_of(experiment, page.data))
        codes[name] = code
    if skipped is not None:
        print_skipped(skipped)
    if args.docs:
        write_document(figures, Path(args.docs), lab)
    if check:
        verdicts = tuple((name, "DIFFERS" if code else "same") for name, code in codes.items())
        print_blocks(Table("Beside the recorded runs", ("figure", "verdict"), verdicts))
    compared = [one for figure in figures for one in figure.compared]
    if compared and not figures[0].evaluation.quick:
        print_blocks(three_columns(compared, lab, "The paper, the simulator and the lab"))
    return max(codes.values())


def _page(args: argparse.Namespace, experiment: "FigureExperiment") -> "tuple[Page, int]":
    """Return a figure's page and the exit code of making it."""
    from dualpath_sim.harness.files import read

    group, name = Group({}), args.report_name
    if args.redraw and args.docs and not args.out:
        recorded = read(Path(args.redraw))
        return experiment.page(group.raw_data(experiment, recorded), name, recorded.command), 0
    words = [word for word in shlex.split(command_line()) if word not in args.figures]
    return group.page_of(args, experiment, shlex.join([*words[:2], name, *words[2:]]))


def _files(flag: str, path: str | None, names: "Mapping[str, FigureExperiment]") -> dict[str, str]:
    """Return the JSON file of every figure; raises ``ConfigError`` if one is not enough."""
    if path is None:
        return {}
    if Path(path).is_dir():
        return {name: str(Path(path) / f"{name}.json") for name in names}
    if len(names) > 1:
        raise ConfigError(
            f"{flag} {path} is one file for {len(names)} figures; give the folder with a JSON of "
            "each"
        )
    return dict.fromkeys(names, path)


def _experiments(
    names: Sequence[str], traces: Mapping[str, Path], core: "Core", on_broken: "OnBroken | None"
) -> "dict[str, FigureExperiment]":
    """Return the chosen experiments, each once, in the order of the paper."""
    from dualpath_sim.evaluation import beyond, dram_tier, three_rates
    from dualpath_sim.evaluation.experiment import figure_experiment
    from dualpath_sim.evaluation.figures import FIGURES, candidates
    from dualpath_sim.evaluation.inputs import CatalogInputs
    from dualpath_sim.evaluation.settings import AS_WRITTEN, THREE_RATES
    from dualpath_sim.simulator.run import simulate

    def inputs(settings: EvaluationSettings, calibration: "Calibration") -> "Inputs":
        key = (settings.tail, calibration)
        if key not in shared:
            shared[key] = CatalogInputs(settings.tail, traces, calibration, on_broken)
        return shared[key]

    shared: dict[tuple[str, Calibration], Inputs] = {}
    made: Made = {}
    builds = {name: build for name, build in FIGURES.items() if name in names or "all" in names}
    if "candidates" in names:
        builds["candidates"] = candidates.build
    if "beyond" in names:
        builds["beyond"] = partial(beyond.build, traces=traces)
    if "dram-tier" in names:
        builds["dram-tier"] = dram_tier.build
    if "three-rates" in names:
        builds["three-rates"] = three_rates.build
    calibrations = {"three-rates": THREE_RATES}
    return {
        name: figure_experiment(
            *(name, build, inputs, partial(simulate, core=core), made),
            calibrations.get(name, AS_WRITTEN),
        )
        for name, build in builds.items()
    }
