"""Figures of the paper as experiments of the harness: each run that a figure needs is a cell.

A figure requests its runs one after the other, and some depend on earlier ones (the capacities of
Fig. 10).  So the stage of a figure draws it from the runs so far: the first run that is missing is
the next cell.  Drawing the page again needs no simulation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath_sim.evaluation.report import FigureReport, with_key_results
from dualpath_sim.evaluation.runs import (
    Computed,
    Impossible,
    Inputs,
    NotRecordedError,
    OfflineRun,
    RecordedRuns,
    Result,
    Runs,
    Simulate,
)
from dualpath_sim.evaluation.settings import AS_WRITTEN, AT_48K, Calibration, EvaluationSettings
from dualpath_sim.harness.experiment import (
    Experiment,
    Progress,
    RawData,
    Run,
    Stage,
    nothing_to_set_up,
)

Build = Callable[[Runs], FigureReport]
MakeInputs = Callable[[EvaluationSettings, Calibration], Inputs]
Made = dict[tuple[EvaluationSettings, str], Result]
"""Results by settings and cell, which the figures of one command share."""

FigureExperiment = Experiment[EvaluationSettings, Result]


def figure_experiment(
    name: str,
    build: Build,
    inputs: MakeInputs,
    simulate: Simulate,
    made: Made,
    calibration: Calibration = AS_WRITTEN,
) -> FigureExperiment:
    """Return the experiment of a figure; runs that are in ``made`` are not made again.

    Numbers that the paper quotes are also made with the second calibration.
    """

    def figure(settings: EvaluationSettings, runs: Sequence[Run[Result]]) -> FigureReport:
        """Draw the figure; raises ``NotRecordedError`` for a run that it lacks."""
        results = {run.cell: run.result for run in runs}

        def under(chosen: Calibration) -> FigureReport:
            recorded = RecordedRuns(settings, inputs(settings, chosen), simulate, chosen)
            recorded.results = results
            return build(recorded)

        report = under(calibration)
        if report.compared:
            second = under(AT_48K).compared
            report = msgspec.structs.replace(report, compared_at_48k=second)
        return report

    def stages(settings: EvaluationSettings, progress: Progress) -> list[Stage[Any, Result]]:
        def next_cell(runs: Sequence[Run[Result]]) -> tuple[str, Any] | None:
            try:
                figure(settings, runs)
            except NotRecordedError as missing:
                return missing.cell, missing
            return None

        def run(missing: NotRecordedError, number: int) -> Result:
            key = (settings, missing.cell)
            if key not in made:
                made[key] = missing.make()
            return made[key]

        return [Stage({}, lambda: nothing_to_set_up(run), next_cell)]

    def draw(raw: RawData[EvaluationSettings, Result]) -> FigureReport:
        try:
            return with_key_results(figure(raw.settings, raw.runs))
        except NotRecordedError as missing:
            raise ConfigError(
                f"the runs of {name} lack {missing.cell!r}; finish them with --resume"
            ) from None

    return Experiment(
        name=name,
        title="",
        settings=EvaluationSettings(),
        result=Result,
        stages=stages,
        draw=draw,
        summary=_summary,
        fixed=("tail_share",),
        packages=("dualpath", "numpy", "numba"),
    )


def figure_of(
    experiment: FigureExperiment, raw: RawData[EvaluationSettings, Result]
) -> FigureReport:
    """Return the figure of raw data, without the lines about the machine of its runs."""
    report = experiment.draw(raw)
    assert isinstance(report, FigureReport)
    return report


def _summary(result: Result) -> str:
    match result:
        case OfflineRun():
            return f"JCT {result.jct_s:,.0f} s"
        case Computed():
            return f"{len(result.numbers)} numbers"
        case Impossible():
            return result.reason
        case _:
            return f"{result.ending.rule} at {result.ending.at_s:,.0f} s"
