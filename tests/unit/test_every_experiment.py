"""Every experiment loads, has unique cells, and draws its page from recorded or published runs."""

from pathlib import Path

import msgspec
import pytest

from dualpath.report import markdown
from dualpath.report.files import as_json
from dualpath_lab.cli.chaos import CHAOS
from dualpath_lab.cli.lab import BENCH
from dualpath_sim.harness.check import agrees, compare
from dualpath_sim.harness.experiment import Page
from dualpath_sim.harness.files import DIGITS, read

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "evaluation" / "lab"
RECORDED = ROOT / "tests" / "data" / "experiments"
#: Experiments by name with their groups.
EXPERIMENTS = {name: (BENCH, name) for name in BENCH.entries} | {"chaos-run": (CHAOS, "run")}
#: Published files of each experiment; most are in an older format.
FILES = {
    "chaos-run": [path.stem for path in sorted(PUBLISHED.glob("chaos-*.json"))],
    "peers": ["peers-1p2d", "dram-peers"],
    "jct": [path.stem for path in sorted(PUBLISHED.glob("jct-*.json"))],
    "online": ["online", "online-split-0.6", "online-split-1.0"],
    "simulator": ["simulator", "simulator-balanced"],
    "isolation": ["isolation"],
    "data-plane": ["data-plane"],
    "dram": ["dram-pauses", "dram-pauses-all"],
    "sealed": ["sealed"],
    "roles": ["roles"],
    "quota-error": ["quota-error"],
    "attention-balance": ["attention-balance", "attention-balance-vllm"],
}
#: Pages in the present format: small samples, and a published one.
PAGES = [*sorted(RECORDED.glob("*.json")), PUBLISHED / "one-machine.json"]
#: Their runs are of files that the user gives.
WITHOUT_DEFAULT_CELLS = ("traces",)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_loads_and_has_unique_cells(name: str) -> None:
    group, word = EXPERIMENTS[name]
    experiment = group.entries[word].load()
    assert experiment.name == name
    stages = list(experiment.stages(experiment.settings, lambda text: None))
    cells = [cell for stage in stages for cell in stage.cells]
    assert len(cells) == len(set(cells))
    if name not in WITHOUT_DEFAULT_CELLS:
        assert cells or all(stage.next_cell is not None for stage in stages)
    assert name in FILES or name in {path.stem for path in PAGES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_recorded_page_is_drawn_again_from_its_runs(path: Path) -> None:
    group, word = EXPERIMENTS[path.stem]
    experiment = group.entries[word].load()
    recorded = read(path)
    page = group.redrawn(experiment, recorded)
    assert msgspec.json.decode(as_json(page, DIGITS), type=Page) == recorded
    assert markdown.page(page.report())
    assert agrees(compare(page, page))


@pytest.mark.parametrize(
    ("name", "file"), [(name, file) for name, files in FILES.items() for file in files]
)
def test_a_page_can_be_drawn_from_every_published_file(name: str, file: str) -> None:
    group, word = EXPERIMENTS[name]
    experiment = group.entries[word].load()
    recorded = read(PUBLISHED / f"{file}.json")
    raw = group.raw_data(experiment, recorded)
    page = experiment.page(raw, recorded.name, recorded.command)
    assert markdown.page(page.report())
    # A file in an older format is returned as stored.
    redrawn = group.redrawn(experiment, recorded)
    assert redrawn is recorded or msgspec.json.decode(as_json(redrawn, DIGITS), type=Page) == (
        recorded
    )
    # A rerun has something to be compared with, and published targets are as they were.
    assert page.results
    drawn = {result.what: result for result in page.results}
    for target in recorded.results:
        if target.what in drawn and target.measured is not None:
            assert drawn[target.what].measured == pytest.approx(target.measured, rel=1e-4)
            assert drawn[target.what].met is target.met
    assert agrees(compare(page, page))
