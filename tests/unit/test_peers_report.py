"""The page about other stacks follows from the runs; the target considers only PD peers."""

import msgspec
import pytest

from dualpath.node.machine import ClientMachine
from dualpath.report import markdown
from dualpath.workload.replay.result import Distribution
from dualpath_lab.benchmarks.peers.comparison import (
    DRAM_RATIO_TARGET,
    DUALPATH,
    Measurement,
    command,
    measured_arguments,
    parse_arguments,
    peers_report,
)
from dualpath_lab.benchmarks.peers.one_run import RunRecord
from dualpath_lab.experiments.report import as_report, write_experiment

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


def report(*runs: RunRecord):
    measurement = Measurement(
        arguments=measured_arguments(parse_arguments(["--nodes", "1P2D"])),
        kv_bytes_per_token=32768,
        machine=ClientMachine(
            cpu_count=2, cpu_model="none", memory_bytes=1, platform="Linux", python="3.11"
        ),
        versions={"dualpath": "0.1.0"},
        date="2026-11-22",
        runs=list(runs),
    )
    return peers_report("peers", "the command", measurement)


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
    (target,) = report(*RUNS).targets
    assert (target.measured, target.met, target.note) == (2.0, True, "vllm-fast")


def test_if_the_best_peer_reads_nothing_the_target_is_that_of_dram():
    runs = run("vllm-slow", 30.0), run("vllm", 21.0, read_bytes=0), run(DUALPATH, 20.0)
    (target,) = report(*runs).targets
    assert (target.measured, target.limit, target.note) == (1.05, DRAM_RATIO_TARGET, "vllm")
    assert not target.met


def test_others_are_compared_with_the_default_mode_or_else_with_mode_dualpath():
    paper = run("dualpath-dualpath", 40.0)
    for runs, ratio in (((paper,), 2.5), ((paper, run(DUALPATH, 50.0)), 2.0)):
        (target,) = report(run("vllm", 100.0), *runs).targets
        assert target.measured == ratio


def test_without_dualpath_or_peers_there_is_no_target():
    assert report(run("vllm-slow", 1.0)).targets == ()
    assert report(run(DUALPATH, 1.0), run("vllm-slow-aggregated", 1.0)).targets == ()


def test_every_stack_has_a_row_with_its_ratio_range_and_outputs():
    jct, read = report(*RUNS).tables
    rows = {row[0]: dict(zip(jct.columns, row, strict=True)) for row in jct.rows}
    assert list(rows) == ["vllm-slow", "vllm-fast", "vllm-fast-aggregated", DUALPATH]
    fast = rows["vllm-fast"]
    assert (fast["runs"], fast["JCT s"], fast["range s"]) == ("3", "100.0", "90.0 - 110.0")
    assert (fast["to DualPath"], fast["hit tokens"]) == ("2.00", "97.0%")
    assert fast["same outputs as DualPath"] == "1 of 2"
    assert rows["vllm-fast-aggregated"]["to DualPath"] == "0.90"
    assert ("vllm-fast", "2500", "0", "0", "5") in read.rows


def test_the_page_is_written_with_every_run_behind_it(tmp_path):
    page = report(*RUNS)
    paths = write_experiment(page, tmp_path)
    assert [path.name for path in paths] == ["peers.json", "peers.md", "peers.png"]
    assert len(msgspec.json.decode(paths[0].read_bytes())["data"]["runs"]) == len(RUNS)
    assert "Lab of 1P2D" in markdown.page(as_report(page))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], ""),
        (["--modes", "split"], " --modes split"),
        (
            ["--nodes", "1P2D", "--repeats", "3", "--peer", "vllm-x=/some/where", "--out", "o"],
            " --nodes 1P2D --repeats 3 --peer vllm-x=ENVIRONMENT",
        ),
    ],
)
def test_the_command_contains_changed_options_but_no_folder(words, options):
    assert (
        command(parse_arguments(words))
        == "python -m dualpath_lab.benchmarks.peers.comparison" + options
    )
