"""Every figure from a fake simulator: numbers, files, equal bytes, each run made once."""

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from tests.unit.evaluation_fakes import FakeInputs, FakeSimulator

from dualpath.cli.main import main
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath_sim.cli.eval import FIGURE_NAMES
from dualpath_sim.evaluation import beyond, dram_tier, three_rates
from dualpath_sim.evaluation.document import document, write_document
from dualpath_sim.evaluation.experiment import (
    FigureExperiment,
    Made,
    figure_experiment,
    figure_of,
)
from dualpath_sim.evaluation.figures import FIGURES
from dualpath_sim.evaluation.figures.candidates import MODEL, PATHS, WORKLOADS, capacity, outcome
from dualpath_sim.evaluation.figures.fig3 import pass_s
from dualpath_sim.evaluation.figures.table3 import large_spec, small_spec
from dualpath_sim.evaluation.inputs import CatalogInputs
from dualpath_sim.evaluation.lab import LAB_NUMBERS, lab_numbers, three_columns
from dualpath_sim.evaluation.report import (
    FITTED,
    QUOTED,
    REASONS,
    Compared,
    FigureReport,
    comparison_table,
    missed,
    quantity,
)
from dualpath_sim.evaluation.runs import Inputs, Result, Runs, Simulate
from dualpath_sim.evaluation.settings import (
    AS_WRITTEN,
    AT_48K,
    DS_27B,
    DS_660B,
    THREE_RATES,
    Calibration,
    EvaluationSettings,
    RunSpec,
)
from dualpath_sim.harness.check import agrees, compare
from dualpath_sim.harness.experiment import RawData
from dualpath_sim.harness.files import read, stored, write
from dualpath_sim.harness.run import measure
from dualpath_sim.simulator.settings import PrefillCosts, Setup

LAB = Path(__file__).parents[2] / "docs" / "evaluation" / "lab"
PAPER = LAB.parent / "paper"
QUICK = EvaluationSettings(seed=3, quick=True)


def fake_runs(settings: EvaluationSettings = QUICK) -> tuple[Runs, FakeSimulator]:
    simulator = FakeSimulator()
    return Runs(settings, FakeInputs(), simulator), simulator


@pytest.fixture(scope="module")
def reports() -> list[FigureReport]:
    runs, _ = fake_runs()
    return [build(runs) for build in FIGURES.values()]


def model_of(reports: list[FigureReport], key: str) -> float:
    return next(c.model for r in reports for c in r.compared if c.key == key) or 0.0


def test_every_number_that_the_paper_quotes_is_compared_once_in_its_figure(
    reports: list[FigureReport],
) -> None:
    compared = [(r.name, c.key) for r in reports for c in r.compared]
    assert sorted(compared) == sorted((q.figure, q.key) for q in QUOTED.values())
    assert set(QUOTED) >= FITTED
    assert set(FIGURE_NAMES) == set(FIGURES)


def test_speedups_and_reductions_are_those_of_the_runs(reports: list[FigureReport]) -> None:
    # The fake decodes for 1.98 s a round, whatever the mode; waiting depends on mode and nodes.
    basic, ours = (128 * speed / 2 + 1.98 for speed in (0.02, 0.01))
    assert model_of(reports, "fig7.660b.speedup_max") == pytest.approx(basic / ours)
    assert model_of(reports, "table3.2p4d.jct") == pytest.approx(6 * ours)
    assert model_of(reports, "fig13.round_robin") == pytest.approx(2 / ((2 + 1 + 1) / 3))
    assert model_of(reports, "fig14.dualpath") == pytest.approx(1.1)
    reductions = []
    for agents in QUICK.ablation_agents:
        basic, layered = (agents * speed / 2 + 1.98 for speed in (0.02, 0.016))
        reductions.append(100 * (1 - layered / basic))
    assert model_of(reports, "fig12.layerwise") == pytest.approx(sum(reductions) / 2)


def test_a_run_that_several_figures_need_is_made_once() -> None:
    runs, simulator = fake_runs()
    FIGURES["fig10"](runs)
    made = simulator.calls
    report = FIGURES["fig11"](runs)
    # Fig. 11 adds no more than the two rates of §8.2 to the runs of Fig. 10.
    assert simulator.calls <= made + 2
    assert report.compared[0].model is not None


