"""The experiments on a DRAM tier and on sealed KV: histories of agents, and the reports."""

from pathlib import Path

import msgspec
import pytest
from tests.unit.test_experiments import LINKS, SNIC_BYTES_PER_S, measured, turn

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import read_trace
from dualpath.workload.replay.result import ServerCounters, ToolDelays
from dualpath_lab.experiments.dram_tier import TierResult, dram_share, tier_result
from dualpath_lab.experiments.dram_tier import draw as draw_tier
from dualpath_lab.experiments.engine_nodes import EmulatedEngines, simulated_setup
from dualpath_lab.experiments.runs import Measured
from dualpath_lab.experiments.sealed_blocks import KINDS, SEALED, sealed_result
from dualpath_lab.experiments.sealed_blocks import draw as draw_sealed
from dualpath_lab.experiments.settings import (
    EmulatedNodes,
    History,
    JctSettings,
    TierSettings,
    WindowSettings,
)
from dualpath_lab.experiments.workload import (
    windows,
    working_set_tokens,
    write_histories,
    write_rounds,
)
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.harness.experiment import KeyResult, Page, RawData, Run
from dualpath_sim.simulator.derived import buffer_bytes, has_dram_tier

LAB = LabSettings(name="paper", nodes="1P2D", snic_bytes_per_s=SNIC_BYTES_PER_S)
NODES = ("pe0", "de0", "de1")


def test_agents_without_histories_begin_with_their_first_turns(tmp_path: Path) -> None:
    chosen = WindowSettings(agents=5, turns=3, scale=0.1)
    met = windows(chosen)
    begun = windows(msgspec.structs.replace(chosen, history=History.NONE))
    assert all(window.history_tokens > 0 for window in met)
    assert all(window.history_tokens == 0 for window in begun)
    assert working_set_tokens(begun) < working_set_tokens(met)
    write_histories(begun, tmp_path / "histories.jsonl")
    assert (tmp_path / "histories.jsonl").read_text().strip() == ""


