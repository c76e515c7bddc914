"""The network settings of A.1 as data: configuration lines, where each belongs, and why.

InfiniBand is the paper's own configuration.  For RoCE the paper gives the method (DSCP, four
lossless traffic classes, weights), and the numbers here are ours.  For Ethernet without RDMA the
lines are the commands of `dualpath.plan.traffic_class`, which the lab applies.
"""

import enum
from typing import Annotated

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.plan.traffic_class import (
    DEFAULT_KV_PORTS,
    DEFAULT_WEIGHTS,
    LaneWeights,
    PortRange,
    shaping_commands,
)


class Fabric(enum.StrEnum):
    """Kinds of compute networks."""

    INFINIBAND = "infiniband"
    ROCE = "roce"
    ETHERNET = "ethernet"


class Line(msgspec.Struct, frozen=True):
    """One configuration line; an empty ``line`` is advice without a common syntax."""

    line: str
    why: str


class SettingsGroup(msgspec.Struct, frozen=True):
    """Lines of one file or machine."""

    where: str
    settings: tuple[Line, ...]


class FabricLanes(Settings, frozen=True, kw_only=True):
    """How the network distinguishes the two lanes, inference and KV."""

    weights: LaneWeights = DEFAULT_WEIGHTS
    inference_sl: Annotated[
        int, Setting("service level and lane of inference (infiniband)", ge=0, le=3)
    ] = 1
    kv_sl: Annotated[int, Setting("service level and lane of KV (infiniband)", ge=0, le=3)] = 2
    inference_dscp: Annotated[int, Setting("DSCP value of inference, 16 to 47 (roce)")] = 34
    kv_dscp: Annotated[int, Setting("DSCP value of KV, 16 to 47 (roce)")] = 26
    kv_ports: PortRange = DEFAULT_KV_PORTS
    interface: Annotated[str, Setting("of the compute NIC (roce, ethernet)", metavar="NAME")] = (
        "eth0"
    )
    rdma_device: Annotated[str, Setting("the NIC (roce)", metavar="NAME")] = "mlx5_0"
    cnic_bytes_per_s: Annotated[
        float, Setting("of the NIC, where software shapes it (ethernet)", ge=1e5, le=1e12)
    ] = 1.25e9

    def check(self) -> None:
        """Raise ``ConfigError`` for equal lanes and for lanes that a network does not have."""
        super().check()
        for key in ("interface", "rdma_device"):
            name: str = getattr(self, key)
            # The name is part of commands that operators paste into a shell.
            if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
                raise ConfigError(f"{{{key}}} is {name!r}, must be a device name; correct it")
        _check_pair("service level", self.inference_sl, self.kv_sl)
        _check_pair("DSCP", self.inference_dscp, self.kv_dscp)
        if self.inference_dscp // 8 == self.kv_dscp // 8:
            raise ConfigError(
                f"DSCP {self.inference_dscp} and {self.kv_dscp} share priority "
                f"{self.kv_dscp // 8} (DSCP / 8); choose them from different groups of eight"
            )
        for dscp in (self.inference_dscp, self.kv_dscp):
            if dscp // 8 not in LOSSLESS_PRIORITIES:
                raise ConfigError(
                    f"DSCP {dscp} has priority {dscp // 8} (DSCP / 8), must have one of the "
                    f"lossless {LOSSLESS_PRIORITIES}; choose one from 16 to 47"
                )


#: The four lossless classes of RoCE.  Class 0 is for unmarked traffic, 6 for congestion
#: notifications (the NICs' default); 1 and 7 are unused.
LOSSLESS_PRIORITIES = (2, 3, 4, 5)
_CONGESTION_PRIORITY = 6
_ECT0 = 2
_PAPER_HIGH_LIMIT = 240


def fabric_settings(fabric: Fabric, lanes: FabricLanes) -> tuple[SettingsGroup, ...]:
    """Return all lines for one network, in the order in which to apply them."""
    match fabric:
        case Fabric.INFINIBAND:
            return infiniband_settings(lanes)
        case Fabric.ROCE:
            return roce_settings(lanes)
        case Fabric.ETHERNET:
            return ethernet_settings(lanes)


