"""A cluster on this machine: its command lines, and what is refused before anything starts."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from dualpath.cli.main import main
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Handover, Mode
from dualpath.launch.commands import engine_command, engine_extra_config, router_command
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.settings import LocalClusterSettings


def settings(**changes: Any) -> LocalClusterSettings:
    return LocalClusterSettings(**({"model": "m", "storage": "kv"} | changes))


def extra_config(command: list[str]) -> dict[str, Any]:
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    extra: dict[str, Any] = transfer["kv_connector_extra_config"]
    return extra


def prefill_config(mode: Mode) -> tuple[list[str], dict[str, Any]]:
    command = engine_command(settings(mode=mode), Role.PREFILL, 0, 8001, 5700)
    return command, extra_config(command)


def test_every_step_of_the_ablation_switches_one_thing_on() -> None:
    command, basic = prefill_config(Mode.BASIC)
    assert (basic["layer_buffers"], basic["compute_quota_s"]) == (0, 0.0)
    assert "--worker-cls" not in command
    for mode in (Mode.LAYERWISE, Mode.ROUND_ROBIN):
        command, extra = prefill_config(mode)
        assert (extra["layer_buffers"], extra["compute_quota_s"]) == (2, 0.0)
        assert "--worker-cls" in command
    for mode in (Mode.DUALPATH, Mode.SPLIT, Mode.ORACLE):
        _, extra = prefill_config(mode)
        assert (extra["layer_buffers"], extra["compute_quota_s"]) == (2, 0.3)


def test_only_the_endpoint_is_open_to_other_machines() -> None:
    wide = settings(host="0.0.0.0")
    router = router_command(wide, 8000, 5700)
    assert router[router.index("--host") + 1] == "0.0.0.0"
    assert "--control-host" not in router  # loopback by default
    engine = engine_command(wide, Role.DECODE, 1, 8002, 5700)
    assert engine[engine.index("--host") + 1] == "127.0.0.1"
    extra = extra_config(engine)
    assert (extra["engine_id"], extra["router"]) == ("de-1", "tcp://127.0.0.1:5700")
    assert extra["api_url"] == "http://127.0.0.1:8002"


def test_vllm_arguments_reach_router_and_engines() -> None:
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    chosen = settings(vllm_args=parser, event_log="events")
    router = router_command(chosen, 8000, 5700)
    assert tuple(router[-len(parser) :]) == parser
    assert router.index("--event-log") < router.index("--vllm-args")
    assert tuple(engine_command(chosen, Role.PREFILL, 0, 8001, 5700)[-len(parser) :]) == parser


def test_only_decode_engines_may_cache_prompts_in_hbm() -> None:
    for chosen, of_a_de in ((settings(), False), (settings(decode_prefix_caching=True), True)):
        for role, expected in ((Role.PREFILL, False), (Role.DECODE, of_a_de)):
            command = engine_command(chosen, role, 0, 8001, 5700)
            assert (
                "--enable-prefix-caching" in command,
                "--no-enable-prefix-caching" in command,
            ) == (expected, not expected)


def test_alpha_and_beta_reach_the_router() -> None:
    router = router_command(settings(alpha_tokens=100, beta_tokens=200), 8000, 5700)
    assert router[router.index("--alpha-tokens") + 1] == "100"
    assert router[router.index("--beta-tokens") + 1] == "200"
    assert "--alpha-tokens" not in router_command(settings(), 8000, 5700)


def test_engines_of_a_machine_get_the_same_directory_to_share_their_dram() -> None:
    chosen = settings(dram_bytes=1 << 30, dram_dir="dram")
    for role in Role:
        extra = extra_config(engine_command(chosen, role, 0, 8001, 5700))
        assert (extra["dram_bytes"], extra["dram_dir"]) == (1 << 30, str(Path("dram").absolute()))
    assert "dram_dir" not in extra_config(engine_command(settings(), Role.DECODE, 0, 8001, 5700))


def test_front_ends_reach_the_router_and_do_without_a_standby() -> None:
    router = router_command(settings(front_ends=3), 8000, 5700, cluster_port=8001)
    assert router[router.index("--front-ends") + 1] == "3"
    assert router[router.index("--cluster-port") + 1] == "8001"
    assert "--front-ends" not in router_command(settings(), 8000, 5700)
    with pytest.raises(ConfigError, match=r"front_ends.* is 3 and .*standby.* is on"):
        settings(front_ends=3, standby=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": "0P1D"}, "nodes is '0P1D'; it must be at least one prefill and one decode node"),
        ({"nodes": "1P-1D"}, "nodes is '1P-1D'"),
        ({"buffer_bytes": 0}, "buffer_bytes is 0"),
        ({"layer_buffers": -1}, "layer_buffers is -1; it must be at least 0"),
        ({"port": 70000}, "port is 70000; it must be between 0 and 65535"),
        (
            {"handover": "hbm", "receive_hbm_share": 0.0},
            "handover.* is hbm and .*receive_hbm_share.* is 0",
        ),
        ({"units": 0}, "units is 0; it must be at least 1"),
        ({"units": 2}, "units.* is 2 and .*front_ends.* is 0; set"),
        (
            {"units": 2, "front_ends": 1, "nodes": "2P1D"},
            "units.* is 2 and .*nodes.* is '2P1D'; each unit needs a prefill and a decode node",
        ),
    ],
)
def test_absurd_sizes_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**change)


def test_decode_engines_receive_prompts_in_hbm_only_where_they_are_handed_over_there() -> None:
    shares = {Handover.BUFFER: None, Handover.HBM: 0.25, Handover.AUTO: 0.25}
    for handover, share in shares.items():
        made = settings(handover=handover)
        extras = [engine_extra_config(made, role, "e", "e", "u", "r") for role in Role]
        assert [extra.get("receive_hbm_share") for extra in extras] == [None, share]


def test_a_model_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    cluster = LocalCluster(settings(model=str(tmp_path), storage=str(tmp_path / "kv")))
    with pytest.raises(ConfigError, match=r"not a folder with a config\.json"):
        cluster.start()
    assert cluster.processes == ()


def test_storage_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    below_a_file = tmp_path / "config.json" / "kv"
    cluster = LocalCluster(settings(model=str(tmp_path), storage=str(below_a_file)))
    with pytest.raises(ConfigError, match=r"cannot be written .*--storage"):
        cluster.start()


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = LocalCluster(
            settings(model=str(tmp_path), storage=str(tmp_path / "kv"), port=port)
        )
        with pytest.raises(ConfigError, match=f"port {port} .* --port"):
            cluster.start()
    assert cluster.processes == ()


def test_a_dry_run_divides_the_engines_among_units(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--storage", "kv", "--nodes", "3P2D", "--front-ends", "1", "--units", "2"]
    assert main(["serve", "m", *words, "--dry-run"]) == 0
    router, *engines = capsys.readouterr().out.splitlines()
    assert "--units 2" in router
    ports = [re.findall(r'"router": "tcp://127.0.0.1:(\d+)"', line) for line in engines]
    assert ports == [["5700"], ["5710"], ["5700"], ["5700"], ["5710"]]


def test_a_dry_run_prints_one_command_per_process(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--storage", "kv", "--nodes", "1P2D", "--port", "0"]
    assert main(["serve", "m", *words, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dualpath router m ")
    assert sum("kv-transfer-config" in line for line in lines) == 3
    assert len(lines) == 4
