"""Each cell is a measurement, interrupted ones are continued, the page names missing cells."""

import msgspec
import pytest

from dualpath.core.errors import EngineLostError
from dualpath.node.machine import this_machine
from dualpath.report import markdown
from dualpath.workload.replay.result import Distribution
from dualpath_lab.benchmarks.peers import comparison, matrix
from dualpath_lab.benchmarks.peers.comparison import DUALPATH, Stack, measurement, parse_arguments
from dualpath_lab.benchmarks.peers.matrix import (
    Agents,
    Bound,
    Cell,
    Fits,
    cells,
    matrix_report,
    waits_for,
)
from dualpath_lab.benchmarks.peers.one_run import RunRecord
from dualpath_lab.experiments.report import as_report
from dualpath_lab.models.random_models import KV_BYTES

CELL = Cell(Agents.SHORT, Bound.STORAGE, Fits.NOTHING, pauses=False)
TTFT = Distribution(count=2, mean=1.0, p50=1.0, p90=2.0, p99=2.0, max=2.0)


def run(stack: str, jct_s: float, *, failed: int = 0, read_bytes: int = 0) -> RunRecord:
    return RunRecord(
        stack=stack,
        aggregated=False,
        jct_s=jct_s,
        ttft_s=TTFT,
        tpot_s=None,
        prompt_tokens=1000,
        hit_tokens=900,
        turns=2,
        turns_failed=failed,
        snic_bytes={"pe0": read_bytes, "de0": 0},
        cnic_in_bytes={"pe0": 0, "de0": 0},
        stored_bytes=10,
        busy=0.5,
        cpu_s={"pe0": 3.0, "de0": 2.0},
        digests={"a/0": "x"},
        errors=[],
    )


def measured(*runs: RunRecord):
    return measurement(CELL.arguments([]), list(runs))


def test_every_combination_is_a_cell_with_a_unique_name():
    found = list(cells())
    assert len(found) == len({cell.name for cell in found}) == 36


@pytest.mark.parametrize("cell", list(cells()), ids=lambda cell: cell.name)
def test_agents_fit_the_model_and_one_context_fits_the_dram(cell):
    args = cell.arguments([])
    longest = max(comparison.session(args, n).trajectory.total_tokens for n in range(args.agents))
    assert longest <= args.max_model_len
    assert args.dram_mib << 20 >= longest * KV_BYTES
    assert args.max_model_len * KV_BYTES <= args.hbm_mib << 20


def test_dram_holds_all_agents_a_quarter_of_them_or_one():
    def dram_bytes(fits: Fits) -> int:
        cell = Cell(Agents.SHORT, Bound.STORAGE, fits, pauses=False)
        dram_mib: int = cell.arguments([]).dram_mib
        return dram_mib << 20

    args = CELL.arguments([])
    working_set_bytes = KV_BYTES * sum(
        comparison.session(args, n).trajectory.total_tokens for n in range(args.agents)
    )
    assert dram_bytes(Fits.ALL) > working_set_bytes
    assert dram_bytes(Fits.QUARTER) == pytest.approx(working_set_bytes / 4, rel=0.02)
    assert dram_bytes(Fits.NOTHING) < dram_bytes(Fits.QUARTER) / 2


@pytest.fixture
def stacks_run(monkeypatch):
    """Records which stacks ran; each of ``broken`` fails once."""
    ran: list[str] = []
    broken: list[str] = []

    def run_once(args, stack, *rest):
        ran.append(stack.name)
        if stack.name in broken:
            broken.remove(stack.name)
            raise EngineLostError("gone")
        return run(stack.name, 1.0)

    monkeypatch.setattr(comparison, "_run_once", run_once)
    return ran, broken


