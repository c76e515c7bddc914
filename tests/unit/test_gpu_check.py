"""`dualpath gpu-check`: phases with limits, results that survive failures, the page of them."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from dualpath.cli.main import main
from dualpath.core.errors import ConfigError
from dualpath.node.host_process import process_stat
from dualpath_lab.gpu.answers import PlainAnswer, compared, equal_tokens, likeliest_gap
from dualpath_lab.gpu.cluster import log_rows, prefill_rate, trace_rows
from dualpath_lab.gpu.page import report
from dualpath_lab.gpu.results import Check, PhaseResult, read_result, result_file
from dualpath_lab.gpu.run import NO_GPU, run_phases
from dualpath_lab.gpu.settings import PHASES, GpuCheckSettings, PhaseName, gpus
from dualpath_lab.gpu.ucx import choices

ONE_GPU = ("0",)
#: Puts a finding as a phase does; the folder is the first argument.
FINDS = """\
import os, sys, time
from pathlib import Path
from dualpath_lab.gpu.results import Check
from dualpath_lab.gpu.settings import GpuCheckSettings
check = Check(sys.argv[1], GpuCheckSettings(), Path(sys.argv[2]))
check.put("rows", [{"size": 1, "right": True}])
"""


def programs(**source: str) -> Callable[[str, Path], Sequence[str]]:
    """Return commands that run a program for each phase in place of the real one."""
    return lambda name, out: (sys.executable, "-c", FINDS + source[name], name, str(out))


def run(
    out: Path, limit_s: float = 60.0, found: Sequence[str] = ONE_GPU, **source: str
) -> dict[str, PhaseResult]:
    names: tuple[PhaseName, ...] = tuple(name for name in PHASES if name in source)
    settings = GpuCheckSettings(phases=names, limit_s=limit_s)
    results = run_phases(settings, out, found, lambda text: None, programs(**source), stop_s=10.0)
    return {result.phase: result for result in results}


# ------------------------------------------------------------------------------------------ phases


def test_a_phase_that_fails_keeps_what_it_found_and_the_next_one_runs(tmp_path: Path) -> None:
    results = run(tmp_path, libs="raise RuntimeError('no kernel')", bench="")
    failed = results["libs"]
    assert failed.state == "failed"
    assert failed.reason == "exit code 1: RuntimeError: no kernel"
    assert failed.log_tail[-1] == "RuntimeError: no kernel"
    assert failed.found == {"rows": [{"size": 1, "right": True}]}
    assert results["bench"].ok
    assert [read_result(tmp_path, name) for name in results] == list(results.values())


def test_a_phase_that_crashes_is_a_result(tmp_path: Path) -> None:
    crashed = run(tmp_path, nixl="os.kill(os.getpid(), 11)")["nixl"]
    assert (crashed.state, bool(crashed.found)) == ("failed", True)
    assert crashed.reason.startswith("exit code -11")


def test_a_phase_beyond_its_limit_is_ended_with_the_processes_that_it_started(
    tmp_path: Path,
) -> None:
    """The child has a process group of its own and ignores SIGTERM, as an engine might.

    Its environment is not that of the phase: vLLM's processes overwrite theirs with a title.
    """
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    hangs = (
        "import subprocess\n"
        f"command = [sys.executable, '-c', {child!r}]\n"
        "child = subprocess.Popen(command, start_new_session=True, env={})\n"
        "check.put('child', child.pid)\ntime.sleep(600)"
    )
    result = run(tmp_path, limit_s=12.0, plain=hangs)["plain"]
    assert result.state == "timed out"
    assert "more than 12 s" in result.reason
    assert "--limit-s" in result.reason
    child_now = process_stat(result.found["child"])
    assert child_now is None or child_now.is_zombie


def test_without_a_gpu_only_the_phases_that_need_none_run(tmp_path: Path) -> None:
    results = run(tmp_path, found=(), facts="", pair="raise SystemExit('must not run')")
    assert results["facts"].ok
    assert (results["pair"].state, results["pair"].reason) == ("skipped", NO_GPU)


def test_results_of_an_earlier_run_are_kept_except_those_of_the_same_phases(tmp_path: Path) -> None:
    run(tmp_path, facts="", plain="")
    run(tmp_path, plain="os._exit(3)")
    assert read_result(tmp_path, "facts").state == "ok"  # type: ignore[union-attr]
    page = (tmp_path / "report.md").read_text()
    assert "| facts | ok" in page
    assert "exit code 3" in page


def test_findings_are_on_the_disk_while_the_phase_runs(tmp_path: Path) -> None:
    check = Check("libs", GpuCheckSettings(), tmp_path)
    check.put("kernels", [{"kernel": "rms_norm", "right": True}])
    running = read_result(tmp_path, "libs")
    assert running is not None
    assert (running.state, list(running.found)) == ("running", ["kernels"])


def test_a_result_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_result(tmp_path, "facts") is None
    result_file(tmp_path, "facts").write_text('{"phase": "facts", "st')
    assert read_result(tmp_path, "facts") is None


def test_every_phase_is_a_function() -> None:
    """`plain` and others import vLLM in the function, so all modules import without a GPU."""
    import importlib

    for phase in PHASES.values():
        module, _, function = phase.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


# ---------------------------------------------------------------------------------------- settings


def test_gpus_are_the_requested_else_the_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("dualpath_lab.gpu.settings.usable_devices", lambda asked, **_: asked)
    for name in ("nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus((), tmp_path) == ("0", "1")
    assert gpus(("3", "3"), tmp_path) == ("3", "3")
    assert gpus((), tmp_path / "none") == ()


def test_devices_are_one_for_each_engine() -> None:
    with pytest.raises(ConfigError, match="name two"):
        GpuCheckSettings(devices=("0",)).check()
    GpuCheckSettings(devices=("0", "0")).check()


def test_limits_are_the_phases_own_unless_given() -> None:
    assert GpuCheckSettings().limit("jct") == PHASES["jct"].limit_s
    assert GpuCheckSettings(limit_s=7).limit("jct") == 7


def test_a_machine_without_a_gpu_is_reported_in_one_line_and_by_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dualpath_lab.gpu.settings.gpus", lambda asked=(): ())
    assert main(["gpu-check", "--phases", "plain,jct", "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"dualpath: {NO_GPU}: only facts and libs run"
    assert json.loads((tmp_path / "out/plain.json").read_text())["state"] == "skipped"


# ----------------------------------------------------------------------------------------- answers

PLAIN = PlainAnswer(100, 0.1, [1, 2, 3, 4], [1, 2, 9, 9], [3.0, 2.0, 0.02, 1.5])


@pytest.mark.parametrize(
    ("found", "equal", "gap"),
    [
        ([1, 2, 3, 4], 4, None),
        ([1, 2, 9, 9], 4, None),  # as the plain engine with KV computed in other pieces
        ([1, 2, 7, 4], 2, 0.02),
        ([8, 2, 3, 4], 0, 3.0),
    ],
)
def test_an_answer_is_compared_up_to_the_first_different_token(
    found: list[int], equal: int, gap: float | None
) -> None:
    row = compared(found, PLAIN)
    assert row == {"equal_tokens": equal, "of": 4, "gap_where_they_part": gap}
    assert compared(found, None) == {}


def test_the_gap_is_that_of_the_two_likeliest_tokens() -> None:
    assert likeliest_gap([-3.0, -0.5, -1.0]) == 0.5
    assert likeliest_gap([-0.5]) == 0.0
    assert equal_tokens([1, 2], [1, 2, 3]) == 2


# -------------------------------------------------------------------------------- page and logs


def test_the_page_has_the_phases_their_reasons_and_a_table_for_each_finding() -> None:
    results = [
        PhaseResult(phase="facts", state="ok", seconds=2, found={"driver": "580", "smi": "a\nb"}),
        PhaseResult(phase="nixl", state="failed", reason="exit code 1: x", found={
            "transfers": [{"to": "VRAM", "right": False}, {"to": "DRAM", "GB_per_s": 1.23456}],
        }),
        PhaseResult(phase="jct", state="skipped", reason=NO_GPU),
    ]  # fmt: skip
    drawn = report(results)
    (phases,) = drawn.blocks
    assert [row[:2] for row in phases.rows] == [  # type: ignore[union-attr]
        ("facts", "ok"), ("nixl", "failed"), ("jct", "skipped"),
    ]  # fmt: skip
    facts, nixl = drawn.parts
    assert facts.blocks[0].rows == (("driver", "580"),)  # type: ignore[union-attr]
    (transfers,) = nixl.blocks
    assert transfers.columns == ("to", "right", "GB_per_s")  # type: ignore[union-attr]
    assert transfers.rows == (("VRAM", "no", "-"), ("DRAM", "-", "1.235"))  # type: ignore[union-attr]


def test_traces_are_summed_by_kind_of_work_and_a_broken_one_is_left_out(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "tid": "load 1", "dur": 1000.0, "args": {"steps": [{"bytes": 1_000_000}]}},
        {"ph": "X", "tid": "load 2", "dur": 3000.0, "args": {"steps": [{"bytes": 3_000_000}]}},
        {"ph": "M", "tid": "load 1"},
    ]
    (tmp_path / "pe-0.json").write_text(json.dumps(events))
    (tmp_path / "de-0.json").write_text("[{")
    (row,) = trace_rows(tmp_path)
    assert (row["engine"], row["work"], row["number"]) == ("pe-0", "load", 2)
    assert row["total_s"] == pytest.approx(0.004)
    assert row["GB_per_s"] == pytest.approx(1.0)


def test_the_measured_prefill_rate_is_found_in_the_engines_log(tmp_path: Path) -> None:
    assert prefill_rate(tmp_path) is None
    costs = "PassCosts(attention=None, prefill_tokens_per_s=9173.25, limit=1)"
    (tmp_path / "pe-0.log").write_text(f"x\npass costs measured over 5 passes, f.json: {costs}\n")
    assert prefill_rate(tmp_path) == 9173.25


def test_waits_of_a_pass_are_summed_by_what_they_wait_for(tmp_path: Path) -> None:
    """A wait for a send is the engine's thread in the way of the next layer."""
    names = ("send of layer 0", "load of layer 1", "send of layer 1")
    events = [{"ph": "X", "tid": "wait", "name": name, "dur": 1000.0} for name in names]
    (tmp_path / "pe-0.json").write_text(json.dumps(events))
    found = [(row["work"], row["number"]) for row in trace_rows(tmp_path)]
    assert found == [("wait for send", 2), ("wait for load", 1)]