def test_a_capacity_that_was_never_exceeded_gives_no_ratio() -> None:
    runs, _ = fake_runs()
    report = FIGURES["fig10"](runs)
    capacities = {row[:2]: row[2] for row in report.tables[0].rows}
    assert capacities["DS 660B", "DualPath"].startswith("≥ ")
    assert {one.key: one.model for one in report.compared}["fig10.660b.capacity"] is None


def test_modes_of_one_comparison_share_their_agents() -> None:
    inputs = FakeInputs()
    runs = Runs(QUICK, inputs, FakeSimulator())
    for mode in Mode:
        runs.offline(RunSpec(system=DS_660B, mode=mode, agents=16))
    assert inputs.tables_made == 1


def fake_experiment(name: str, simulate: Simulate, made: Made | None = None) -> FigureExperiment:
    shared = {} if made is None else made
    return figure_experiment(name, FIGURES[name], lambda *_: FakeInputs(), simulate, shared)


def measured(name: str) -> tuple[FigureExperiment, RawData[EvaluationSettings, Result]]:
    experiment = fake_experiment(name, FakeSimulator())
    return experiment, stored(experiment, measure(experiment, QUICK))


def no_simulator(*_: object, **__: object) -> object:
    raise AssertionError("a run was made")


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        figures = []
        for name in ("fig7", "fig12", "table3"):
            experiment, raw = measured(name)
            figures.append(figure_of(experiment, raw))
            # Machine and date are those of the runs.
            write(msgspec.structs.replace(figures[-1], data=raw.runs), tmp_path / folder)
        write_document(figures, tmp_path / folder / "evaluation.md")
    files = [path for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()]
    assert {path.suffix for path in files} == {".md", ".json", ".html", ".png"}
    for path in files:
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert path.read_bytes() == other.read_bytes(), path.name


@pytest.mark.parametrize("name", list(FIGURES))
def test_a_figure_is_drawn_again_from_its_file_without_a_run(name: str, tmp_path: Path) -> None:
    experiment, raw = measured(name)
    page = experiment.page(raw, name, f"dualpath eval {name}")
    write(page, tmp_path)
    again = fake_experiment(name, no_simulator)  # type: ignore[arg-type]
    recorded = again.recorded(read(tmp_path / f"{name}.json").data)
    assert recorded == raw
    assert markdown.page(again.page(recorded, name, page.command).report()) == markdown.page(
        page.report()
    )
    assert page.results
    assert agrees(compare(page, again.page(recorded, name, page.command)))


def published(name: str) -> tuple[FigureExperiment, RawData[EvaluationSettings, Result]]:
    def inputs(settings: EvaluationSettings, calibration: Calibration) -> Inputs:
        return CatalogInputs(settings.tail, calibration=calibration)

    build, calibration = FIGURES.get(name), AS_WRITTEN
    if build is None:
        build, calibration = three_rates.build, THREE_RATES
    experiment = figure_experiment(name, build, inputs, no_simulator, {}, calibration)  # type: ignore[arg-type]
    raw = experiment.recorded(read(PAPER / f"{name}.json").data)
    assert raw is not None
    return experiment, raw


@pytest.mark.parametrize("name", [*FIGURE_NAMES, "three-rates"])
def test_make_reproduce_has_recorded_runs_to_compare_with(name: str) -> None:
    experiment, raw = published(name)
    assert raw.settings == EvaluationSettings()
    page = experiment.page(raw, name, "")
    recorded = read(PAPER / f"{name}.json")
    assert [one.what for one in page.results] == [one.what for one in recorded.results]
    assert page.results
    assert agrees(compare(recorded, page))


def test_the_page_over_all_figures_is_drawn_from_the_recorded_runs() -> None:
    figures = [figure_of(*published(name)) for name in (*FIGURES, "three-rates")]
    page = markdown.page(document(figures, lab_numbers(LAB)), "images/evaluation/")
    assert page == (PAPER.parents[1] / "evaluation.md").read_text(encoding="utf-8"), (
        "run dualpath eval all three-rates --redraw docs/evaluation/paper "
        "--docs docs/evaluation.md --lab docs/evaluation/lab"
    )
    first = page.splitlines()[2]
    assert first.startswith(
        "**Of the 32 quoted numbers 9 are fitted, the 1.87x and the ablation's steps among them.**"
    )