def test_recorded_pauses_are_replayed_up_to_a_maximum_except_before_the_first_turn(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.jsonl"
    rounds = [
        {"prompt": 100, "append": 100, "context": 0, "gen": 8, "think_s": 0.0},
        {"prompt": 118, "append": 10, "context": 108, "gen": 8, "think_s": 3.0},
        {"prompt": 136, "append": 10, "context": 126, "gen": 8, "think_s": 500.0},
        {"prompt": 154, "append": 10, "context": 144, "gen": 8, "think_s": 4.0},
    ]
    trace.write_bytes(msgspec.json.encode({"session_id": "a", "rounds": rounds}) + b"\n")
    chosen = WindowSettings(
        trace=str(trace), agents=1, turns=3, scale=1.0, longest_pause_s=20.0, seed=3
    )
    found = windows(chosen)
    write_rounds(found, tmp_path / "run.jsonl")
    (session,) = read_trace(tmp_path / "run.jsonl")
    assert isinstance(session, TokenSession)
    replayed = session.trajectory.rounds
    assert replayed == found[0].trajectory.rounds
    assert [r.delay_s for r in replayed] == [0.0, 20.0, 4.0]
    assert [r.append_tokens for r in replayed[1:]] == [10, 10]


def test_the_share_that_fits_is_additional_dram_with_and_without_a_tier() -> None:
    plain = EmulatedNodes(buffer_bytes=64 << 20, dram_bytes=32 << 20)
    tier = msgspec.structs.replace(plain, dram_tier=True)
    setups = [simulated_setup(nodes, LAB, Mode.DUALPATH) for nodes in (plain, tier)]
    assert [has_dram_tier(setup) for setup in setups] == [False, True]
    assert [buffer_bytes(setup)[1] for setup in setups] == [96 << 20, 96 << 20]


def test_blocks_of_one_kind_are_stored_once() -> None:
    plain = EmulatedNodes()
    kinds = {
        EmulatedEngines(
            msgspec.structs.replace(plain, storage_protection=kind, dram_bytes=size)
        ).stored_kind(Mode.DUALPATH)
        for kind in KINDS
        for size in (0, 1 << 20)
    }
    assert kinds == {"kv", "kv-authenticated", "kv-encrypted"}
    assert EmulatedEngines(plain).stored_kind(Mode.ORACLE) == "lengths"


def run_of(jct_s: float, read_bytes: float = 0.0, cached_bytes: int = 0) -> Measured:
    """Return a run in which nodes read ``read_bytes`` and a DE had ``cached_bytes`` in DRAM."""
    made = measured(Mode.DUALPATH, jct_s, dict.fromkeys(NODES, read_bytes / 3 / jct_s))
    other = {"dram_hit_bytes": {"de0": cached_bytes, "de1": 0}, "snic_write_bytes": {"pe0": 10**9}}
    server = ServerCounters(None, None, {}, {}, other)
    replay = msgspec.structs.replace(made.client.replay, server=server)
    return msgspec.structs.replace(made, client=msgspec.structs.replace(made.client, replay=replay))


def raw_data(
    settings: TierSettings, runs: dict[str, list[Measured]]
) -> RawData[TierSettings, TierResult]:
    jct = msgspec.structs.replace(settings.jct, agents_per_node=3, lab=LAB)
    own = msgspec.structs.replace(settings, jct=jct)
    return RawData(
        experiment="dram",
        settings=own,
        runs=[
            Run(cell=name, round=number, result=tier_result(run, own, LAB, LINKS, 4e8))
            for name, done in runs.items()
            for number, run in enumerate(done)
        ],
    )


def targets(page: Page) -> list[KeyResult]:
    return [result for result in page.results if result.limit is not None]


def test_each_share_has_its_own_target() -> None:
    runs = {
        "100%, no tier": [run_of(20.0, 6e8)],
        "100%, tier": [run_of(10.4, 0.0, 600_000_000)],
        "25%, no tier": [run_of(20.0, 6e8)],
        "25%, tier": [run_of(16.0, 4.5e8, 150_000_000)],
        "0%, no tier": [run_of(20.0, 6e8)],
        "0%, tier": [run_of(20.2, 6e8)],
        "oracle": [run_of(10.0)],
    }
    page = draw_tier(raw_data(TierSettings(), runs))
    fits, part, nothing = targets(page)
    assert [target.met for target in targets(page)] == [True, False, True]
    assert fits.measured == pytest.approx(1.04)
    assert part.measured == pytest.approx(1.25)
    assert nothing.measured == pytest.approx(1.01)
    assert dram_share(runs["25%, tier"][0]) == pytest.approx(0.25)
    assert [row[1] for row in page.tables[1].rows] == ["0%", "100%", "0%", "25%", "0%", "0%"]
    assert "additional DRAM, with and without a tier: 100%: 200 MB" in page.settings[4]


def test_only_turns_after_long_enough_pauses_count() -> None:
    """A storage NIC reads the 64 hit tokens of ``turn`` in 64 * 5376 bytes / 50 MB/s: 7 ms."""
    settings = TierSettings(tool_delays=ToolDelays.RECORDED)

    def with_pauses(short_ttft_s: float, long_ttft_s: float) -> Measured:
        turns = tuple(
            msgspec.structs.replace(turn(0.0, ttft_s), delay_s=delay_s)
            for ttft_s, delay_s in ((short_ttft_s, 0.006), (long_ttft_s, 0.008))
        )
        return measured(Mode.DUALPATH, 5.0, dict.fromkeys(NODES, 1.0), turns)

    oracle, tier = with_pauses(0.1, 0.2), with_pauses(9.0, 0.21)
    runs = {
        f"{share}, {kind}": [tier]
        for share in ("100%", "25%", "0%")
        for kind in ("no tier", "tier")
    }
    page = draw_tier(raw_data(settings, {**runs, "oracle": [oracle]}))
    assert [target.measured for target in targets(page)] == [pytest.approx(1.05)] * 3
    assert all(target.limit == 1.1 for target in targets(page))
    assert any("1 of 2" in line for line in page.settings)


def test_the_cost_of_sealing_is_cpu_time_per_stored_byte() -> None:
    """Engines of ``measured`` took 4 CPU-s, for 1 GB written and the bytes read."""
    results = {
        "dualpath, none": sealed_result(run_of(10.0, 1e9), LAB, LINKS),
        "dualpath, authenticated": sealed_result(run_of(10.5, 1e9), LAB, LINKS),
        "dualpath, encrypted": sealed_result(run_of(11.0, 3e9), LAB, LINKS),
    }
    assert results["dualpath, none"].cpu_s_per_gb == pytest.approx(2.0, rel=0.01)
    raw = RawData(
        experiment="sealed",
        settings=SEALED.settings,
        runs=[Run(cell=name, round=0, result=result) for name, result in results.items()],
    )
    page = draw_sealed(raw)
    plain, authenticated, encrypted = page.tables[0].rows
    assert plain[4:8:3] == ("1.000", "-")
    assert authenticated[4] == "1.050"
    assert encrypted[7] == "-1.00"
    assert {result.what: result.measured for result in page.results[1:]} == pytest.approx(
        {"dualpath, authenticated: JCT / plain": 1.05, "dualpath, encrypted: JCT / plain": 1.1}
    )


def test_an_experiment_on_a_tier_needs_one_cluster_and_a_share() -> None:
    with pytest.raises(ConfigError, match="shares"):
        TierSettings(shares=()).check()
    with pytest.raises(ConfigError, match="give one cluster"):
        TierSettings(jct=JctSettings(nodes=("1P1D", "1P2D"))).check()
