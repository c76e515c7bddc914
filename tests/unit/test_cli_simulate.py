"""`dualpath simulate` and `plan`: comparisons from files, and wrong input refused in one line."""

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest

from dualpath.cli.main import main
from dualpath.core.modes import Mode

CLUSTER = """
prefill_nodes = 1
decode_nodes = 2
gpus_per_node = 2
snic_bytes_per_s = 1e9
prefill_buffer_bytes = 4e9
decode_buffer_bytes = 4e9
"""

COSTS = """
name = "small"
layers = 4
kv_bytes_per_token = 1000.0
prefill_tokens_per_s = 20000
context_limit_tokens = 4096

[prefill]
batch_s = 0.01
feed_forward_token_s = 1e-4
pair_s = 1e-8

[decode]
step_s = 0.02
"""

TRACE = [
    {"session_id": "one", "rounds": [[640, 20], [64, 20], [64, 20]]},
    {"session_id": "two", "rounds": [[1280, 10], [128, 10]]},
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A cluster, a model and a trace of one's own, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CLUSTER)
    Path("costs.toml").write_text(COSTS)
    Path("t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return tmp_path


def simulate(*more, trace="t.jsonl", core="reference"):
    inputs = ["--cluster", "c.toml", "--model", "costs.toml", "--trace", trace]
    return main(["simulate", *inputs, "--core", core, *more])


def test_all_modes_are_compared_and_called_simulated(files, capsys):
    assert simulate() == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Simulated results.")
    for text in (*Mode, "speed-up over Basic", "TTFT p99, ms", "hit tokens", "what binds"):
        assert text in captured.out
    assert "2 agents all at once, 5 rounds" in captured.out
    assert all(f"{mode}: 5 rounds" in captured.err for mode in Mode)


def test_modes_come_once_in_the_order_of_the_ablation(files, capsys):
    assert simulate("--mode", "oracle,basic,oracle", "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    heading = captured.out.splitlines()[1]
    assert heading.index("basic") < heading.index("oracle")
    assert heading.count("oracle") == 1
    assert "dualpath" not in heading


def test_equal_commands_write_equal_and_complete_documents(files):
    command = (
        "--quiet",
        "--agents",
        "5",
        "--agents-per-s",
        "2",
        "--seed",
        "3",
        "--mode",
        "dualpath",
    )
    assert simulate("--json", "a.json", *command) == 0
    assert simulate("--json", "b.json", *command) == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    document = msgspec.json.decode(Path("a.json").read_bytes())
    assert document["simulated"] is True
    assert document["seed"] == 3
    assert document["agents_per_s"] == 2
    assert document["cluster"]["snic_bytes_per_s"] == 1e9
    (run,) = document["runs"]
    assert run["mode"] == "dualpath"
    assert run["agents"] == 5
    assert run["unfinished_rounds"] == 0
    assert run["prefill_read_bytes"] + run["decode_read_bytes"] == pytest.approx(
        run["hit_tokens"] * 1000.0
    )


def test_settings_of_the_cluster_can_be_replaced(files, capsys):
    changes = ("--snic-bytes-per-s", "2e6", "--no-lockstep", "--snic-sharing", "equal")
    assert simulate("--mode", "basic", "--json", "a.json", *changes) == 0
    document = msgspec.json.decode(Path("a.json").read_bytes())
    assert document["cluster"]["snic_bytes_per_s"] == 2e6
    assert document["cluster"]["lockstep"] is False
    assert "what binds" in capsys.readouterr().out


def test_engines_of_several_gpus_are_printed(files, capsys):
    engines = ("--gpus-per-node", "8", "--prefill-tp", "4")
    assert simulate("--mode", "dualpath", *engines) == 0
    assert "of 8 GPUs, 4 for a PE and 1 for a DE" in " ".join(capsys.readouterr().out.split())
    assert simulate(*engines, "--decode-dp", "3") == 2
    error = capsys.readouterr().err
    assert "--decode-dp is 3 engines of 1 GPUs" in error


def test_a_run_can_be_cut_and_reports_it(files, capsys):
    assert simulate("--mode", "basic", "--until-s", "0.5") == 0
    assert "rounds unfinished" in capsys.readouterr().out


def test_generated_trajectories_need_no_file(files, capsys):
    Path("costs.toml").write_text(COSTS.replace("4096", "40960"))
    sizes = ("--agents", "2", "--max-turns", "3")
    assert simulate("--mode", "dualpath", *sizes, trace="32k") == 0
    assert "2 agents all at once, 6 rounds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0P1D"], "--nodes is '0P1D'; it must be at least one prefill"),
        (["--nodes", "1P0D"], "--nodes is '1P0D'"),
        (["--snic-bytes-per-s", "-1"], "--snic-bytes-per-s is -1"),
        (["--snic-sharing", "half"], "--snic-sharing is 'half'; it must be one of fifo, equal"),
        (["--gpus-per-node", "1.5"], "--gpus-per-node is '1.5'"),
        (["--decode-hbm-bytes", "1e5"], "raise --decode-hbm-bytes or truncate the trace"),
        (["--decode-buffer-bytes", "1e5"], "raise --decode-buffer-bytes"),
        (["--scale-append", "100"], "above the context limit of 4096"),
        (["--agents", "0"], "--agents is 0; it must be between 1"),
        (["--agents-per-s", "-1"], "--agents-per-s is -1"),
        (["--until-s", "0"], "--until-s is 0.0; it must be above 0"),
        (["--json", "missing/a.json"], "cannot be written"),
        (["--trace-format", "xml"], "--trace-format is 'xml'; it must be one of auto, rounds"),
    ],
)
def test_invalid_input_is_refused_in_one_line_before_anything_runs(
    files, capsys, arguments, message
):
    assert simulate(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--cluster", "atlantis", "'atlantis' is not among the catalog's clusters: "),
        ("--cluster", "missing.toml", "there is no file missing.toml"),
        ("--model", "gpt-17", "'gpt-17' is not among the catalog's models: "),
        ("--trace", "missing.jsonl", "there is no such file"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(files, capsys, flag, value, message):
    inputs = {"--cluster": "c.toml", "--model": "costs.toml", "--trace": "t.jsonl", flag: value}
    arguments = [part for pair in inputs.items() for part in pair]
    assert main(["simulate", *arguments, "--core", "reference"]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_key_in_the_cluster_file_is_named(files, capsys):
    Path("c.toml").write_text(CLUSTER + "gpu_count = 3\n")
    assert simulate() == 2
    message = capsys.readouterr().err
    assert "c.toml" in message
    assert "gpu_count" in message


def test_an_unknown_mode_is_refused_with_the_choices(files, capsys):
    assert simulate("--mode", "telepathy") == 2
    assert "round-robin" in capsys.readouterr().err


def test_without_numba_the_compiled_core_points_to_the_reference(files, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert simulate(core="compiled") == 2
    assert "--core reference" in capsys.readouterr().err


def test_the_plan_of_a_small_cluster_names_the_best_split(files, capsys):
    plan = ["plan", "--total-nodes", "3", "--cluster", "c.toml", "--model", "costs.toml"]
    plan += ["--trace", "t.jsonl", "--agents", "6", "--core", "reference", "--json", "p.json"]
    assert main(plan) == 0
    captured = capsys.readouterr()
    assert "1P2D" in captured.out
    assert "2P1D" in captured.out
    assert "Best of 2 shapes tried" in captured.out
    assert "Eq. 9 finds no bottleneck" in captured.out
    document = msgspec.json.decode(Path("p.json").read_bytes())
    jct = {shape["prefill_nodes"]: shape["jct_s"] for shape in document["plan"]["shapes"]}
    assert document["plan"]["best"]["jct_s"] == min(jct.values())


def test_a_capacity_has_no_number_of_agents(files, capsys):
    plan = ["plan", "--total-nodes", "3", "--cluster", "c.toml", "--model", "costs.toml"]
    plan += ["--trace", "t.jsonl", "--agents", "6", "--core", "reference"]
    assert main([*plan, "--objective", "capacity"]) == 2
    assert "omit --agents" in capsys.readouterr().err


def test_a_broken_line_is_skipped_and_shown_if_asked_for(files, capsys):
    with Path("t.jsonl").open("a") as trace:
        trace.write('{"session_id": "three", "rounds": [[5\n')
    assert simulate() == 2
    assert "t.jsonl, line 3: " in capsys.readouterr().err
    assert simulate("--skip-broken") == 0
    shown = capsys.readouterr()
    assert "skipped: t.jsonl, line 3: " in shown.err
    assert "2 agents" in shown.out


def test_sessions_that_a_context_limit_drops_are_named(files, capsys):
    assert simulate("--max-context-tokens", "1000") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 sessions dropped, whose first prompt is longer: two" in text
