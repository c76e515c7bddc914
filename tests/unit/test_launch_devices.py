"""Each engine of a machine gets its own devices, and settings that cannot start are refused."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from dualpath.cli.main import main
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.launch import devices
from dualpath.launch.commands import ENGINE_ENVIRONMENT, engine_command, engine_environment
from dualpath.launch.devices import DevicePlan, usable_devices
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.settings import LocalClusterSettings


def settings(**changes: Any) -> LocalClusterSettings:
    return LocalClusterSettings(**({"model": "m", "storage": "kv"} | changes))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 9}))
    return str(tmp_path)


def test_engines_get_their_devices_in_order_prefill_first() -> None:
    several = settings(nodes="2P1D", prefill_tp=2, decode_dp=2)
    plan = DevicePlan(several, ["4", "5", "6", "7", "0", "1"])
    assert plan.environment(Role.PREFILL, 0) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert plan.environment(Role.PREFILL, 1) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert [plan.of(Role.DECODE, 0, rank) for rank in (0, 1)] == [("0",), ("1",)]


def test_too_few_devices_are_refused_with_the_number_needed() -> None:
    with pytest.raises(ConfigError, match=r"1P2D need 3 devices, and there are 2 \(0, 1\)"):
        DevicePlan(settings(nodes="1P2D"), ["0", "1"])
    shared = DevicePlan(settings(nodes="1P1D"), ["0", "0"])
    assert shared.of(Role.PREFILL, 0) == shared.of(Role.DECODE, 0) == ("0",)


def test_engines_of_one_gpu_get_equal_shares_of_its_memory() -> None:
    def share(index: int, role: Role, **changes: Any) -> str | None:
        command = engine_command(settings(**changes), role, index, 1, 2, on_cpus=False)
        if "--gpu-memory-utilization" not in command:
            return None
        return command[command.index("--gpu-memory-utilization") + 1]

    two: dict[str, Any] = {"nodes": "1P2D", "devices": ("0", "0", "1")}
    assert share(0, Role.PREFILL, **two) == share(0, Role.DECODE, **two) == "0.45"
    assert share(1, Role.DECODE, **two) is None
    assert share(0, Role.PREFILL, devices=("0", "1")) is None
    assert share(0, Role.PREFILL) is None


def test_a_share_that_the_user_gives_comes_last_and_is_used() -> None:
    chosen = settings(devices=("0", "0"), vllm_args=("--gpu-memory-utilization", "0.3"))
    command = engine_command(chosen, Role.PREFILL, 0, 1, 2, on_cpus=False)
    assert command[-2:] == ["--gpu-memory-utilization", "0.3"]


def test_passes_are_eager_on_cpus_and_have_graphs_on_gpus_unless_chosen() -> None:
    def eager(on_cpus: bool, **changes: Any) -> bool:
        command = engine_command(settings(**changes), Role.DECODE, 0, 1, 2, on_cpus=on_cpus)
        return "--enforce-eager" in command

    assert eager(True)
    assert not eager(False)
    assert eager(False, enforce_eager=True)
    assert not eager(True, enforce_eager=False)


def test_variables_for_cpus_are_not_set_for_a_build_for_gpus() -> None:
    assert engine_environment(gpu_build=False) == ENGINE_ENVIRONMENT
    assert engine_environment(gpu_build=True) == {"VLLM_NO_USAGE_STATS": "1"}


def test_without_devices_engines_share_the_cpus() -> None:
    plan = DevicePlan(settings(nodes="8P8D"), [])
    assert plan.on_cpus
    assert plan.environment(Role.DECODE, 7) == {}


def test_devices_are_the_requested_else_the_visible_else_all(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:41:00.0"):
        (tmp_path / name).mkdir()
    machine: dict[str, Any] = {"cpu_build": False, "driver": tmp_path}
    visible = {"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}
    assert usable_devices(("7",), visible, **machine) == ("7",)
    assert usable_devices((), visible, **machine) == ("3", "GPU-ab")
    assert usable_devices((), {"CUDA_VISIBLE_DEVICES": ""}, **machine) == ()
    assert usable_devices((), {}, **machine) == ("0", "1")
    assert usable_devices((), visible, **(machine | {"cpu_build": True})) == ()
    assert usable_devices((), {}, cpu_build=False, driver=tmp_path / "none") == ()


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert main(["serve", *words, "--storage", "kv", "--port", "0", "--dry-run"]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_a_dry_run_prints_what_fits_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    _, prefill, decode = dry_run(capsys, "m", "--devices", "2,3")
    assert (prefill[0], decode[0]) == ("CUDA_VISIBLE_DEVICES=2", "CUDA_VISIBLE_DEVICES=3")
    assert prefill[1:3] == ["VLLM_NO_USAGE_STATS=1", "python"]
    assert "--enforce-eager" not in prefill + decode
    for command in (prefill, decode):
        assert not [word for word in command if "VLLM_CPU" in word or word.startswith("OMP_")]
        assert "--kv-cache-memory-bytes" not in command
    _, limited, _ = dry_run(capsys, "m", "--devices", "2,3", "--hbm-bytes", "8GiB")
    assert limited[limited.index("--kv-cache-memory-bytes") + 1] == str(8 << 30)


def test_a_dry_run_prints_what_fits_cpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_cpu_build", lambda: True)
    _, prefill, _ = dry_run(capsys, "m")
    assert "VLLM_CPU_OMP_THREADS_BIND=nobind" in prefill
    assert prefill[prefill.index("--kv-cache-memory-bytes") + 1] == str(512 << 20)
    assert not [word for word in prefill if word.startswith("CUDA_VISIBLE_DEVICES")]
    assert "vllm.entrypoints.launchers.api_server.entry" in prefill


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block-tokens", "63"], "--block-tokens is 63; attention kernels need a multiple of 16"),
        (["--prefill-tp", "2"], "--prefill-tp is 2, and model '{model}' has 9 attention heads"),
        (["--decode-tp", "4"], "--decode-tp is 4, and model '{model}' has 9 attention heads"),
        (
            ["--vllm-args", "--tensor-parallel-size", "2"],
            "--tensor-parallel-size among --vllm-args is 2, and model '{model}' has 9",
        ),
        (["--vllm-args", "-tp=2"], "-tp among --vllm-args is 2"),
        (["--devices", "0"], "1P1D need 2 devices, and there are 1 (0); change --nodes"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(
    words: list[str],
    message: str,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    storage = str(tmp_path / "kv")
    assert main(["serve", model, "--storage", storage, "--dry-run", *words]) == 2
    refused = capsys.readouterr()
    assert message.format(model=model) in refused.err
    assert not refused.out
    assert not Path(storage).exists()
    assert main(["serve", model, "--storage", storage, *words]) == 2
    assert message.format(model=model) in capsys.readouterr().err


def test_a_tensor_parallel_size_that_fits_is_not_refused(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, prefill, _ = dry_run(capsys, model, "--prefill-tp", "3", "--block-tokens", "48")
    assert prefill[prefill.index("--tensor-parallel-size") + 1] == "3"


@pytest.mark.parametrize("model", ["./none", "/no/such/model", "some/where/else"])
def test_a_missing_model_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", model, "--storage", "kv", "--dry-run"]) == 2
    assert f"model '{model}' is not a folder with a config.json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"is not a folder with a config\.json"):
        LocalCluster(settings(model=model, storage=str(tmp_path / "kv"))).start()


def test_the_heads_of_a_multi_modal_model_are_those_of_its_text_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"num_attention_heads": 8, "text_config": {"num_attention_heads": 9}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["serve", str(tmp_path), "--storage", "kv", "--decode-tp", "2", "--dry-run"]) == 2
    assert "9 attention heads" in capsys.readouterr().err
