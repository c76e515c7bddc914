"""vLLM's CUDA build with an emulated GPU: Model Runner V2 and dualpath's CUDA code on a CPU."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from dualpath.transport.nixl import nixl_package
from dualpath_lab.gpu.emulation import environment
from dualpath_lab.gpu.results import PhaseResult, read_result

pytest.importorskip(nixl_package())
pytestmark = [pytest.mark.engine, pytest.mark.nixl, pytest.mark.long, pytest.mark.timeout(1500)]

#: Time limits of one phase and of all of them.
PHASE_S, RUN_S = 400, 900


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Path]:
    if reason := environment.refusal():
        pytest.skip(reason)
    made, wheels = tmp_path / "environment", tmp_path / "wheels"
    try:
        interpreter = environment.make(made, wheels)
    except subprocess.SubprocessError as error:
        pytest.skip(f"pip cannot download vLLM's CUDA build and Triton: {error}")
    yield interpreter
    for folder in (made, wheels):  # 1.5 GB
        shutil.rmtree(folder)


def test_answers_on_an_emulated_gpu_are_those_of_a_plain_engine(
    python: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    command = [
        *(str(python), "-m", "dualpath.cli.main", "gpu-check", "--rehearse", "--devices", "0,0"),
        *("--phases", "libs,plain,pair", "--limit-s", str(PHASE_S), "--out", str(out)),
        *("--start-timeout-s", str(PHASE_S)),
    ]
    inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        command, env={**inherited, **environment.variables(tmp_path)}, timeout=RUN_S
    )
    page = (out / "report.md").read_text()
    assert ended.returncode == 0, page
    libs, pair = found(out, "libs"), found(out, "pair")
    assert all(row["right"] for row in libs.found["kernels"])
    answers = pair.found["answers"]
    turns = [*["cold", "stored", "continued"] * 2, "after its answer"]
    assert [row["turn"] for row in answers] == turns
    assert answers[-1]["cached_tokens"] > answers[0]["prompt_tokens"]  # generated blocks
    for row in answers:
        assert row["equal_tokens"] == row["of"] or row["gap_where_they_part"] < 0.1, row
        assert row["turn"] == "cold" or row["cached_tokens"] > 0, row
    logs = "".join(path.read_text() for path in (out / "logs" / "pair" / "pair").glob("?e-0.log"))
    assert "[model_runner.py:" in logs  # Model Runner V2; the first version is gpu_model_runner.
    assert "[gpu_model_runner.py:" not in logs
    assert logs.count("copies between DRAM and HBM are made by CUDA") == 2
    assert "h2d" in {row["work"] for row in pair.found["pair: work of engines"]}


def found(out: Path, phase: str) -> PhaseResult:
    result = read_result(out, phase)
    assert result is not None
    return result
