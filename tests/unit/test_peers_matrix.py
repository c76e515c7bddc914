"""Each cell is a measurement, interrupted ones are continued, the page names missing cells."""

from pathlib import Path

import msgspec
import pytest

from dualpath.core.errors import EngineLostError
from dualpath.node.machine import this_machine
from dualpath.report import markdown
from dualpath.workload.replay.result import Distribution
from dualpath_lab.benchmarks.peers import comparison
from dualpath_lab.benchmarks.peers.comparison import DUALPATH, Stack
from dualpath_lab.benchmarks.peers.matrix import (
    PEERS_MATRIX,
    Agents,
    Bound,
    Fits,
    MatrixSettings,
    Regime,
    draw_regimes,
    read_regimes,
    regimes,
    waits_for,
)
from dualpath_lab.benchmarks.peers.one_run import RunRecord
from dualpath_lab.models.random_models import KV_BYTES
from dualpath_sim.harness.experiment import RawData, Run
from dualpath_sim.harness.run import measure

PUBLISHED = Path(__file__).parents[2] / "docs" / "evaluation" / "peers" / "cells"
REGIME = Regime(Agents.SHORT, Bound.STORAGE, Fits.NOTHING, pauses=False)
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
    return RawData(
        experiment="peers",
        settings=REGIME.settings(MatrixSettings()),
        runs=[Run(cell=run.stack, round=n, result=run) for n, run in enumerate(runs)],
        machine=this_machine(),
    )


def test_every_combination_is_a_regime_with_a_unique_name():
    found = list(regimes())
    assert len(found) == len({regime.name for regime in found}) == 36


@pytest.mark.parametrize("regime", list(regimes()), ids=lambda regime: regime.name)
def test_agents_fit_the_model_and_one_context_fits_the_dram(regime):
    settings = regime.settings(MatrixSettings())
    sessions = [comparison.session(settings, n) for n in range(settings.agents)]
    longest = max(one.trajectory.total_tokens for one in sessions)
    assert longest <= settings.max_model_len
    assert settings.dram_mib << 20 >= longest * KV_BYTES
    assert settings.max_model_len * KV_BYTES <= settings.hbm_mib << 20


def test_dram_holds_all_agents_a_quarter_of_them_or_one():
    def dram_bytes(fits: Fits) -> int:
        regime = Regime(Agents.SHORT, Bound.STORAGE, fits, pauses=False)
        return regime.settings(MatrixSettings()).dram_mib << 20

    settings = REGIME.settings(MatrixSettings())
    working_set_bytes = KV_BYTES * sum(
        comparison.session(settings, n).trajectory.total_tokens for n in range(settings.agents)
    )
    assert dram_bytes(Fits.ALL) > working_set_bytes
    assert dram_bytes(Fits.QUARTER) == pytest.approx(working_set_bytes / 4, rel=0.02)
    assert dram_bytes(Fits.NOTHING) < dram_bytes(Fits.QUARTER) / 2


def test_failed_runs_are_made_when_the_matrix_is_resumed(tmp_path, monkeypatch):
    ran: list[str] = []
    broken = [DUALPATH]

    def run_once(settings, one, *rest):
        ran.append(one.name)
        if one.name in broken:
            broken.remove(one.name)
            raise EngineLostError("gone")
        return run(one.name, 1.0)

    monkeypatch.setattr(comparison, "_run_once", run_once)
    settings = MatrixSettings(modes=("basic", "split"), logs=str(tmp_path))

    def wanted(cell: str) -> bool:
        return REGIME.name in cell

    raw = measure(PEERS_MATRIX, settings, wanted=wanted)
    assert ran == ["dualpath-basic", DUALPATH]
    raw = measure(PEERS_MATRIX, settings, wanted=wanted, earlier=raw)
    assert ran == ["dualpath-basic", DUALPATH, DUALPATH]
    assert raw.cells == [f"{REGIME.name} dualpath-basic", f"{REGIME.name} {DUALPATH}"]
    page = PEERS_MATRIX.page(raw, "peers-matrix", "command")
    assert "1 of 36 regimes have been run" in page.settings[1]


def row(report, regime: Regime) -> dict[str, str]:
    table = report.tables[0]
    rows = [dict(zip(table.columns, cells, strict=True)) for cells in table.rows]
    return next(
        r
        for r in rows
        if (r["agents"], r["bound by"], r["DRAM holds"])
        == (regime.agents, regime.bound, regime.fits)
        and (r["tools"] == "pauses") == regime.pauses
    )


def test_the_page_names_the_fastest_stack_and_the_bottlenecks():
    runs = (run("vllm-x", 10.0, read_bytes=20_000_000), run(DUALPATH, 20.0, read_bytes=390_000_000))
    report = draw_regimes(
        {regime: [measured(*runs)] if regime == REGIME else [] for regime in regimes()}
    )
    cell_table = report.tables[-1]
    assert {one[cell_table.columns.index("CPU-s")] for one in cell_table.rows} == {"5"}
    found = row(report, REGIME)
    assert (found["fastest"], found["JCT s"], found["DualPath's"]) == ("vllm-x", "10.0", "20.0")
    assert found["why"] == (
        "vllm-x waits for nothing saturated, 0.02 GB read, 90.0% hits; "
        "split waits for storage at pe0 (98%), 0.39 GB read, 90.0% hits"
    )
    assert row(report, Regime(Agents.LONG, Bound.COMPUTE, Fits.ALL, pauses=True))["fastest"] == (
        "not run"
    )
    assert "1 of 36" in markdown.page(report.report())


def test_a_stack_with_failed_turns_is_not_the_fastest():
    found = measured(run("vllm-x", 1.0, failed=1), run(DUALPATH, 20.0))
    assert row(draw_regimes({REGIME: [found]}), REGIME)["fastest"] == "split"


def test_saturated_cores_and_links_are_named():
    busy = msgspec.structs.replace(run("vllm-x", 10.0), busy=0.97)
    busy = msgspec.structs.replace(busy, cnic_in_bytes={"de0": 1_900_000_000})
    assert waits_for(Stack("vllm-x", [busy]), measured(busy)) == "CNIC of de0 (95%), cores (97%)"


def test_published_runs_have_the_settings_of_their_regime():
    found = read_regimes(PUBLISHED)
    assert all(found.values())
    for regime, measurements in found.items():
        for raw in measurements:
            own = regime.settings(MatrixSettings(modes=raw.settings.modes))
            assert raw.settings == msgspec.structs.replace(own, repeats=raw.settings.repeats)
