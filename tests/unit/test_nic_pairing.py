"""Pairing of GPUs with RDMA ports."""

from pathlib import Path
from typing import Any

import pytest

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.engine.settings import EngineSettings
from dualpath.launch.doctor.network import nics_of_gpus
from dualpath.transport.nic_pairing import PairedPort, PciDevice, local_nic_pairing, pair


def alone(name: str) -> PairedPort:
    """Return a port below its GPU's PCI root that no other GPU has."""
    return PairedPort(name, near=True, gpus=1)


def test_each_gpu_gets_the_port_behind_its_own_switch() -> None:
    gpus = [PciDevice("g0", ("root0", "switch0", "g0")), PciDevice("g1", ("root1", "sw", "g1"))]
    ports = [PciDevice("n0:1", ("root1", "sw", "n0")), PciDevice("n1:1", ("root0", "switch0", "n"))]
    assert pair(gpus, ports) == {"g0": alone("n1:1"), "g1": alone("n0:1")}


def test_equally_near_ports_are_distributed_over_gpus() -> None:
    gpus = [PciDevice(f"g{n}", ("root", f"g{n}")) for n in range(4)]
    ports = [PciDevice(f"n{n}:1", ("root", f"n{n}")) for n in range(2)]
    found = pair(gpus, ports)
    assert [port.name for port in found.values()] == ["n0:1", "n1:1", "n0:1", "n1:1"]
    assert {port.problem for port in found.values()} == {"shared by 2 GPUs"}
    assert pair(gpus, []) == {}


def add_device(root: Path, way: str, vendor: str, kind: str) -> Path:
    device = root / "sys/devices" / way
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    folder = root / "sys/bus/pci/devices"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / device.name).symlink_to(device)
    return device


def add_port(root: Path, name: str, device: Path, state: str) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    (port.parent.parent / "device").symlink_to(device)


def test_a_machine_is_read_from_sysfs(tmp_path: Path) -> None:
    far, near = "pci0000:00/0000:00:01.0", "pci0000:80/0000:80:01.0"
    for way in (f"{far}/0000:01:00.0", f"{near}/0000:81:00.0"):
        add_device(tmp_path, way, "0x10de", "0x030200")
    add_device(tmp_path, f"{near}/0000:83:00.0", "0x10de", "0x040300")  # a GPU's sound
    for name, way, state in (
        ("mlx5_0", f"{near}/0000:82:00.0", "4: ACTIVE"),
        ("mlx5_1", f"{far}/0000:02:00.0", "4: ACTIVE"),
        ("mlx5_2", f"{far}/0000:03:00.0", "1: DOWN"),
    ):
        add_port(tmp_path, name, add_device(tmp_path, way, "0x15b3", "0x020700"), state)
    assert local_nic_pairing(tmp_path) == {
        "0000:01:00.0": alone("mlx5_1:1"),
        "0000:81:00.0": alone("mlx5_0:1"),
    }
    assert local_nic_pairing(tmp_path / "nothing") == {}


def test_the_doctor_reports_gpus_that_share_a_port() -> None:
    assert nics_of_gpus({"g0": alone("n0:1"), "g1": alone("n1:1")}).status == "ok"
    shared = nics_of_gpus(dict.fromkeys(("g0", "g1"), PairedPort("n0:1", near=True, gpus=2)))
    assert shared.status == "warning"
    assert shared.found == "g0 n0:1 (shared by 2 GPUs), g1 n0:1 (shared by 2 GPUs)"


def test_the_doctor_reports_a_port_at_another_cpu_socket() -> None:
    gpu = PciDevice("g0", ("/", "sys", "devices", "pci0000:00", "bridge", "g0"))
    port = PciDevice("n0:1", ("/", "sys", "devices", "pci0000:80", "bridge", "n0"))
    found = nics_of_gpus(pair([gpu], [port]))
    assert (found.status, found.found) == ("warning", "g0 n0:1 (at another PCI root than the GPU)")


def engine(**settings: Any) -> EngineSettings:
    return EngineSettings(
        role=Role.PREFILL, engine_id="pe", router="tcp://h:1", api_url="", storage="s", **settings
    )


def test_a_rank_takes_the_device_set_for_it_else_the_nearest() -> None:
    set_for_two = engine(net_devices=("a:1", "b:1"))
    assert set_for_two.of_rank(1, "near:1").nixl_engine_config == {"NET_DEVICES": "b:1"}
    assert engine().of_rank(1, "near:1").nixl_engine_config == {"NET_DEVICES": "near:1"}
    assert engine().of_rank(0, "").nixl_engine_config == {}
    typed = engine(nixl_engine_config={"NET_DEVICES": "typed:1"})
    assert typed.of_rank(0, "near:1").nixl_engine_config == {"NET_DEVICES": "typed:1"}
    with pytest.raises(ConfigError, match="none for rank 2; give one for each rank"):
        set_for_two.of_rank(2, "")