def test_three_fitted_rates_give_all_quoted_numbers() -> None:
    experiment = figure_experiment(
        *("three-rates", three_rates.build, lambda *_: FakeInputs(), FakeSimulator(), {}),
        THREE_RATES,
    )
    raw = stored(experiment, measure(experiment, QUICK))
    assert all(cell.endswith(" (three rates)") for cell in raw.cells)
    (table,) = figure_of(experiment, raw).tables
    assert len(table.rows) == len(QUOTED)
    assert sum(row[-1] == "fitted" for row in table.rows) == len(three_rates.FITTED_TO) == 4
    assert set(QUOTED) >= three_rates.FITTED_TO


def test_the_page_has_every_number_with_both_calibrations(reports: list[FigureReport]) -> None:
    ours = figure_experiment(
        *("three-rates", three_rates.build, lambda *_: FakeInputs(), FakeSimulator(), {}),
        THREE_RATES,
    )
    report = figure_of(ours, stored(ours, measure(ours, QUICK)))
    page = document([*reports, report])
    tables = {block.title: block for block in page.blocks if isinstance(block, Table)}
    both = tables["All quoted numbers, 9 fitted and 4 fitted"]
    assert len(both.rows) == len(QUOTED)
    # The fake has no rates, so that both calibrations give the same.
    assert all(row[2:4] == row[5:7] for row in both.rows)
    counts = {row[:2]: row[2] for row in tables["How many are close"].rows}
    assert counts == {
        ("all", "as written"): "31",
        ("all", "three rates"): "31",
        ("fitted", "as written"): "9",
        ("fitted", "three rates"): "4",
        ("predicted", "as written"): "22",
        ("predicted", "three rates"): "27",
        ("predicted by both, offline", "as written"): "14",
        ("predicted by both, offline", "three rates"): "14",
        ("predicted by both, online", "as written"): "8",
        ("predicted by both, online", "three rates"): "8",
    }
    assert report.title not in [part.title for part in page.parts]
    assert "All quoted numbers, 9 fitted and 4 fitted" not in markdown.page(document(reports))


def test_three_rates_leave_out_what_else_was_fitted() -> None:
    small = RunSpec(system=DS_27B, mode=Mode.DUALPATH)
    ours, theirs = (
        CatalogInputs(calibration=calibration).setup(small)
        for calibration in (THREE_RATES, AS_WRITTEN)
    )
    assert (ours.cluster.cnic_bytes_per_s, ours.cluster.batch_cap_tokens) == (30.7e9, 2048)
    assert ours.cluster.snic_bytes_per_s == theirs.cluster.snic_bytes_per_s == 50e9
    assert ours.cluster.decode_admission_s == 0 < theirs.cluster.decode_admission_s
    # DS 27B has no efficiency of its own: 0.865 of the rates for 0.36.
    pair_s = ours.model.prefill.pair_s, theirs.model.prefill.pair_s
    assert pair_s[0] / pair_s[1] == pytest.approx(0.36 / 0.865)
    assert ours.model.decode.pair_s > theirs.model.decode.pair_s


