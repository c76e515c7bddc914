"""`dualpath qos`: the lanes of A.1 as settings of each network."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.cli import main
from dualpath.core.errors import ConfigError
from dualpath.launch.fabric_settings import (
    LOSSLESS_PRIORITIES,
    Fabric,
    FabricLanes,
    fabric_settings,
)
from dualpath.plan.traffic_class import (
    LaneWeights,
    PortRange,
    burst_bytes,
    parse_ports,
    parse_weights,
    shaping_commands,
)
from dualpath_lab.nodes.machine import LabMachine
from dualpath_lab.nodes.settings import LabSettings, Shaping
from dualpath_lab.nodes.steps import Run, make_steps


def lines(fabric: Fabric, lanes: FabricLanes | None = None) -> list[str]:
    groups = fabric_settings(fabric, lanes or FabricLanes())
    return [setting.line for group in groups for setting in group.settings if setting.line]


def value(name: str, found: list[str]) -> str:
    matches = [re.split("[ =]", line, maxsplit=1) for line in found if line.startswith(name)]
    assert len(matches) == 1, name
    return matches[0][1]


def flag(name: str, found: list[str]) -> list[str]:
    text = " ".join(found)
    return re.search(rf"--{name} (\S+)", text)[1].split(",")  # type: ignore[index]


def test_infiniband_is_the_papers_appendix() -> None:
    found = lines(Fabric.INFINIBAND)
    assert value("qos_max_vls", found) == "4"
    assert value("qos_high_limit", found) == "240"
    assert value("qos_vlarb_high", found) == "0:192,1:192,2:0,3:192"
    assert value("qos_vlarb_low", found) == "0:192,1:192,2:64,3:192"


def test_infiniband_programs_use_the_lanes_of_the_tables() -> None:
    found = lines(Fabric.INFINIBAND, FabricLanes(inference_sl=3, kv_sl=1))
    levels = value("qos_sl2vl", found).split(",")
    kv_lane = levels[int(value("UCX_IB_SL", found))]
    inference_lane = levels[int(value("NCCL_IB_SL", found))]
    assert value("NVSHMEM_IB_SL", found) == value("NCCL_IB_SL", found)
    high = dict(pair.split(":") for pair in value("qos_vlarb_high", found).split(","))
    low = dict(pair.split(":") for pair in value("qos_vlarb_low", found).split(","))
    assert (high[kv_lane], low[kv_lane]) == ("0", "64")
    assert high[inference_lane] == "192"
    assert len(levels) == 16
    assert set(levels[4:]) == {kv_lane}


@pytest.mark.parametrize(("ratio", "limit"), [("9:1", "9"), ("198:2", "99"), ("254:1", "254")])
def test_another_ratio_becomes_the_limit_of_the_high_table(ratio: str, limit: str) -> None:
    found = lines(Fabric.INFINIBAND, FabricLanes(weights=parse_weights(ratio)))
    assert value("qos_high_limit", found) == limit
    assert value("qos_vlarb_low", found) == "0:0,1:0,2:64,3:0"


def test_roce_has_four_lossless_classes_and_shares_the_link() -> None:
    found = lines(Fabric.ROCE)
    lossless = [tc for tc, on in enumerate(flag("pfc", found)) if on == "1"]
    assert tuple(lossless) == LOSSLESS_PRIORITIES
    shares = list(map(int, flag("tcbw", found)))
    assert sum(shares) == 100
    assert (shares[4], shares[3]) == (99, 1)
    assert {flag("tsa", found)[tc] for tc in lossless} == {"ets"}


def test_roce_programs_send_the_dscp_that_the_nics_map() -> None:
    found = lines(Fabric.ROCE, FabricLanes(inference_dscp=46, kv_dscp=18))
    assert int(value("NCCL_IB_TC", found)) >> 2 == 46
    assert int(value("UCX_IB_TRAFFIC_CLASS", found)) >> 2 == 18
    mapped = {tuple(line.rpartition(",")[::2]) for line in found if "--dscp2prio" in line}
    assert mapped == {
        ("mlnx_qos -i eth0 --dscp2prio set,46", "5"),
        ("mlnx_qos -i eth0 --dscp2prio set,18", "2"),
    }
    assert any(line.endswith(f"-t {18 << 2 | 2}") for line in found)


def test_ethernet_is_what_the_lab_applies() -> None:
    settings = LabSettings(cnic_bytes_per_s=125e6, ratio="19:1", kv_ports="16384-16399")
    lanes = FabricLanes(
        weights=settings.weights,
        kv_ports=settings.ports,
        interface="cnic",
        cnic_bytes_per_s=settings.cnic_bytes_per_s,
    )
    printed = [line for line in lines(Fabric.ETHERNET, lanes) if line.startswith("tc ")]
    machine = LabMachine(shaping=Shaping.ROOT, folder="f", storage="s")
    applied = [
        " ".join(step.argv)
        for step in make_steps(settings, machine)
        if isinstance(step, Run) and "cnic" in step.argv and step.argv[0] == "tc"
    ]
    for node in ("pe0", "de0"):
        name = f"-n dualpath-lab-{node} "
        assert [line.replace(name, "") for line in applied if name in line] == printed
    assert value("UCX_TCP_PORT_RANGE", lines(Fabric.ETHERNET, lanes)) == "16384-16399"


def test_reserved_rates_add_up_to_the_link_and_both_lanes_may_use_all() -> None:
    commands = shaping_commands("eth0", 125e6, LaneWeights(3, 1))
    classes = [" ".join(c.argv) for c in commands if c.argv[1] == "class"]
    rates = [int(re.search(r"rate (\d+)bit ceil (\d+)bit", c)[1]) for c in classes]  # type: ignore[index]
    assert rates == [10**9, 750_000_000, 250_000_000]
    assert all("ceil 1000000000bit" in text for text in classes)


@given(st.integers(10, 15), st.integers(0, 63))
def test_the_filter_takes_exactly_the_ports_of_the_range(power: int, index: int) -> None:
    size = 1 << power
    first = size * (index % (65536 // size))
    if first < 1024:
        first = max(size, 1024)
    ports = PortRange(first, first + size - 1)
    taken = {port for port in range(65536) if port & ports.mask == ports.first}
    assert taken == set(range(ports.first, ports.last + 1))


@given(st.floats(1e5, 1e11))
def test_a_burst_covers_a_millisecond_of_the_link(bytes_per_s: float) -> None:
    burst = burst_bytes(bytes_per_s)
    assert burst >= bytes_per_s * 0.001
    assert burst & (burst - 1) == 0


@pytest.mark.parametrize("text", ["99", "1:99", "0:0", "5:0", "255:1", "a:b", "99:-1", ""])
def test_invalid_ratios_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"99:1"):
        parse_weights(text)


@pytest.mark.parametrize(
    "text", ["20480", "20480-24574", "20481-24576", "24575-20480", "512-1023", "65536-131071"]
)
def test_port_ranges_that_one_filter_cannot_match_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="20480-24575"):
        parse_ports(text)


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ({"kv_sl": 4}, "kv_sl is 4; it must be between 0 and 3"),
        ({"inference_sl": 2}, "share service level 2"),
        ({"kv_dscp": 34}, "share DSCP 34"),
        ({"kv_dscp": 35}, "share priority 4"),
        ({"kv_dscp": 8}, "DSCP 8 has priority 1"),
        ({"cnic_bytes_per_s": 0.0}, "cnic_bytes_per_s is"),
    ],
)
def test_equal_lanes_are_refused(lanes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FabricLanes(**lanes)  # type: ignore[arg-type]


@pytest.mark.parametrize("fabric", list(Fabric))
def test_the_command_explains_every_line(
    fabric: Fabric, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["qos", "--fabric", fabric.value, "--cnic-bytes-per-s", "25Gbit"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for number, line in enumerate(printed):
        if line and not line.startswith("#"):
            assert printed[number - 1].startswith("# ")
    assert [line for line in printed if line and not line.startswith("#")] == lines(
        fabric, FabricLanes(cnic_bytes_per_s=25e9 / 8)
    )


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["qos", "--fabric", "roce", "--ratio", "9:1", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lanes"]["weights"] == {"inference": 9, "kv": 1}
    assert all(s["why"] for group in found["groups"] for s in group["settings"])


def test_the_command_takes_only_names_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["qos", "--fabric", "roce", "--interface", "eth0; reboot"]) == 2
    assert "--interface" in capsys.readouterr().err