def infiniband_settings(lanes: FabricLanes) -> tuple[SettingsGroup, ...]:
    """Return the settings of subnet manager, NCCL, NVSHMEM and UCX.

    At 99:1 the arbitration tables are the paper's.  At another ratio the low-priority table has
    only KV, so that the high-priority limit (in units of 4 KiB, after which one low-priority packet
    may pass) is the ratio.
    """
    inference, kv = lanes.inference_sl, lanes.kv_sl
    manager = SettingsGroup(
        "opensm.conf of the subnet manager (switches and NICs obey it)",
        (
            Line("qos TRUE", "without it opensm does not set the arbitration tables"),
            Line("qos_max_vls 4", "number of data lanes; they share one buffer memory"),
            *_arbitration(lanes),
            Line(
                "qos_sl2vl " + ",".join(str(sl if sl < 4 else kv) for sl in range(16)),
                f"service level to lane: 0 unmarked, {inference} inference, {kv} KV; levels from "
                "4 on, which should not be used, share the KV lane",
            ),
        ),
    )
    return (
        manager,
        _collectives(
            Line(f"NCCL_IB_SL={inference}", "collectives use the inference lane; default: 0"),
            Line(f"NVSHMEM_IB_SL={inference}", "the same for NVSHMEM, which DeepEP uses"),
        ),
        _ucx(
            Line(
                f"UCX_IB_SL={kv}",
                "KV uses its lane; the default 0 is served like inference by the tables above",
            ),
            "IB_SL",
            str(kv),
        ),
    )


def _arbitration(lanes: FabricLanes) -> tuple[Line, ...]:
    kv = lanes.kv_sl
    high = ",".join(f"{lane}:{0 if lane == kv else 192}" for lane in range(4))
    if lanes.weights == DEFAULT_WEIGHTS:
        limit = _PAPER_HIGH_LIMIT
        low = ",".join(f"{lane}:{64 if lane == kv else 192}" for lane in range(4))
        low_why = f"then one packet by these weights, so that KV (lane {kv}) does not starve"
    else:
        limit = max(1, round(lanes.weights.inference / lanes.weights.kv))
        low = ",".join(f"{lane}:{64 if lane == kv else 0}" for lane in range(4))
        low_why = f"then one packet of KV (lane {kv}), so that it does not starve"
    return (
        Line(
            f"qos_high_limit {limit}",
            f"{limit} x 4 KiB of the high-priority table pass before one packet of the low one; "
            "255 would let KV starve",
        ),
        Line(f"qos_vlarb_high {high}", f"lane:weight in units of 64 bytes; KV (lane {kv}) is 0"),
        Line(f"qos_vlarb_low {low}", low_why),
    )


def roce_settings(lanes: FabricLanes) -> tuple[SettingsGroup, ...]:
    """Return the settings of NICs and switches, NCCL, NVSHMEM and UCX; TC = priority = DSCP / 8."""
    inference_tos = lanes.inference_dscp << 2 | _ECT0
    kv_tos = lanes.kv_dscp << 2 | _ECT0
    return (
        SettingsGroup("every compute NIC, as root (NVIDIA ConnectX)", _roce_nic(lanes, kv_tos)),
        SettingsGroup("every switch port between compute NICs (syntax by vendor)", _switch(lanes)),
        _collectives(
            Line(
                f"NCCL_IB_TC={inference_tos}",
                f"collectives use the inference lane: DSCP {lanes.inference_dscp} x 4, + 2 to "
                "allow congestion marks; default: 0",
            ),
            Line(f"NVSHMEM_IB_TRAFFIC_CLASS={inference_tos}", "the same for NVSHMEM (DeepEP)"),
        ),
        _ucx(
            Line(
                f"UCX_IB_TRAFFIC_CLASS={kv_tos}",
                f"KV uses its lane: DSCP {lanes.kv_dscp} x 4, + 2; UCX's default on RoCEv2 is "
                "106, that is DSCP 26",
            ),
            "IB_TRAFFIC_CLASS",
            str(kv_tos),
        ),
    )