def test_an_interrupted_figure_makes_only_the_runs_that_it_lacks() -> None:
    experiment, raw = measured("fig10")
    half = msgspec.structs.replace(raw, runs=raw.runs[: len(raw.runs) // 2])
    with pytest.raises(ConfigError, match=r"the runs of fig10 lack .* finish them with --resume"):
        experiment.draw(half)
    simulator = FakeSimulator()
    rest = fake_experiment("fig10", simulator)
    assert stored(rest, measure(rest, QUICK, earlier=half)).runs == raw.runs
    assert simulator.calls == len(raw.runs) - len(half.runs)


def test_figures_of_one_command_share_their_runs() -> None:
    simulator = FakeSimulator()
    made: Made = {}
    measure(fake_experiment("fig10", simulator, made), QUICK)
    calls = simulator.calls
    measure(fake_experiment("fig11", simulator, made), QUICK)
    # The two rates of §8.2, for both calibrations.
    assert simulator.calls <= calls + 4


def test_a_run_differs_in_its_name_from_every_other_one() -> None:
    spec = RunSpec(system=DS_660B, mode=Mode.DUALPATH, agents=16)
    changes: list[dict[str, object]] = [
        {},
        {"system": DS_27B},
        {"mode": Mode.BASIC},
        {"workload": "32K"},
        {"agents": 17},
        {"nodes": (1, 1)},
        {"append_scale": 2.0},
        {"generation_scale": 2.0},
        {"agents_per_s": 0.5, "until_s": 100.0},
        {"agents_per_s": 0.5, "until_s": 200.0},
        {"overrides": (("snic_bytes_per_s", 1e9),)},
        {"overrides": (("snic_bytes_per_s", 2e9),)},
        {"generator": (("append_sigma", 0.5),)},
        {"prefill_slowdown": 2.0},
        {"interleaved": False},
        {"interleaved": True},
        {"unseen_generation": 2.0},
        {"curves": "balance"},
    ]
    changed = {name for change in changes for name in change}
    assert changed == set(RunSpec.__struct_fields__)
    titles = [msgspec.structs.replace(spec, **change).title for change in changes]
    assert all(one != other for one, other in itertools.combinations(titles, 2))


def test_a_cluster_that_cannot_make_a_run_is_recorded_with_the_reason() -> None:
    class Refusing(FakeInputs):
        def setup(self, spec: RunSpec) -> Setup:
            raise ConfigError("the weights do not fit; give more nodes")

    runs = Runs(QUICK, Refusing(), FakeSimulator())
    spec = RunSpec(system=DS_660B, mode=Mode.DUALPATH, agents=16)
    for _ in range(2):
        with pytest.raises(ConfigError, match="the weights do not fit"):
            runs.offline(spec)
    assert msgspec.to_builtins(runs.results[spec.title]) == {
        "type": "impossible",
        "reason": "the weights do not fit; give more nodes",
    }


def test_the_lab_has_a_number_beside_the_papers_where_it_measured_one() -> None:
    lab = lab_numbers(LAB)
    assert set(lab) == set(LAB_NUMBERS) <= set(QUOTED)
    assert lab["fig12.layerwise"] == 0.0
    assert lab["fig8.speedup_mean"] == pytest.approx((1.94 + 1.48 + 2.90) / 3)
    rows = three_columns(
        [Compared("fig13.dualpath", 1.22), Compared("fig14.dualpath", 1.0)], lab, ""
    )
    assert [row[1:4] for row in rows.rows] == [("1.18x", "1.22x", "1.01x"), ("1.06x", "1.00x", "-")]


def test_a_file_of_the_lab_without_a_number_is_refused(tmp_path: Path) -> None:
    for path in LAB.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed = json.loads((LAB / "online.json").read_text())
    changed["tables"] = []
    (tmp_path / "online.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=r"online\.json has no number in the column 'ratio'"):
        lab_numbers(tmp_path)


def test_files_carry_setting_and_seed_and_the_papers_numbers(
    reports: list[FigureReport],
) -> None:
    for report in reports:
        text = markdown.page(report.report())
        assert "Seed 3." in text
        assert "gamma" in text
        assert not report.compared or "errors mean nothing" in text
        assert "not the paper's settings" in text
        content = report.content()
        assert content["evaluation"]["seed"] == 3
        assert content["settings"]
        for one in content["compared"]:
            assert one["paper"] == QUOTED[one["key"]].value
            if one["model"] is not None:
                assert one["relative_error"] == pytest.approx(one["model"] / one["paper"] - 1)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.outside.append(value or "")


def test_a_page_needs_nothing_but_itself(tmp_path: Path, reports: list[FigureReport]) -> None:
    report = next(r for r in reports if r.name == "fig10")
    write(report, tmp_path)
    page = (tmp_path / "fig10.html").read_text(encoding="utf-8")
    links = _Links()
    links.feed(page)
    assert links.outside == []
    assert links.scripts == 0
    assert page.count("<svg") == len(report.panels)


def test_the_page_begins_with_the_error_table_and_names_every_number(
    reports: list[FigureReport],
) -> None:
    page = markdown.page(document(reports), "images/evaluation/")
    first_figure = page.index("## Fig. 7.")
    assert page.index("## All quoted numbers") < first_figure
    for quoted in QUOTED.values():
        assert quoted.what in page[:first_figure]
    assert "![" in page


def test_the_page_names_the_command_that_makes_it(reports: list[FigureReport]) -> None:
    options = "--docs docs/evaluation.md --seed 3 --quick`"
    assert f"`dualpath eval all {options}" in markdown.page(document(reports))
    assert f"`dualpath eval table1 fig3 {options}" in markdown.page(document(reports[:2]))


def test_rows_are_judged_by_what_the_paper_claims() -> None:
    rows = comparison_table(
        [
            Compared("table3.2p4d.jct", 3167.0 * 1.04),
            Compared("table3.48p96d.jct", 3201.0 * 1.06),
            Compared("table3.2p4d.ttft", 1.739),
            Compared("table3.scheduler_cores", 0.2),
            Compared("fig8.dualpath_2p1d_1p2d", None),
        ]
    ).rows
    assert [row[5] for row in rows] == ["yes", "no", "yes", "below", "no"]
    assert rows[0][2:5] == ("3,294 s", "3,167 s", "+4.0%")
    assert rows[3][3] == "< 10.00 cores"
    assert rows[4][2:5] == ("-", "≈ 1.00x", "-")


def test_online_numbers_have_a_target_of_their_own() -> None:
    assert Compared("fig10.660b.capacity", 2.25 * 1.14).within_target
    assert not Compared("fig10.660b.capacity", 2.25 * 1.16).within_target
    assert not Compared("fig7.660b.speedup_max", 1.87 * 1.06).within_target


def test_the_second_calibration_has_columns_of_its_own() -> None:
    first = [Compared("table3.2p4d.jct", 3167.0), Compared("fig8.speedup_max", 2.46)]
    table = comparison_table(first, at_48k=[Compared("table3.2p4d.jct", 3167.0 * 1.1)])
    assert table.columns[-3:] == ("at 48K: model", "error", "within target")
    assert [row[-3:] for row in table.rows] == [("3,484 s", "+10.0%", "no"), ("-", "-", "no")]
    assert len(table.columns) == len(comparison_table(first).columns) + 3


def test_the_second_calibration_changes_machine_and_length_of_table_3() -> None:
    spec = RunSpec(system=DS_660B, mode=Mode.DUALPATH)
    written, second = (CatalogInputs(calibration=c).setup(spec) for c in (AS_WRITTEN, AT_48K))
    assert second.cluster.snic_bytes_per_s == 32e9 < written.cluster.snic_bytes_per_s
    # Kernels alone are slower; what a pass costs whatever is in it stays.
    share = written.model.prefill.pair_s / second.model.prefill.pair_s
    assert share == pytest.approx(0.625)
    assert second.model.prefill.batch_s == written.model.prefill.batch_s
    runs = Runs(QUICK, FakeInputs(), FakeSimulator(), calibration=AT_48K)
    assert (small_spec(runs).workload, large_spec(runs).workload) == ("48K", "48K")
    changed = msgspec.structs.replace(spec, overrides=(("snic_bytes_per_s", 1e9),))
    assert CatalogInputs(calibration=AT_48K).setup(changed).cluster.snic_bytes_per_s == 1e9


def test_the_io_compute_ratio_falls_as_in_the_paper(reports: list[FigureReport]) -> None:
    fig3 = next(report for report in reports if report.name == "fig3")
    (statement,) = fig3.statements
    assert statement.holds
    assert statement.evidence == "14.4x: 28.8x the FLOP, 2.0x the NIC"
    ratios = [float(row[-1]) for row in fig3.tables[0].rows]
    assert ratios == [80.1, 25.3, 5.6]


def test_a_batch_shares_what_a_pass_costs() -> None:
    costs = PrefillCosts(batch_s=0.1, pair_s=1e-9, index_pair_s=1e-10, window_tokens=2_000)
    one, many = pass_s(costs, 1), pass_s(costs, 10)
    per_request_s = 300 * (2_000 * 1e-9 + 30_000 * 1e-10)
    assert one == pytest.approx(0.1 + per_request_s)
    assert many == pytest.approx(0.1 + 10 * per_request_s)
    both = PrefillCosts(feed_forward_token_s=1e-3, exchange_token_s=2e-3, interleaved=True)
    assert pass_s(both, 1) == pytest.approx(300 * 2e-3)


def test_quantities_have_the_digits_that_the_paper_quotes() -> None:
    assert quantity(3167, "s") == "3,167 s"
    assert quantity(0.0391, "s") == "0.039 s"
    assert quantity(17.2149, "%") == "17.21 %"


def test_a_table_lines_up_and_escapes_bars() -> None:
    text = markdown.table(Table("T", ("name", "n"), (("a|b", "1"), ("c", "22"))))
    lines = text.splitlines()[2:]
    assert len({len(line) for line in lines}) == 1
    assert "a\\|b" in lines[2]


def test_additions_are_compared_with_dualpath_on_settings_and_traces(tmp_path: Path) -> None:
    runs, _ = fake_runs()
    report = beyond.build(runs, beyond.existing_traces(tmp_path))
    assert any("left out: mini-swe" in line for line in report.settings)
    split = 2 + [v.title for v in beyond.VARIANTS].index("split read")
    assert all(row[split].startswith("+") for row in report.tables[0].rows)
    (panel,) = report.panels
    names = panel.series[0].x
    assert {"660B, 32K, 64", "27B 1P1D, 64K, 64"} <= set(names)
    assert len(set(names)) == len(report.tables[0].rows) - 1  # all but the mean


def test_a_tier_is_measured_from_none_of_the_working_set_to_all_of_it() -> None:
    runs, _ = fake_runs()
    report = dram_tier.build(runs)
    times, hits = report.tables
    assert times.columns[2:] == ("no tier", "0%", "25%", "100%", "100%, CNICs x 2", "Oracle")
    # The fake has neither tier nor links: their sizes make no difference.
    assert all(len(set(row[2:7])) == 1 and float(row[2]) > 1 for row in times.rows)
    assert [row[0] for row in hits.rows] == [row[0] for row in times.rows]


def test_the_catalog_gives_the_cluster_with_the_runs_changes() -> None:
    spec = RunSpec(
        system=DS_27B,
        mode=Mode.SPLIT,
        nodes=(2, 1),
        overrides=(("dram_tier_bytes", 1e9),),
    )
    setup = CatalogInputs().setup(spec)
    assert (setup.cluster.prefill_nodes, setup.cluster.decode_nodes) == (2, 1)
    assert setup.cluster.dram_tier_bytes == 1e9
    assert setup.mode is Mode.SPLIT


def test_offline_numbers_beyond_the_target_are_listed_with_their_reason() -> None:
    found = missed(
        [
            Compared("table3.2p4d.jct", 3167.0 * 1.04),
            Compared("fig8.speedup_mean", 1.85),
            Compared("table3.48p96d.jct", 3201.0 * 1.06),
            Compared("fig10.660b.capacity", 9.0),
        ]
    )
    assert found is not None
    assert [row[1:] for row in found.rows] == [
        ("+12.8%", REASONS["fig8.speedup_mean"]),
        ("+6.0%", "Not explained."),
    ]
    assert missed([Compared("fig10.660b.capacity", 9.0)]) is None
    assert set(REASONS) <= {key for key, quoted in QUOTED.items() if quoted.offline}


def test_a_candidate_changes_its_own_runs_and_nothing_else() -> None:
    runs, simulator = fake_runs()
    first = outcome(runs, MODEL)
    made = simulator.calls
    assert outcome(runs, MODEL) == first
    assert simulator.calls == made
    assert first.ratio is None or first.ratio >= 1
    assert first.speedup > 1
    assert capacity(runs, WORKLOADS[0], Mode.BASIC) == first.basic_aps
    assert simulator.calls > made


def test_candidates_reach_costs_cluster_and_workload() -> None:
    inputs = CatalogInputs()
    spec = RunSpec(system=DS_660B, mode=Mode.DUALPATH, workload="32K", agents=20)
    plain, agents = inputs.setup(spec), inputs.agents(spec, 1)
    slow = inputs.setup(msgspec.structs.replace(spec, prefill_slowdown=2.0)).model
    assert slow.prefill.pair_s == 2 * plain.model.prefill.pair_s
    assert slow.prefill.window_tokens == plain.model.prefill.window_tokens
    assert slow.decode == plain.model.decode
    assert slow.prefill_tokens_per_s < plain.model.prefill_tokens_per_s
    late = inputs.setup(PATHS[1].of(spec))
    assert late.cluster.request_overhead_s == 0.7
    assert late.model == plain.model
    talkative = inputs.agents(msgspec.structs.replace(spec, unseen_generation=2.0), 1)
    assert (talkative.generated_tokens == 2 * agents.generated_tokens).all()
    assert (talkative.prompt_tokens == agents.prompt_tokens).all()
    even = inputs.agents(WORKLOADS[0].of(spec), 1)
    assert even.prompt_tokens.size == agents.prompt_tokens.size
    assert (even.prompt_tokens != agents.prompt_tokens).any()


def test_generated_agents_arrive_all_at_once_or_one_by_one() -> None:
    inputs = CatalogInputs()
    spec = RunSpec(system=DS_660B, mode=Mode.DUALPATH, workload="32K", agents=20)
    at_once = inputs.agents(spec, 1)
    assert at_once.agents == 20
    assert not at_once.start_s.any()
    online = RunSpec(
        system=DS_660B, mode=Mode.DUALPATH, workload="32K", agents=20, agents_per_s=0.5
    )
    arriving = inputs.agents(online, 1)
    assert (arriving.start_s[1:] > arriving.start_s[:-1]).all()
    assert (arriving.prompt_tokens == at_once.prompt_tokens).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--seed", "-1"], "--seed is -1"), (["--window-s", "0"], "--window-s is 0")],
)
def test_wrong_settings_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "fig7", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "it must be" in error


def test_a_rerun_must_give_exactly_the_recorded_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["eval", "table1", "fig3", "--seed", "7", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["dualpath", *words])
    assert main(words) == 0
    file = tmp_path / "fig3.json"
    content = json.loads(file.read_text())
    assert content["targets"][0]["tolerance"] == 0.0
    assert content["command"] == "dualpath eval fig3 --seed 7"
    assert content["data"]["settings"]["seed"] == 7
    assert main(["eval", "fig3", "--check", str(file)]) == 0
    assert main(["eval", "table1", "fig3", "--check", str(tmp_path)]) == 0
    assert main(["eval", "table1", "fig3", "--check", str(file)]) == 2
    assert main(["eval", "fig7", "--check", str(file)]) == 2
    content["data"]["runs"][0]["result"]["numbers"]["1 requests, s"] *= 1.01
    file.write_text(json.dumps(content))
    assert main(["eval", "fig3", "--check", str(file)]) == 1
    assert main(["eval", "table1", "fig3", "--check", str(tmp_path)]) == 1


def test_reproducing_prints_a_verdict_and_the_papers_and_the_labs_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def simulate(*words: object, core: str, **others: object) -> object:
        return FakeSimulator()(*words, **others)  # type: ignore[arg-type]

    monkeypatch.setattr("dualpath_sim.simulator.run.simulate", simulate)
    monkeypatch.setattr("dualpath_sim.evaluation.inputs.CatalogInputs", lambda *_: FakeInputs())
    assert main(["eval", "fig13", "fig14", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    words = ["--check", str(tmp_path), "--lab", str(LAB)]
    assert main(["eval", "fig13", "fig14", *words]) == 0
    printed = capsys.readouterr().out
    verdicts, numbers = printed.split("Beside the recorded runs")[1].split("The paper, the sim")
    assert re.findall(r"(fig\d+) +│ (\w+)", verdicts) == [("fig13", "same"), ("fig14", "same")]
    (row,) = (line for line in numbers.splitlines() if "max/avg, DualPath" in line)
    assert re.findall(r"[\d.]+x", row) == ["1.18x", "1.50x", "1.01x"]
