"""The harness of experiments: runs in rounds, interruptions, busy machines, checks of reruns."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from dualpath.core.errors import ConfigError, EngineLostError
from dualpath.core.settings import Setting, Settings
from dualpath.node.machine import ClientMachine
from dualpath.report.model import Table
from dualpath_sim.cli.experiments import Entry, Group
from dualpath_sim.harness.check import agrees, compare
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    RawData,
    Run,
    Stage,
    one_stage,
)
from dualpath_sim.harness.files import read
from dualpath_sim.harness.run import measure


class Toy(Settings, frozen=True, kw_only=True):
    """Two disks with two block sizes, and one without a choice."""

    repeat: Annotated[int, Setting("rounds", ge=1)] = 2
    folder: Annotated[str, Setting("storage", metavar="DIR")] = ""
    inner: "Inner"


class Inner(Settings, frozen=True, kw_only=True):
    """Settings in settings."""

    blocks: Annotated[int, Setting("blocks", ge=1)] = 3


class Rate(msgspec.Struct, frozen=True):
    """The result of a run."""

    mb_per_s: float
    busy: float = 0.0


class Bench:
    """An experiment of two stages and three cells that records what it does."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.before_run: Callable[[str, int], Rate | None] = lambda cell, number: None
        self.experiment: Experiment[Toy, Rate] = Experiment(
            name="toy",
            title="A toy",
            settings=Toy(inner=Inner()),
            result=Rate,
            stages=self.stages,
            draw=self.draw,
            summary=lambda rate: f"{rate.mb_per_s:g} MB/s",
            too_busy=lambda settings, rate: rate.busy > 0.85,
        )

    def stages(self, settings: Toy, _: object) -> list[Stage[float, Rate]]:
        @contextmanager
        def open_disk(disk: str) -> Iterator[Callable[[float, int], Rate]]:
            self.log.append(f"open {disk}")
            yield lambda factor, number: self.run(disk, factor, number)
            self.log.append(f"close {disk}")

        return [
            Stage({"fast small": 1.0, "fast large": 2.0}, lambda: open_disk("fast")),
            Stage({"slow small": 0.1}, lambda: open_disk("slow")),
        ]

    def run(self, disk: str, factor: float, number: int) -> Rate:
        self.log.append(f"{disk} {factor:g} {number}")
        return self.before_run(disk, number) or Rate(100 * factor + number)

    def draw(self, raw: RawData[Toy, Rate]) -> Page:
        rows = tuple((cell, f"{raw.median(cell, rate):.1f}") for cell in raw.cells)
        ratio = raw.ratio("fast large", "fast small", rate)
        return Page(
            settings=(f"{raw.settings.inner.blocks} blocks.",),
            tables=(Table("Rates", ("cell", "MB/s"), rows),),
            results=(
                KeyResult("large / small", ratio, 1.5, tolerance=0.05, any_machine=True),
                KeyResult("fast", raw.median("fast small", rate), tolerance=0.1),
                KeyResult("wrong blocks", 0, 0, at_least=False),
            ),
        )


def rate(one: Rate) -> float:
    return one.mb_per_s


def page(bench: Bench, raw: RawData[Toy, Rate]) -> Page:
    return bench.experiment.page(raw, "toy", "dualpath lab bench toy")


def test_every_round_runs_all_cells_of_a_stage_in_one_set_up() -> None:
    bench = Bench()
    raw = measure(bench.experiment, bench.experiment.settings)
    assert bench.log == [
        *("open fast", "fast 1 0", "fast 2 0", "fast 1 1", "fast 2 1", "close fast"),
        *("open slow", "slow 0.1 0", "slow 0.1 1", "close slow"),
    ]
    assert raw.of("fast large") == [Rate(200), Rate(201)]
    assert raw.ratio("fast large", "fast small", rate) == pytest.approx((2 + 201 / 101) / 2)
    assert raw.ratio("fast large", "slow large", rate) is None