def _roce_nic(lanes: FabricLanes, kv_tos: int) -> tuple[Line, ...]:
    command = f"mlnx_qos -i {lanes.interface}"
    lossless = ",".join(str(int(tc in LOSSLESS_PRIORITIES)) for tc in range(8))
    modes = ",".join("strict" if tc == _CONGESTION_PRIORITY else "ets" for tc in range(8))
    percent = _roce_percent(lanes)
    shares = ",".join(str(percent.get(tc, 0)) for tc in range(8))
    inference, kv = percent[lanes.inference_dscp // 8], percent[lanes.kv_dscp // 8]
    classes = ",".join(map(str, range(8)))
    return (
        Line(f"{command} --trust dscp", "classify packets by their DSCP, not by their VLAN tag"),
        *(
            Line(f"{command} --dscp2prio set,{dscp},{dscp // 8}", f"{name} by its DSCP")
            for name, dscp in _dscp(lanes).items()
        ),
        Line(f"{command} --prio_tc {classes}", "a traffic class (hardware queue) per priority"),
        Line(
            f"{command} --pfc {lossless}",
            "priority flow control: four lossless classes; two are spare, like two of the four "
            "lanes on InfiniBand",
        ),
        Line(
            f"{command} --tsa {modes} --tcbw {shares}",
            f"percent of the link per class: inference {inference}, KV {kv}; congestion "
            f"notifications (priority {_CONGESTION_PRIORITY}) first; a class of 0 gets leftover "
            "bandwidth only: give a spare class part of the inference share before using it",
        ),
        Line(
            f"cma_roce_tos -d {lanes.rdma_device} -t {kv_tos}",
            "RDMA-CM connections without a class use the KV lane; do not write the device's "
            "tc/1/traffic_class in sysfs, which overrides the class of every program",
        ),
    )


def _switch(lanes: FabricLanes) -> tuple[Line, ...]:
    inference, kv = lanes.inference_dscp // 8, lanes.kv_dscp // 8
    lossless = ", ".join(map(str, LOSSLESS_PRIORITIES))
    percent = _roce_percent(lanes)
    return (
        Line("", "trust DSCP and map it to traffic classes as the NICs do: DSCP / 8"),
        Line("", f"priority flow control on classes {lossless}, with headroom for the cables"),
        Line(
            "",
            f"weighted round robin (ETS, DWRR), class {inference} : class {kv} = "
            f"{percent[inference]} : {percent[kv]}; class {_CONGESTION_PRIORITY} strict",
        ),
    )


def ethernet_settings(lanes: FabricLanes) -> tuple[SettingsGroup, ...]:
    """Return the `tc` commands that the lab applies, and the settings of UCX."""
    commands = shaping_commands(
        lanes.interface, lanes.cnic_bytes_per_s, lanes.weights, lanes.kv_ports
    )
    return (
        SettingsGroup(
            "every compute NIC, as root; switch ports need the same in the other direction",
            tuple(Line(" ".join(command.argv), command.why) for command in commands),
        ),
        _ucx(
            Line(
                f"UCX_TCP_PORT_RANGE={lanes.kv_ports.text}",
                "KV connections are accepted on these ports, which the filters match",
            ),
            "TCP_PORT_RANGE",
            lanes.kv_ports.text,
        ),
    )


def _collectives(*settings: Line) -> SettingsGroup:
    return SettingsGroup("environment of every engine: collectives", settings)


def _ucx(variable: Line, key: str, value: str) -> SettingsGroup:
    """Return the settings of UCX; ``nixl_engine_config`` uses UCX's names without ``UCX_``."""
    return SettingsGroup(
        "environment of every engine, prefill and decode alike: NIXL through UCX",
        (
            variable,
            Line(
                "",
                f'or, in the settings of every engine, nixl_engine_config {{"{key}": "{value}"}} '
                f"(--nixl-engine-config {key}={value}); a UCX_ variable overrides it",
            ),
            Line(
                "",
                "set it on both sides of a connection: otherwise only one direction may be marked "
                "(UCX issue 10325, for the traffic class)",
            ),
        ),
    )


def _dscp(lanes: FabricLanes) -> dict[str, int]:
    return {"inference": lanes.inference_dscp, "KV": lanes.kv_dscp}


def _roce_percent(lanes: FabricLanes) -> dict[int, int]:
    """Return integer percentages by class, at least 1 for KV; ETS supports no fractions."""
    kv = max(1, round(100 * (1 - lanes.weights.inference_share)))
    return {lanes.inference_dscp // 8: 100 - kv, lanes.kv_dscp // 8: kv}


def _check_pair(what: str, inference: int, kv: int) -> None:
    if inference == kv:
        raise ConfigError(
            f"inference and KV share {what} {kv}, must differ for KV to wait; change one"
        )