UCX_LOG = """\
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | here self cfg#0                                          |
[1.2] [vm:1:0]   | remote memory write by ucp_put* from cuda/GPU0 to host   |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | Range  | Description |              Config               |
[1.2] [vm:1:0]   | 0..inf | zero-copy   | rc_mlx5/mlx5_0:1                  |
[1.2] [vm:1:0]   | active message by ucp_am_send* from host memory          |
[1.2] [vm:1:0]   |           0 | short              | tcp/lo                |
"""


def test_ucxs_choice_for_device_copies_is_found_in_its_log() -> None:
    assert choices((UCX_LOG * 2).splitlines()) == [
        {
            "operation": "write from cuda/GPU0 to host",
            "bytes": "0..inf",
            "how": "zero-copy",
            "UCX": "rc_mlx5/mlx5_0:1",
        }
    ]


def test_the_lines_that_describe_an_engine_and_its_first_error_are_stored(tmp_path: Path) -> None:
    (tmp_path / "pe-0.log").write_text(
        "INFO Using LBHNC KV cache layout\nINFO Using LBHNC KV cache layout\nnoise\n"
        "WARNING this can cause errors like `OSError: Too many open files`\n"
        "ERROR first\nERROR second\n"
    )
    (tmp_path / "de-0.log").write_text(
        "INFO [shutdown] API server: complete\nERROR AsyncLLM output_handler failed.\n"
    )
    assert [row["line"] for row in log_rows(tmp_path)] == [
        "Using LBHNC KV cache layout",
        "first error: ERROR first",
    ]


def test_settings_reach_the_process_of_a_phase(tmp_path: Path) -> None:
    run(tmp_path, facts="")
    written = msgspec.json.decode((tmp_path / "settings.json").read_bytes(), type=GpuCheckSettings)
    assert written.phases == ("facts",)
