"""The page about other stacks follows from the runs; the target considers only PD peers."""

import argparse

import pytest

from dualpath.core.errors import ConfigError
from dualpath.workload.replay.result import Distribution
from dualpath_lab.benchmarks.peers.comparison import (
    DRAM_RATIO_TARGET,
    DUALPATH,
    PEERS_EXPERIMENT,
    PeersSettings,
    draw,
    peers_stage,
)
from dualpath_lab.benchmarks.peers.one_run import RunRecord
from dualpath_lab.cli.lab import BENCH
from dualpath_sim.cli.experiments import command_line
from dualpath_sim.harness.experiment import KeyResult, Page, RawData, Run

TTFT = Distribution(count=2, mean=1.0, p50=1.0, p90=2.0, p99=2.0, max=2.0)


def run(
    stack: str, jct_s: float, answer: str = "same", *, read_bytes: int | None = None
) -> RunRecord:
    return RunRecord(
        stack=stack,
        aggregated=stack.endswith("-aggregated"),
        jct_s=jct_s,
        ttft_s=TTFT,
        tpot_s=None,
        prompt_tokens=1000,
        hit_tokens=970,
        turns=2,
        turns_failed=0,
        snic_bytes={"pe0": int(jct_s * 25e6) if read_bytes is None else read_bytes, "de0": 0},
        cnic_in_bytes={"pe0": 0, "de0": 5_000_000},
        stored_bytes=10,
        busy=0.5,
        cpu_s={"pe0": 3.0, "de0": 2.0},
        digests={"a/0": "first", "b/0": answer},
        errors=[],
    )


def raw_data(*runs: RunRecord) -> RawData[PeersSettings, RunRecord]:
    return RawData(
        experiment="peers",
        settings=PeersSettings(nodes="1P2D"),
        runs=[Run(cell=run.stack, round=number, result=run) for number, run in enumerate(runs)],
    )


def page(*runs: RunRecord) -> Page:
    return draw(raw_data(*runs))


def targets(*runs: RunRecord) -> list[KeyResult]:
    return [result for result in page(*runs).results if result.limit is not None]


RUNS = (
    run("vllm-slow", 150.0),
    run("vllm-fast", 100.0, "another"),
    run("vllm-fast-aggregated", 45.0),
    run(DUALPATH, 48.0),
    run("vllm-fast", 110.0, "another"),
    run(DUALPATH, 52.0),
    run("vllm-fast", 90.0, "another"),
    run(DUALPATH, 50.0),
)


def test_the_target_compares_medians_with_the_best_disaggregated_peer():
    (target,) = targets(*RUNS)
    assert (target.measured, target.met, target.note) == (2.0, True, "vllm-fast")


def test_if_the_best_peer_reads_nothing_the_target_is_that_of_dram():
    runs = run("vllm-slow", 30.0), run("vllm", 21.0, read_bytes=0), run(DUALPATH, 20.0)
    (target,) = targets(*runs)
    assert (target.measured, target.limit, target.note) == (1.05, DRAM_RATIO_TARGET, "vllm")
    assert not target.met


def test_others_are_compared_with_the_default_mode_or_else_with_mode_dualpath():
    paper = run("dualpath-dualpath", 40.0)
    for runs, ratio in (((paper,), 2.5), ((paper, run(DUALPATH, 50.0)), 2.0)):
        (target,) = targets(run("vllm", 100.0), *runs)
        assert target.measured == ratio


def test_without_dualpath_or_peers_there_is_no_target():
    assert targets(run("vllm-slow", 1.0)) == []
    assert targets(run(DUALPATH, 1.0), run("vllm-slow-aggregated", 1.0)) == []


def test_times_and_ratios_to_dualpath_are_compared_less_strictly_with_fewer_runs():
    found = {result.what: result for result in page(*RUNS).results}
    fast, slow = found["vllm-fast: JCT / DualPath's"], found["vllm-slow: JCT / DualPath's"]
    assert (fast.measured, fast.tolerance, slow.tolerance) == (2.0, 0.05, 0.1)
    assert found["vllm-fast: JCT, s"].tolerance == 0.1


def test_every_stack_has_a_row_with_its_ratio_range_and_outputs():
    jct, read = page(*RUNS).tables
    rows = {row[0]: dict(zip(jct.columns, row, strict=True)) for row in jct.rows}
    assert list(rows) == ["vllm-slow", "vllm-fast", "vllm-fast-aggregated", DUALPATH]
    fast = rows["vllm-fast"]
    assert (fast["runs"], fast["JCT s"], fast["range s"]) == ("3", "100.0", "90.0 - 110.0")
    assert (fast["to DualPath"], fast["hit tokens"]) == ("2.00", "97.0%")
    assert fast["same outputs as DualPath"] == "1 of 2"
    assert rows["vllm-fast-aggregated"]["to DualPath"] == "0.90"
    assert ("vllm-fast", "2500", "0", "0", "5") in read.rows


def test_a_command_has_several_peers_and_no_folder(monkeypatch):
    words = ["peers", "--peer", "vllm-nixl-lmcache=/some/where", "--peer", "vllm-x=LM"]
    parser = argparse.ArgumentParser()
    BENCH.add_arguments(parser, PEERS_EXPERIMENT)
    args = parser.parse_args([*words[1:], "--modes", "split,basic-recompute"])
    settings = BENCH.settings(args, PEERS_EXPERIMENT.settings)
    assert settings.peer == {"vllm-nixl-lmcache": "/some/where", "vllm-x": "LM"}
    assert settings.modes == ("split", "basic-recompute")
    monkeypatch.setattr("sys.argv", ["dualpath", "lab", "bench", *words, "--out", "o"])
    assert command_line() == (
        "dualpath lab bench peers --peer vllm-nixl-lmcache=where --peer vllm-x=LM"
    )


def test_an_unknown_stack_is_refused():
    with pytest.raises(ConfigError, match="vllm-x: unknown stack"):
        peers_stage(PeersSettings(peer={"vllm-x": "LM"}))