def test_finished_runs_are_not_repeated(stacks_run, tmp_path, monkeypatch):
    ran, broken = stacks_run
    broken.append(DUALPATH)
    words = ["matrix", "--out", str(tmp_path), "--cell", CELL.name, "--modes", "basic,split"]
    monkeypatch.setattr("sys.argv", words)
    matrix.main()
    assert ran == ["dualpath-basic", DUALPATH]
    matrix.main()
    assert ran == ["dualpath-basic", DUALPATH, DUALPATH]
    matrix.main()
    assert len(ran) == 3
    (written,) = matrix.CellFiles(tmp_path / "cells").read(CELL)
    assert [one.stack for one in written.runs] == ["dualpath-basic", DUALPATH]
    assert "1 of 36 regimes have been run" in (tmp_path / "peers-matrix.md").read_text()


def test_runs_on_another_processor_are_separate_and_repeated_only_if_named(
    stacks_run, tmp_path, monkeypatch
):
    ran, _ = stacks_run
    words = ["matrix", "--out", str(tmp_path), "--modes", "basic", "--cell", CELL.name]
    monkeypatch.setattr("sys.argv", words)
    matrix.main()
    elsewhere = msgspec.structs.replace(this_machine(), cpu_model="another")
    for module in (matrix, comparison):
        monkeypatch.setattr(module, "this_machine", lambda: elsewhere)
    monkeypatch.setattr("sys.argv", words[:-2])
    matrix.main()
    assert len(ran) == 36, "all cells without runs"
    monkeypatch.setattr("sys.argv", words)
    matrix.main()
    assert len(ran) == 37
    files = matrix.CellFiles(tmp_path / "cells")
    models = [found.machine.cpu_model for found in files.read(CELL)]
    assert sorted(models) == sorted([this_machine().cpu_model, "another"])
    here = files.on_this_processor(CELL)
    assert here is not None
    assert here.machine.cpu_model == "another"


def test_more_repeats_alternate_between_stacks(stacks_run, tmp_path):
    ran, _ = stacks_run
    runs = [run("dualpath-basic", 1.0), run(DUALPATH, 1.0), run("dualpath-basic", 1.0)]
    comparison.measure(parse_arguments(["--repeats", "3"]), tmp_path, runs, lambda runs: None)
    assert ran == [DUALPATH, "dualpath-basic", DUALPATH]


def row(report, cell: Cell) -> dict[str, str]:
    table = report.tables[0]
    rows = [dict(zip(table.columns, cells, strict=True)) for cells in table.rows]
    return next(
        r
        for r in rows
        if (r["agents"], r["bound by"], r["DRAM holds"]) == (cell.agents, cell.bound, cell.fits)
        and (r["tools"] == "pauses") == cell.pauses
    )


def test_the_page_names_the_fastest_stack_and_the_bottlenecks():
    runs = (run("vllm-x", 10.0, read_bytes=20_000_000), run(DUALPATH, 20.0, read_bytes=390_000_000))
    report = matrix_report({cell: [measured(*runs)] if cell == CELL else [] for cell in cells()})
    cell_table = report.tables[-1]
    assert {one[cell_table.columns.index("CPU-s")] for one in cell_table.rows} == {"5"}
    found = row(report, CELL)
    assert (found["fastest"], found["JCT s"], found["DualPath's"]) == ("vllm-x", "10.0", "20.0")
    assert found["why"] == (
        "vllm-x waits for nothing saturated, 0.02 GB read, 90.0% hits; "
        "split waits for storage at pe0 (98%), 0.39 GB read, 90.0% hits"
    )
    assert row(report, Cell(Agents.LONG, Bound.COMPUTE, Fits.ALL, pauses=True))["fastest"] == (
        "not run"
    )
    assert "1 of 36" in markdown.page(as_report(report))


def test_a_stack_with_failed_turns_is_not_the_fastest():
    found = measured(run("vllm-x", 1.0, failed=1), run(DUALPATH, 20.0))
    assert row(matrix_report({CELL: [found]}), CELL)["fastest"] == "split"


def test_saturated_cores_and_links_are_named():
    busy = msgspec.structs.replace(run("vllm-x", 10.0), busy=0.97)
    busy = msgspec.structs.replace(busy, cnic_in_bytes={"de0": 1_900_000_000})
    assert waits_for(Stack("vllm-x", [busy]), measured(busy)) == "CNIC of de0 (95%), cores (97%)"