def test_interrupted_runs_are_continued() -> None:
    bench = Bench()
    stored: list[RawData[Toy, Rate]] = []

    def interrupt(disk: str, number: int) -> None:
        if (disk, number) == ("slow", 1):
            raise KeyboardInterrupt

    bench.before_run = interrupt
    with pytest.raises(KeyboardInterrupt):
        measure(bench.experiment, bench.experiment.settings, after_run=stored.append)
    assert len(stored[-1].runs) == 5
    resumed = Bench()
    raw = measure(resumed.experiment, resumed.experiment.settings, earlier=stored[-1])
    assert resumed.log == ["open slow", "slow 0.1 1", "close slow"]
    assert [(run.cell, run.round) for run in raw.runs][-2:] == [
        ("slow small", 0),
        ("slow small", 1),
    ]


def test_only_the_wanted_cells_run() -> None:
    bench = Bench()
    settings = Toy(inner=Inner(), repeat=1)
    raw = measure(bench.experiment, settings, wanted=lambda cell: "small" in cell)
    assert raw.cells == ["fast small", "slow small"]


def test_a_run_on_a_busy_machine_is_repeated_three_times_at_most() -> None:
    bench = Bench()
    busy = iter([0.9, 0.2, *[0.9] * 3])
    bench.before_run = lambda disk, number: Rate(5.0, next(busy)) if disk == "fast" else None
    said: list[str] = []
    raw = measure(bench.experiment, Toy(inner=Inner(), repeat=1), said.append)
    assert [(run.rejected, run.result.busy) for run in raw.runs] == [(1, 0.2), (2, 0.9), (0, 0.0)]
    assert raw.rejected == 3
    assert said[0] == "fast small: the machine was too busy (5 MB/s)"


def test_a_failed_run_ends_the_experiment_unless_it_keeps_going() -> None:
    bench = Bench()

    def fail(disk: str, number: int) -> None:
        if (disk, number) == ("fast", 0):
            raise EngineLostError("gone")

    bench.before_run = fail
    with pytest.raises(EngineLostError):
        measure(bench.experiment, bench.experiment.settings)
    going = msgspec.structs.replace(bench.experiment, keep_going=True)
    said: list[str] = []
    raw = measure(going, going.settings, said.append)
    assert len(raw.of("fast small")) == len(raw.of("fast large")) == 1
    assert said[0] == "1/2 fast small failed and is left out: gone"


def test_a_search_decides_after_every_run_which_cell_is_next() -> None:
    def next_rate(runs: list[Run[Rate]]) -> tuple[str, float] | None:
        found = 2.0 ** len(runs)
        return (f"{found:g}/s", found) if found < 8 else None

    def run(rate_per_s: float, number: int) -> Rate:
        return Rate(rate_per_s)

    stages: list[Stage[float, Rate]] = one_stage({}, run)
    (stage,) = stages
    bench = Bench()
    experiment: Experiment[Toy, Rate] = msgspec.structs.replace(
        bench.experiment, stages=lambda *_: [msgspec.structs.replace(stage, next_cell=next_rate)]
    )
    assert measure(experiment, experiment.settings).cells == ["1/s", "2/s", "4/s"]


def verdicts(expected: Page, rerun: Page) -> list[str]:
    return [row[-1] for row in compare(expected, rerun).rows]


def test_a_rerun_is_compared_with_the_tolerance_that_the_page_states() -> None:
    bench = Bench()
    expected = page(bench, measure(bench.experiment, bench.experiment.settings))
    assert expected.settings[-1] == (
        "`--check` compares a rerun with 1 number within 5% on any machine and 1 number within 10% "
        "on the same processor."
    )
    assert verdicts(expected, expected) == ["same"] * 3
    slow = Bench()
    slow.before_run = lambda disk, number: Rate(80.0)
    differs = page(slow, measure(slow.experiment, slow.experiment.settings))
    assert verdicts(expected, differs) == ["DIFFERS", "DIFFERS", "same"]
    assert not agrees(compare(expected, differs))
    elsewhere = ClientMachine(64, "another", 1, "linux", "3.11")
    raw = msgspec.structs.replace(
        measure(slow.experiment, slow.experiment.settings), machine=elsewhere
    )
    assert verdicts(expected, page(slow, raw)) == ["DIFFERS", "not compared", "same"]
    assert verdicts(page(slow, raw), page(slow, raw)) == ["same"] * 3


