"""Settings of the isolation experiment, and values derived from them."""

import enum
from typing import Annotated

import msgspec

from dualpath.core.cluster import NodesSettings
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting
from dualpath.plan.traffic_class import DEFAULT_KV_PORTS, PortRange
from dualpath_lab.experiments.machine_load import BUSY_LIMIT
from dualpath_lab.experiments.settings import Repeat
from dualpath_lab.nodes.machine import Node
from dualpath_lab.nodes.settings import LabSettings, Shaping

#: As many TCP ports as the KV lane has, just below them: for the same bulk in the inference lane.
UNMARKED_PORTS = PortRange(
    2 * DEFAULT_KV_PORTS.first - DEFAULT_KV_PORTS.last - 1, DEFAULT_KV_PORTS.first - 1
)
#: Port of the exchange on every node; in neither range.
EXCHANGE_PORT = 15000


class Case(enum.StrEnum):
    """The traffic in addition to the exchange."""

    ALONE = "alone"
    NO_QOS = "bulk, no QoS"
    """KV bulk on ports of the inference lane: both share one queue."""
    QOS = "bulk, QoS"
    """KV bulk on the ports of the KV lane."""


class Leg(enum.StrEnum):
    """The shared link of a node."""

    CNIC = "CNIC"
    """All nodes exchange with all others; KV bulk flows from every DE to every PE."""
    LOOPBACK = "loopback"
    """Every node exchanges with itself; KV bulk from the node to itself stands for H2D copies."""


class IsolationSettings(NodesSettings, frozen=True, kw_only=True):
    """One isolation experiment, on a lab called ``lab``.

    In a round every node sends one message of ``message_bytes`` to each of its peers, and the round
    ends when all peers have sent it back (dispatch and combine of expert parallelism).  ``load``
    determines the period of the rounds.

    One run is one size in one case on one of ``legs``: ``rounds`` of every node, more if they last
    less than ``least_run_s``, fewer if they begin late.  A run is repeated if the machine was
    busier than ``most_busy``.

    The bulk consists of Layer Blocks of ``block_bytes``, ``blocks`` of them per (request, layer),
    that is per posted transfer, with ``in_flight`` transfers between any two agents; measurements
    begin ``settle_s`` after its start, when the queues of its links are full.
    """

    nodes: Annotated[str, Setting("numbers of prefill and decode nodes", metavar="xPyD")] = "2P2D"
    link_bytes_per_s: Annotated[
        float, Setting("rate of CNICs and loopback in each direction", ge=1e6, le=12.5e9)
    ] = 125e6
    message_bytes: Annotated[
        tuple[int, ...], Setting("sizes of a message to each peer", ge=16, le=64 << 20)
    ] = (64 << 10, 256 << 10, 1 << 20)
    load: Annotated[
        float, Setting("share of a link's rate that messages use", ge=0.001, le=0.9)
    ] = 0.33
    rounds: Annotated[int, Setting("rounds of every node in a run", ge=1, le=1_000_000)] = 84
    least_run_s: Annotated[
        float, Setting("minimum duration of a run", ge=0, le=600, flag=False)
    ] = 2.0
    repeat: Repeat = 3
    legs: Annotated[tuple[Leg, ...], Setting("links that the exchange shares with KV")] = (
        Leg.CNIC,
        Leg.LOOPBACK,
    )
    block_bytes: Annotated[
        int, Setting("bytes of a Layer Block", ge=1, le=64 << 20, flag=False)
    ] = 42 << 10
    blocks: Annotated[int, Setting("Layer Blocks per transfer", ge=1, le=100_000, flag=False)] = 64
    in_flight: Annotated[
        int, Setting("transfers in flight between any two agents", ge=1, le=64, flag=False)
    ] = 2
    settle_s: Annotated[
        float, Setting("delay after the start of the bulk", ge=0, le=60, flag=False)
    ] = 0.5
    most_busy: Annotated[
        float, Setting("busy share of the machine above which a run is repeated", ge=0.01, le=1)
    ] = BUSY_LIMIT
    congestion_control: Annotated[
        str,
        Setting("TCP congestion control of the exchange; the bulk has the system's", flag=False),
    ] = "reno"
    lab: Annotated[str, Setting("name of the lab", flag=False)] = "isolation"

    def check(self) -> None:
        """Raise ``ConfigError`` for the first invalid setting."""
        super().check()
        for field in ("message_bytes", "legs"):
            values = getattr(self, field)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{{{field}}} is {values}, must have one or more distinct values")
        self.lab_settings  # noqa: B018 - checks the rest

    @property
    def lab_settings(self) -> LabSettings:
        """The lab; its storage is not used."""
        return LabSettings(
            name=self.lab,
            nodes=self.nodes,
            cnic_bytes_per_s=self.link_bytes_per_s,
            image_bytes=16 << 20,
            shaping=Shaping.AUTO,
        )

    @property
    def count(self) -> int:
        """Number of nodes."""
        return self.prefill + self.decode

    def peers(self, leg: Leg) -> int:
        """Return the number of peers of a node."""
        return self.count - 1 if leg is Leg.CNIC else 1

    def period_s(self, leg: Leg, message_bytes: int) -> float:
        """Return the period of rounds: each message crosses a link twice, there and back.

        On the loopback leg both directions share the rate.
        """
        return 2 * self.peers(leg) * message_bytes / (self.load * self.link_bytes_per_s)

    def rounds_of_run(self, leg: Leg, message_bytes: int) -> int:
        """Return the number of rounds of a node in one run, if none begins late."""
        return max(self.rounds, round(self.least_run_s / self.period_s(leg, message_bytes)))

    def bulk_limit_bytes_per_s(self, leg: Leg) -> float:
        """Return the rate of all KV bulk together on otherwise idle links."""
        links = min(self.prefill, self.decode) if leg is Leg.CNIC else self.count
        return links * self.link_bytes_per_s


class Flow(msgspec.Struct, frozen=True):
    """KV bulk from one node to another, or to itself."""

    source: str
    target: str


def flows(leg: Leg, nodes: tuple[Node, ...]) -> tuple[Flow, ...]:
    """Return the flows of KV bulk; names of nodes begin with their role."""
    names = [node.name for node in nodes]
    if leg is Leg.LOOPBACK:
        return tuple(Flow(name, name) for name in names)
    return tuple(
        Flow(source, target)
        for source in names
        if source.startswith("de")
        for target in names
        if target.startswith("pe")
    )


def bulk_ports(case: Case) -> PortRange:
    """Return the TCP ports of the bulk in a case with bulk."""
    return DEFAULT_KV_PORTS if case is Case.QOS else UNMARKED_PORTS
