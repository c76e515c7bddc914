"""Settings of a lab: nodes, rates of their links, lanes, storage."""

import enum
import re
from typing import Annotated

from dualpath.core.cluster import NodesSettings, parse_nodes
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting
from dualpath.plan.traffic_class import (
    KvPorts,
    LaneWeights,
    PortRange,
    Ratio,
    parse_ports,
    parse_weights,
)

MAX_NODES = 64


class Shaping(enum.StrEnum):
    """How the links of a lab are shaped."""

    AUTO = "auto"
    """The first of the following that this machine allows this user."""
    ROOT = "root"
    """The kernel: network namespaces with HTB, and cgroups that throttle block devices."""
    USER_NAMESPACES = "user-namespaces"
    """The kernel, in user namespaces, for the network only; storage is not throttled."""
    TOKEN_BUCKETS = "token-buckets"
    """Token buckets in the engines, for storage reads only."""


class StorageServer(enum.StrEnum):
    """The server of a lab's storage."""

    NONE = "none"
    """None: nodes read the folder directly, throttled by cgroups."""
    S3 = "s3"
    """An S3 server, which each node reaches over a shaped link."""


class LabSettings(NodesSettings, frozen=True, kw_only=True):
    """One lab.  Rates are per node, per CNIC and per direction.

    The defaults are the paper's testbed, where one SNIC serves eight CNICs, scaled to what two
    cores can drive.  The loopback device stands for H2D copies.  ``ratio`` and ``kv_ports`` are
    the lanes of ``plan.traffic_class``.
    """

    name: Annotated[str, Setting("name, unique on this machine; lower-case letters and digits")] = (
        "lab"
    )
    cnic_bytes_per_s: Annotated[
        float, Setting("rate of a CNIC in each direction", ge=1e6, le=12.5e9)
    ] = 400e6
    cnics: Annotated[
        int, Setting("CNICs of a node, one for each rank, each with this rate", ge=1, le=8)
    ] = 1
    loopback_bytes_per_s: Annotated[
        float, Setting("rate of a node to itself; 0: the sum of its CNICs", ge=0, le=12.5e9)
    ] = 0.0
    snic_bytes_per_s: Annotated[
        float, Setting("rate of a node's storage reads", ge=1e6, le=12.5e9)
    ] = 50e6
    ratio: Ratio = "99:1"
    kv_ports: KvPorts = "20480-24575"
    mtu_bytes: Annotated[int, Setting("MTU of the CNIC", ge=1280, le=65535)] = 9000
    storage: Annotated[
        str, Setting("folder on a disk; empty: a file system in memory", metavar="DIR")
    ] = ""
    storage_server: Annotated[
        StorageServer,
        Setting("s3: an S3 server, connected to each node by a shaped link"),
    ] = StorageServer.NONE
    image_bytes: Annotated[
        int, Setting("size of the file system in memory", ge=16 << 20, le=1 << 40)
    ] = 1 << 30
    shaping: Annotated[
        Shaping, Setting("how links are shaped; auto: the first of the others that is allowed")
    ] = Shaping.AUTO

    def check(self) -> None:
        """Raise ``ConfigError`` for the first invalid setting."""
        super().check()
        if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", self.name):
            raise ConfigError(
                f"{{name}} is {self.name!r}, must be up to 16 lower-case letters and digits, "
                "starting with a letter"
            )
        if 0 < self.loopback_bytes_per_s < 1e6:
            raise ConfigError(
                f"{{loopback_bytes_per_s}} is {self.loopback_bytes_per_s:g}, must be 0 or at least "
                "1e6; correct it"
            )
        parse_nodes(self.nodes, MAX_NODES)
        parse_weights(self.ratio)
        parse_ports(self.kv_ports)

    @property
    def weights(self) -> LaneWeights:
        """Shares of the lanes."""
        return parse_weights(self.ratio)

    @property
    def ports(self) -> PortRange:
        """TCP ports of the KV lane."""
        return parse_ports(self.kv_ports)

    @property
    def loopback_rate_bytes_per_s(self) -> float:
        """Rate of a node to itself."""
        return self.loopback_bytes_per_s or self.cnic_bytes_per_s * self.cnics