def test_a_missing_result_and_a_limit_that_is_no_longer_met_differ() -> None:
    met = Page(
        results=(KeyResult("lost", 0, 0, at_least=False), KeyResult("p99", 1.0, tolerance=0.1))
    )
    missed = Page(results=(KeyResult("lost", 2, 0, at_least=False),))
    assert verdicts(met, missed) == ["DIFFERS", "MISSING"]
    # What was not met before does not have to be met.
    assert verdicts(missed, Page(results=(KeyResult("lost", 9, 0, at_least=False),))) == ["same"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `toy WORDS` as a command."""
    bench = Bench()
    group = Group({"toy": Entry("a toy", "toys:TOY")})
    monkeypatch.setattr(Entry, "load", lambda entry: bench.experiment)

    def run(*words: str) -> int:
        parser = argparse.ArgumentParser(prog="dualpath lab bench")
        group.add_parsers(parser)
        monkeypatch.setattr("sys.argv", ["dualpath", "lab", "bench", *words])
        return group.run(parser.parse_args(words))

    run.bench = bench  # type: ignore[attr-defined]
    return run


def test_a_command_writes_resumes_redraws_and_checks(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path), "--folder", "/some/where", "--blocks", "7")
    assert command("toy", *out, "--repeat", "1") == 0
    file = tmp_path / "toy.json"
    recorded = read(file)
    assert recorded.command == "dualpath lab bench toy --folder where --blocks 7 --repeat 1"
    assert recorded.data["settings"] == {
        "repeat": 1,
        "folder": "where",
        "inner": {"blocks": 7},
    }
    written = (tmp_path / "toy.md").read_text()
    assert "7 blocks." in written
    (tmp_path / "toy.md").unlink()
    command.bench.log.clear()
    assert command("toy", "--redraw", str(file)) == 0
    assert command("toy", *out, "--repeat", "1", "--resume") == 0
    assert command.bench.log == []
    assert (tmp_path / "toy.md").read_text() == written
    with pytest.raises(ConfigError, match="other settings"):
        command("toy", *out, "--resume")
    # The settings are the file's.
    assert command("toy", "--check", str(file)) == 0
    assert command.bench.log.count("fast 1 0") == 1
    assert "fast 1 1" not in command.bench.log
    command.bench.before_run = lambda disk, number: Rate(1.0)
    assert command("toy", "--check", str(file)) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_a_check_repeats_only_the_cells_of_the_file(command: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "toy.json")
    assert command("toy", "--out", str(tmp_path), "--repeat", "1", "--only", "fast") == 0
    command.bench.log.clear()
    assert command("toy", "--check", file) == 0
    assert command.bench.log == ["open fast", "fast 1 0", "fast 2 0", "close fast"]
    # What is not chosen is not missing.
    assert command("toy", "--check", file, "--only", "small") == 0
    with pytest.raises(ConfigError, match="correct --only"):
        command("toy", "--check", file, "--only", "slow")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "no data of the experiment toy"),
        ("[]", "is not the JSON of an experiment"),
        (
            '{"data": {"experiment": "other", "settings": {}, "runs": []}}',
            "is of the experiment other",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(
    command: Any, tmp_path: Path, content: str, reason: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        command("toy", "--check", str(file))
    with pytest.raises(ConfigError, match="No such file"):
        command("toy", "--redraw", str(tmp_path / "missing.json"))
