"""How the experiments on a lab evaluate their measurements."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.node.machine import ClientMachine
from dualpath.report import markdown
from dualpath.workload.conversation.prompts import Contents, Vocabulary
from dualpath.workload.conversation.sessions import AgentSettings
from dualpath.workload.formats import read_trace
from dualpath.workload.replay.result import (
    Isolation,
    ReplayResult,
    ReplaySetting,
    SentHints,
    ToolDelays,
    TurnRecord,
    summarise,
)
from dualpath_lab.experiments.client import ClientResult
from dualpath_lab.experiments.engine_nodes import scaled_costs, simulated_setup
from dualpath_lab.experiments.jct import JCT, cell_of, draw_jct
from dualpath_lab.experiments.metered_replay import (
    NodeBytes,
    Sample,
    parse_devices,
    parse_read_bytes,
)
from dualpath_lab.experiments.runs import LabResult, Measured, lab_result
from dualpath_lab.experiments.settings import (
    EmulatedNodes,
    History,
    JctSettings,
    WindowSettings,
)
from dualpath_lab.experiments.simulator_comparison import agent_table, predicted_jct_s
from dualpath_lab.experiments.workload import Window, windows, write_histories, write_rounds
from dualpath_lab.nodes.cluster import LinkReport
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.harness.experiment import KeyResult, Page, RawData, Run
from dualpath_sim.harness.files import read, stored, write
from dualpath_sim.simulator.run import simulate

SNIC_BYTES_PER_S = 50e6
LAB = LabSettings(name="paper", nodes="1P2D", snic_bytes_per_s=SNIC_BYTES_PER_S)
LINKS = (LinkReport("SNIC", SNIC_BYTES_PER_S, True, "cgroup"),)
SETTING = ReplaySetting(
    label="",
    endpoint="http://host",
    trace="",
    trace_format="rounds",
    broken_lines=0,
    mode="dualpath",
    mode_note=None,
    model="m",
    block_tokens=64,
    snic_bytes_per_s=None,
    agents=1,
    agents_per_s=None,
    seed=0,
    tool_delays=ToolDelays.NONE,
    isolation=Isolation.SESSION,
    session_hints=SentHints.NONE,
    max_context_tokens=None,
    max_turns=None,
    scale_append=1.0,
    scale_generate=1.0,
    token_low=0,
    token_high=9,
)


def turn(start_s: float, ttft_s: float = 1.0) -> TurnRecord:
    return TurnRecord(
        session_id="a",
        conversation_id="a",
        turn=0,
        start_s=start_s,
        delay_s=0.0,
        prompt_tokens=100,
        context_tokens=90,
        ideal_hit_tokens=64,
        generated_tokens=3,
        hit_tokens=64,
        ttft_s=ttft_s,
        ttst_s=0.01,
        tpot_s=0.02,
        latency_s=ttft_s + 0.03,
    )


def measured(
    mode: Mode, jct_s: float, rates: dict[str, float], turns: tuple[TurnRecord, ...] = ()
) -> Measured:
    """A run with nodes that read at constant ``rates`` (bytes per second), sampled every 0.1 s."""
    samples = [
        Sample(
            tick / 10,
            {
                node: NodeBytes(
                    snic=round(rate * tick / 10), cnic_out=0, cnic_in=7 * tick, loopback=0
                )
                for node, rate in rates.items()
            },
        )
        for tick in range(round(jct_s * 10) + 1)
    ]
    all_turns = list(turns) or [turn(0.0)]
    replay = ReplayResult(
        setting=SETTING,
        machine=ClientMachine(2, "cpu", 1, "linux", "3.11"),
        summary=summarise(all_turns, [], jct_s),
        trace=None,
        server=None,
        sessions=[],
        turns=all_turns,
    )
    return Measured(
        mode=mode,
        client=ClientResult(replay=replay, verified={"de_hbm": 8}),
        busy=0.5,
        cpu_s={"router": 1.0, "pe0": 2.0, "de0": 1.0, "de1": 1.0, "client": 9.0},
        samples=samples,
    )


def test_a_page_has_the_bytes_over_each_ranks_cnic() -> None:
    nothing = NodeBytes(snic=0, cnic_out=0, cnic_in=0, loopback=0, rails=((0, 0), (5, 5)))
    moved = msgspec.structs.replace(nothing, snic=9, rails=((2_000_000, 10), (3_000_005, 5)))
    run = msgspec.structs.replace(
        measured(Mode.DUALPATH, 1.0, {"pe0": 1e6}),
        samples=[Sample(0.0, {"pe0": nothing}), Sample(1.0, {"pe0": moved})],
    )
    lab = msgspec.structs.replace(LAB, cnics=2)
    (table,) = (
        t
        for t in draw_jct(raw_data([run], lab=lab, nodes="1P1D")).tables
        if t.title == "1P1D: bytes over the CNIC of each rank"
    )
    assert table.rows == (
        ("dualpath", "pe0", "0", "0.0", "2.0"),
        ("dualpath", "pe0", "1", "0.0", "3.0"),
    )


def test_a_page_has_the_cpu_time_of_dualpaths_engines_by_thread() -> None:
    first = measured(Mode.DUALPATH, 1.0, {"pe0": 1e9})
    assert not thread_rows(first)
    client = msgspec.structs.replace(first.client, thread_cpu_s={"MainThread": 1.0, "native": 3.0})
    assert thread_rows(msgspec.structs.replace(first, client=client)) == [
        (("native", "3.00"), ("MainThread", "1.00"))
    ]


def thread_rows(run: Measured) -> list[tuple[tuple[str, ...], ...]]:
    tables = draw_jct(raw_data([run])).tables
    return [t.rows for t in tables if t.columns == ("thread", "CPU-s per GB read")]


def test_agents_start_in_the_middle_of_their_trajectories() -> None:
    chosen = WindowSettings(agents=7, turns=3, scale=0.25)
    found = windows(chosen)
    assert found == windows(chosen)
    assert found != windows(msgspec.structs.replace(chosen, seed=1))
    assert len({window.trajectory.session_id for window in found}) == 7
    for window in found:
        assert len(window.trajectory.rounds) == 3
        assert 0 < window.history_tokens < window.trajectory.rounds[0].append_tokens


def test_windows_can_be_taken_from_a_trace_of_block_ids(tmp_path: Path) -> None:
    # 64-token blocks: the second turn appends, the third shares one block with it.
    requests = [
        {"in": 128, "out": 20, "hash_ids": [1, 2]},
        {"in": 200, "out": 8, "hash_ids": [1, 2, 3]},
        {"in": 100, "out": 5, "hash_ids": [1]},
        {"in": 150, "out": 7, "hash_ids": [1, 9]},
    ]
    path = tmp_path / "weka.jsonl"
    path.write_text(json.dumps({"id": "w", "block_size": 64, "requests": requests}))

    (window,) = windows(WindowSettings(trace=str(path), agents=1, turns=3, scale=1.0))

    assert window.history_tokens == 128 + 20
    assert [(r.append_tokens, r.generated_tokens) for r in window.trajectory.rounds] == [
        (200, 8),
        (100 - 64, 5),
        (150 - 105, 7),
    ]


def test_the_stored_history_is_a_prefix_of_the_first_prompt(tmp_path: Path) -> None:
    found = windows(WindowSettings(agents=3, turns=2, scale=0.05))
    write_rounds(found, tmp_path / "run.jsonl")
    write_histories(found, tmp_path / "histories.jsonl")
    runs = read_trace(tmp_path / "run.jsonl")
    for window, run, history in zip(
        found, runs, read_trace(tmp_path / "histories.jsonl"), strict=True
    ):
        before = history.start(AgentSettings(), Contents(Vocabulary(seed=5)))
        stored = before.next_turn()
        conversation = run.start(AgentSettings(), Contents(Vocabulary(seed=5)))
        first = conversation.next_turn()
        assert stored is not None
        assert first is not None
        stored_ids = before.token_ids(stored)
        assert len(stored_ids) == window.history_tokens
        assert conversation.token_ids(first)[: window.history_tokens] == stored_ids


@settings(max_examples=10, deadline=None)
@given(
    turns=st.integers(1, 8),
    append=st.floats(0.5, 8),
    generate=st.floats(0.1, 4),
    seed=st.integers(0, 3),
)
def test_scales_of_turns_do_not_change_histories(
    turns: int, append: float, generate: float, seed: int
) -> None:
    plain = WindowSettings(agents=4, turns=turns, seed=seed)
    scaled = msgspec.structs.replace(plain, scale_append=append, scale_generate=generate)
    for before, after in zip(windows(plain), windows(scaled), strict=True):
        assert after.history_tokens == before.history_tokens
        assert all(r.generated_tokens >= 1 for r in after.trajectory.rounds)


def test_whole_trajectories_begin_with_their_first_turn_and_have_all_turns() -> None:
    whole = windows(WindowSettings(agents=12, whole=True, scale=1.0))
    begun = windows(WindowSettings(agents=12, history=History.NONE, scale=1.0))
    assert all(window.history_tokens == 0 for window in whole)
    for full, first_turns in zip(whole, begun, strict=True):
        rounds, first = full.trajectory.rounds, first_turns.trajectory.rounds
        assert rounds[: len(first)] == first
    # The mean of the trajectories of 32K is 60 turns.
    assert sum(len(window.trajectory.rounds) for window in whole) > 12 * 30


def test_impossible_windows_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="turns is 0"):
        windows(WindowSettings(turns=0))
    short = tmp_path / "short.jsonl"
    short.write_text('{"session_id": "a", "rounds": [[10, 2], [3, 4]]}\n')
    with pytest.raises(ConfigError, match="more than 2 turns"):
        windows(WindowSettings(trace=str(short), turns=2))


def test_counters_of_the_kernel_are_read() -> None:
    text = (
        "Inter-|   Receive                    |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes packets\n"
        "    lo: 10 1 0 0 0 0 0 0 11 1 0 0 0 0 0 0\n"
        "  cnic: 20 1 0 0 0 0 0 0 21 1 0 0 0 0 0 0\n"
    )
    assert parse_devices(text) == {"lo": (10, 11), "cnic": (20, 21)}
    first = "8:0 Read 5\n7:1 Read 4096\n7:1 Write 1\n7:1 Total 4097\nTotal 4102\n"
    assert parse_read_bytes(first, "7:1") == 4096
    assert parse_read_bytes("7:1 rbytes=77 wbytes=1 rios=2\n", "7:1") == 77
    assert parse_read_bytes("", "7:1") == 0


def test_use_and_balance_of_storage_nics_are_computed_from_the_samples() -> None:
    run = measured(Mode.DUALPATH, 10.0, {"pe0": 50e6, "de0": 25e6, "de1": 0.0})
    assert run.storage_bytes == 750_000_000
    assert run.snic_use(SNIC_BYTES_PER_S) == pytest.approx([1.0, 0.5, 0.0])
    assert run.snic_balance(1.0) == pytest.approx(50 / 25)
    even = measured(Mode.DUALPATH, 10.0, {"pe0": 30e6, "de0": 30e6})
    assert even.snic_balance(1.0) == pytest.approx(1.0)


def raw_data(
    runs: list[Measured], lab: LabSettings = LAB, nodes: str = "1P2D"
) -> RawData[JctSettings, LabResult]:
    """Return the data of one run per mode on a cluster."""
    modes = tuple(run.mode for run in runs)
    settings = JctSettings(nodes=(nodes,), mode=modes, agents_per_node=1, lab=lab)
    return RawData(
        experiment="jct",
        settings=settings,
        runs=[
            Run(cell=cell_of(nodes, run.mode), round=0, result=lab_result(run, lab, LINKS))
            for run in runs
        ],
    )


def job(basic_s: float, dualpath_s: float, oracle_s: float) -> list[Measured]:
    full = dict.fromkeys(("pe0", "de0", "de1"), SNIC_BYTES_PER_S)
    nothing = dict.fromkeys(full, 0.0)
    return [
        measured(Mode.BASIC, basic_s, {**nothing, "pe0": SNIC_BYTES_PER_S}),
        measured(Mode.DUALPATH, dualpath_s, full),
        measured(Mode.ORACLE, oracle_s, nothing),
    ]


def targets(page: Page) -> list[KeyResult]:
    return [result for result in page.results if result.limit is not None]


def test_the_target_of_an_io_bound_job_is_the_ratio_of_all_nics_to_those_of_prefill() -> None:
    page = draw_jct(raw_data(job(30.0, 10.0, 1.0)))
    ratio, use = targets(page)
    assert ratio.what == "1P2D: Basic / DualPath, I/O-bound"
    assert ratio.measured == pytest.approx(3.0)
    assert ratio.limit == pytest.approx(2.91)
    assert ratio.met
    assert use.measured == pytest.approx(1.0)
    assert [row[:4] for row in page.tables[0].rows] == [
        ("basic", "30.00", "30.00 - 30.00", "1.00"),
        ("dualpath", "10.00", "10.00 - 10.00", "3.00"),
        ("oracle", "1.00", "1.00 - 1.00", "30.00"),
    ]
    assert not page.too_busy


def test_a_rerun_is_compared_by_times_and_by_ratios_to_basic_and_oracle() -> None:
    found = {
        result.what: (result.measured, result.tolerance, result.any_machine)
        for result in draw_jct(raw_data(job(30.0, 10.0, 1.0))).results
        if result.limit is None
    }
    # Twice the tolerances of medians of three runs.
    assert found["1P2D dualpath: JCT, s"] == (10.0, 0.2, False)
    assert found["1P2D dualpath: Basic / JCT"] == (3.0, 0.1, True)
    assert "1P2D basic: Basic / JCT" not in found


def test_the_ablation_is_drawn_as_the_time_that_each_step_saves() -> None:
    times_s = {
        Mode.BASIC: 50.0,
        Mode.LAYERWISE: 45.0,
        Mode.ROUND_ROBIN: 30.0,
        Mode.DUALPATH: 20.0,
        Mode.ORACLE: 5.0,
    }
    runs = [measured(mode, time_s, {"pe0": 1e6}) for mode, time_s in times_s.items()]
    (table,) = (t for t in draw_jct(raw_data(runs)).tables if "ablation" in t.title)
    assert table.rows == (
        ("layerwise", "layerwise prefill", "45.00", "10.0%", "17.2%"),
        ("round-robin", "dual-path loading", "30.00", "40.0%", "38.2%"),
        ("dualpath", "scheduling", "20.00", "60.0%", "45.6%"),
        ("oracle", "-", "5.00", "90.0%", "-"),
    )
    assert not any("ablation" in t.title for t in draw_jct(raw_data(runs[1:])).tables)


def test_where_storage_suffices_the_target_is_oracle() -> None:
    (target,) = targets(draw_jct(raw_data(job(30.0, 20.0, 25.0))))
    assert target.what == "1P2D: DualPath / Oracle, SNICs suffice"
    assert target.met
    assert "80%" in target.note
    assert targets(draw_jct(raw_data(job(30.0, 20.0, 15.0)))) == []


def test_the_target_is_oracle_also_where_basic_was_not_run() -> None:
    (target,) = targets(draw_jct(raw_data(job(30.0, 20.0, 25.0)[1:])))
    assert target.measured == pytest.approx(0.8)


def test_split_reads_have_targets_with_or_without_the_papers_rule() -> None:
    basic, dualpath, oracle = job(30.0, 20.0, 25.0)
    split = msgspec.structs.replace(dualpath, mode=Mode.SPLIT)
    for runs, titles in (
        (
            [basic, dualpath, oracle, split],
            ["1P2D: DualPath / Oracle", "1P2D: DualPath, split read / Oracle"],
        ),
        ([oracle, split], ["1P2D: DualPath, split read / Oracle"]),
    ):
        found = targets(draw_jct(raw_data(runs)))
        assert [target.what.removesuffix(", SNICs suffice") for target in found] == titles


def test_a_page_is_written_as_files(tmp_path: Path) -> None:
    page = JCT.page(stored(JCT, raw_data(job(30.0, 10.0, 1.0))), "jct", "dualpath lab bench jct")
    names = [path.name for path in write(page, tmp_path / "new")]
    assert names == ["jct.json", "jct.md", "jct.png"]
    text = (tmp_path / "new" / "jct.md").read_text()
    assert "Measured by `dualpath lab bench jct`." in text
    assert "≥ 2.91" in text
    assert "![Job completion time on shaped links](jct.png)" in text
    recorded = read(tmp_path / "new" / "jct.json")
    raw = JCT.recorded(recorded.data)
    assert raw is not None
    assert raw.of("1P2D basic")[0].jct_s == 30.0
    assert JCT.page(raw, recorded.name, recorded.command) == page
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write(page, tmp_path / "file")


def test_a_missed_target_is_shown_as_no() -> None:
    page = Page(results=(KeyResult("ratio", 1.8, 1.9), KeyResult("cost", 0.6, 0.7, at_least=False)))
    assert [target.met for target in page.results] == [False, True]
    assert "| no " in markdown.page(page.report())


def test_the_simulator_gets_the_settings_of_the_lab() -> None:
    nodes = EmulatedNodes(speedup=10.0, recompute_limit_s=2.0)
    setup = simulated_setup(nodes, LAB, Mode.DUALPATH)
    assert setup.cluster.recompute_limit_s == 2.0
    assert setup.cluster.prefill_nodes == 1
    assert setup.cluster.decode_nodes == 2
    assert setup.model.kv_bytes_per_token == nodes.layers * nodes.layer_block_bytes / 64
    slower = scaled_costs(msgspec.structs.replace(nodes, speedup=1.0))
    assert setup.model.prefill.pair_s == pytest.approx(slower.prefill.pair_s / 10)
    found = windows(WindowSettings(agents=2, turns=2))
    table = agent_table(found, 64)
    first = table.first_round[:-1]
    assert (table.hit_tokens[first] == [w.history_tokens // 64 * 64 for w in found]).all()
    assert np.all(table.hit_tokens < table.prompt_tokens)


def test_a_prediction_is_the_time_of_the_simulators_last_answer() -> None:
    nodes = EmulatedNodes()
    agents: list[Window] = windows(WindowSettings(agents=6, turns=2))
    basic = predicted_jct_s(nodes, LAB, Mode.BASIC, agents)
    dualpath = predicted_jct_s(nodes, LAB, Mode.DUALPATH, agents)
    assert 2.0 < basic / dualpath < 3.2
    result = simulate(simulated_setup(nodes, LAB, Mode.BASIC), agent_table(agents, 64))
    assert basic == result.turns.finished_ns.max() / 1e9
