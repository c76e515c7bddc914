"""Bundles, processes of a node and refusals of the Ray executor; Ray is not started."""

import json
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.guard import GUARD_S
from tests.launched import ENTRY

from dualpath.cli.main import main
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.launch import ray_executor
from dualpath.launch.commands import ENGINE_ENTRY, ROUTER_ENTRY
from dualpath.launch.executor import Launch, LocalExecutor, engine_units, router_units
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.ports import claim_port
from dualpath.launch.ray_executor import UnitProcesses, bundle, shortage, words
from dualpath.launch.settings import LocalClusterSettings


def settings(**changes: Any) -> LocalClusterSettings:
    return LocalClusterSettings(**({"model": "m", "storage": "kv", "executor": "ray"} | changes))


def test_a_unit_has_one_bundle_for_all_its_ranks() -> None:
    chosen = settings(nodes="1P2D", prefill_tp=4, decode_dp=2, standby=True)
    units = [*router_units(chosen), *engine_units(chosen)]
    bundles = {unit.name: bundle(unit, 3, with_devices=True) for unit in units}
    assert bundles == {
        "router": {"CPU": 3},
        "router-standby": {"CPU": 3},
        "pe-0": {"CPU": 3, "GPU": 4},
        "de-0": {"CPU": 6, "GPU": 2},
        "de-1": {"CPU": 6, "GPU": 2},
    }
    assert bundle(units[2], 1, with_devices=False) == {"CPU": 1}


def test_missing_resources_of_a_cluster_are_named() -> None:
    two = {"pe-0": {"CPU": 1.0, "GPU": 8.0}, "de-0": {"CPU": 1.0, "GPU": 8.0}}
    assert shortage(two, [{"CPU": 4, "GPU": 8}, {"CPU": 4, "GPU": 8}]) == ""
    assert shortage(two, [{"CPU": 1}]) == (
        "2 CPU are needed and it has 1, 16 GPU are needed and it has 0"
    )
    assert shortage(two, [{"CPU": 4, "GPU": 8}, *[{"CPU": 4, "GPU": 4}] * 2]) == ""
    assert shortage(two, [{"CPU": 4, "GPU": 4}] * 4) == (
        "pe-0 needs 1 CPU, 8 GPU on one node, and no node has as much"
    )


def test_devices_are_assigned_by_ray() -> None:
    with pytest.raises(ConfigError, match="devices is 0,1 and executor is ray"):
        settings(devices=("0", "1"))


class Place:
    """A node with four devices."""

    host = "10.0.0.2"
    devices = ("4", "5", "6", "7")

    def __init__(self) -> None:
        self.claimed = 9000

    def claim_port(self) -> int:
        self.claimed += 1
        return self.claimed


def test_ranks_divide_the_devices_of_their_place_and_use_its_address() -> None:
    chosen = settings(executor="local", decode_dp=2, decode_tp=2)
    cluster = LocalCluster(chosen, executor=LocalExecutor(chosen))
    unit = list(engine_units(chosen))[1]
    launches = cluster._engine_launches(unit, Role.DECODE, Place())
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in launches] == ["4,5", "6,7"]
    for port, launch in zip(("9002", "9003"), launches, strict=True):
        line = launch.command
        host = line.index("--host")
        assert line[host : host + 4] == ["--host", "10.0.0.2", "--port", port]
        assert line[line.index("--data-parallel-rpc-port") + 1] == "9001"
        transfer = json.loads(line[line.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector_extra_config"]["api_url"] == f"http://10.0.0.2:{port}"


def test_entries_are_run_as_modules() -> None:
    router = Launch(ROUTER_ENTRY, ["router", "m"], {})
    assert words(router)[1:] == ["-m", "dualpath.cli.main", "router", "m"]
    engine = Launch(ENGINE_ENTRY, ["--model", "m"], {})
    assert words(engine)[1:] == ["-m", "dualpath.launch.forked_engine", "--model", "m"]


def test_a_dry_run_prints_bundles_and_leaves_addresses_to_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--storage", "kv", "--executor", "ray", "--ray-cpus", "2", "--port", "0"]
    assert main(["serve", "m", *asked, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# router: a bundle of 2 CPU",
        "# pe-0: a bundle of 2 CPU",
        "# de-0: a bundle of 2 CPU",
    ]
    engine = shlex.split(lines[-1])
    assert engine[engine.index("--host") + 1] == "NODE"
    transfer = json.loads(engine[engine.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["router"] == "tcp://ROUTER:5700"


@pytest.fixture
def node() -> Iterator[UnitProcesses]:
    """The object of an actor, without Ray."""
    made = UnitProcesses("pe-0")
    yield made
    made.close()


def test_a_node_starts_each_process_once_with_its_own_variables(
    node: UnitProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "1")
    monkeypatch.setenv("GIVEN_BY_NODE", "1")
    monkeypatch.setenv("GIVEN_BY_BOTH", "1")
    launch = Launch(ENTRY, ["stay"], {"GIVEN_BY_UNIT": "3", "GIVEN_BY_BOTH": "3"})
    for _ in range(2):
        node.start({"pe-0": launch}, os.getcwd(), {"GIVEN_BY_ALL": "2", "GIVEN_BY_BOTH": "2"})
    process = node._processes["pe-0"]
    given = process.wait_for_line("up", GUARD_S).split()[3:]
    assert sorted(given) == [
        "GIVEN_BY_ALL=2", "GIVEN_BY_BOTH=3", "GIVEN_BY_NODE=1", "GIVEN_BY_UNIT=3",
    ]  # fmt: skip
    variables = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"RAY_JOB_ID" not in variables
    node.send_signal("pe-0", signal.SIGTERM)
    assert process.wait(GUARD_S) == 0
    assert process.output().count("up ") == 1


def test_a_log_is_fetched_in_pieces_and_the_exit_code_with_the_last(
    node: UnitProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "_LOG_BYTES", 4)
    node.start({"pe-0": Launch(ENTRY, ["end", "3"], {})}, os.getcwd(), {})
    node._processes["pe-0"].wait(GUARD_S)
    text, looks, exit_code = b"", 0, None
    while exit_code is None:
        seen = node.poll({"pe-0": len(text)})["pe-0"]
        text, looks, exit_code = text + seen.log, looks + 1, seen.exit_code
    assert (text, looks, exit_code) == (b"its reason\n", 3, 3)


def test_a_node_without_the_folder_of_the_command_is_refused(node: UnitProcesses) -> None:
    with pytest.raises(ConfigError, match=r"no folder /not/there on the node of pe-0.*such as /"):
        node.start({}, "/not/there", {})


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:{closed}", "Connection refused"),
        ("ray://127.0.0.1:10001", "an address is HOST:PORT"),
        ("head", "an address is HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_refused_immediately(address: str, why: str) -> None:
    pytest.importorskip("ray")
    from dualpath.launch.ray_executor import RayExecutor

    address = address.format(closed=claim_port())
    executor = RayExecutor(settings(), environment={"RAY_ADDRESS": address})
    with pytest.raises(
        ConfigError, match=rf"not a node of a Ray cluster at '{address}' .*{why}.*ray start"
    ):
        executor.reserve([])
    executor.close()
