"""Makes the runs of an experiment: in rounds, repeated on a busy machine, stored after each run."""

import datetime
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError, DeadlineError, EngineLostError
from dualpath.node.machine import this_machine
from dualpath_sim.harness.experiment import Experiment, Measure, Progress, R, RawData, Run, S, Stage

#: Maximum of attempts at a run on a too busy machine; the last one counts in any case.
ATTEMPTS = 3


def measure(
    experiment: Experiment[S, R],
    settings: S,
    progress: Progress = lambda text: None,
    *,
    wanted: Callable[[str], bool] = lambda cell: True,
    earlier: RawData[S, R] | None = None,
    after_run: Callable[[RawData[S, R]], None] = lambda raw: None,
) -> RawData[S, R]:
    """Make the runs that ``earlier`` lacks and return all of them.

    In every round each cell is run once, so that changes of the machine affect all cells.
    ``wanted`` selects cells by name, but not those of a search.  ``after_run`` gets the data after
    every run.  Raises what a run raises, unless the experiment keeps going, and ``ConfigError``
    without any result.
    """
    found = earlier or RawData(
        experiment=experiment.name,
        settings=without_folders(settings),
        runs=[],
        machine=this_machine(),
        versions=_versions(experiment.packages),
        load_average=os.getloadavg()[2],
    )
    for stage in experiment.stages(settings, progress):
        loop = _Loop(experiment, stage, found, progress, after_run)
        found = loop.search() if stage.next_cell else loop.rounds(wanted)
    if not found.runs:
        raise ConfigError(
            f"no run of {experiment.name} has a result: all failed, or no cell is chosen; correct "
            "--only"
        )
    return found


class _Loop:
    """The runs of one stage; ``raw`` holds those of all stages so far."""

    def __init__(
        self,
        experiment: Experiment[Any, Any],
        stage: Stage[Any, Any],
        raw: RawData[Any, Any],
        progress: Progress,
        after_run: Callable[[RawData[Any, Any]], None],
    ) -> None:
        self._experiment = experiment
        self._stage = stage
        self._raw = raw
        self._progress = progress
        self._after_run = after_run

    def rounds(self, wanted: Callable[[str], bool]) -> RawData[Any, Any]:
        """Run every wanted cell in every round."""
        rounds = self._experiment.repeat(self._raw.settings)
        done = {(run.cell, run.round) for run in self._raw.runs}
        missing = [
            (number, cell)
            for number in range(rounds)
            for cell in self._stage.cells
            if wanted(cell) and (cell, number) not in done
        ]
        if not missing:
            return self._raw
        with self._stage.open() as run:
            for number, cell in missing:
                self._run(run, cell, self._stage.cells[cell], number, f"{number + 1}/{rounds} ")
        return self._raw

    def search(self) -> RawData[Any, Any]:
        """Run the cells that the stage asks for, one after the other."""
        next_cell = self._stage.next_cell
        assert next_cell is not None
        with self._stage.open() as run:
            while (found := next_cell(self._raw.runs)) is not None:
                cell, parameters = found
                number = sum(one.cell == cell for one in self._raw.runs)
                self._run(run, cell, parameters, number, "")
        return self._raw

    def _run(
        self, run: Measure[Any, Any], cell: str, parameters: object, number: int, prefix: str
    ) -> None:
        try:
            made = self._not_spoilt(run, cell, parameters, number)
        except (EngineLostError, DeadlineError) as error:
            if not self._experiment.keep_going:
                raise
            self._progress(f"{prefix}{cell} failed and is left out: {error}")
            return
        self._progress(f"{prefix}{cell}: {self._experiment.summary(made.result)}")
        self._raw = msgspec.structs.replace(
            self._raw,
            runs=[*self._raw.runs, made],
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        )
        self._after_run(self._raw)

    def _not_spoilt(
        self, run: Measure[Any, Any], cell: str, parameters: object, number: int
    ) -> Run[Any]:
        """Return the first run that a busy machine has not spoilt, else the last attempt."""
        rejected = 0
        while True:
            result = run(parameters, number)
            spoilt = self._experiment.too_busy(self._raw.settings, result)
            if not spoilt or rejected == ATTEMPTS - 1:
                return Run(cell=cell, round=number, result=result, rejected=rejected)
            rejected += 1
            self._progress(f"{cell}: the machine was too busy ({self._experiment.summary(result)})")


def without_folders(settings: S) -> S:
    """Return settings in which absolute paths are reduced to their names, as raw data has them."""

    def named(value: Any) -> Any:  # noqa: ANN401 - plain data
        if isinstance(value, str):
            return Path(value).name if value.startswith("/") else value
        if isinstance(value, list):
            return [named(one) for one in value]
        if isinstance(value, dict):
            return {key: named(one) for key, one in value.items()}
        return value

    return msgspec.convert(named(msgspec.to_builtins(settings)), type(settings))


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
