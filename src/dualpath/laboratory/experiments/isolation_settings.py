"""What the isolation experiment is asked to do, and what follows from it."""

import enum
from typing import Annotated

import msgspec

from dualpath.core.cluster import NodesSettings
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting
from dualpath.laboratory.experiments.machine_load import BUSY_LIMIT
from dualpath.laboratory.experiments.settings import Repeat
from dualpath.laboratory.lab.machine import Node
from dualpath.laboratory.lab.settings import LabSettings, Shaping
from dualpath.plan.traffic_class import DEFAULT_KV_PORTS, PortRange

#: As many TCP ports as the KV lane has, just below it: the same bulk, but in the inference lane.
UNMARKED_PORTS = PortRange(
    2 * DEFAULT_KV_PORTS.first - DEFAULT_KV_PORTS.last - 1, DEFAULT_KV_PORTS.first - 1
)
#: Where every node listens for the exchange; in neither range.
EXCHANGE_PORT = 15000


class Case(enum.StrEnum):
    """What the exchange shares its links with."""

    ALONE = "alone"
    NO_QOS = "bulk, no QoS"
    """KV bulk on ports of the inference lane: both wait in one queue."""
    QOS = "bulk, QoS"
    """KV bulk on the ports of the KV lane."""


class Leg(enum.StrEnum):
    """Which link of a node is shared."""

    CNIC = "CNIC"
    """All nodes exchange with all others; KV bulk flows from every DE to every PE."""
    LOOPBACK = "loopback"
    """Every node exchanges with itself beside H2D copies: KV bulk from itself to itself."""


class IsolationSettings(NodesSettings, frozen=True, kw_only=True):
    """One isolation experiment, on a lab called ``lab``.

    In a round every node sends one message of ``message_bytes`` to each of its peers and is done
    when each has sent it back (dispatch and combine of expert parallelism).  ``load`` sets the
    period of the rounds.

    One run is one size in one case on one of ``legs``: ``rounds`` of every node, more where they
    last less than ``least_run_s``, fewer where they begin late.  A run is repeated if the machine
    was busier than ``most_busy``, ``attempts`` times at most.

    The bulk is Layer Blocks of ``block_bytes``, ``blocks`` per (request, layer), that is per posted
    transfer, ``in_flight`` of them between any two agents; ``settle_s`` after its start it has
    filled the queues of its links.
    """

    nodes: Annotated[str, Setting("prefill and decode nodes", metavar="xPyD")] = "2P2D"
    link_bytes_per_s: Annotated[
        float, Setting("of CNICs and loopback legs, either way", ge=1e6, le=12.5e9)
    ] = 125e6
    message_bytes: Annotated[
        tuple[int, ...], Setting("sizes of a message to each peer", ge=16, le=64 << 20)
    ] = (64 << 10, 256 << 10, 1 << 20)
    load: Annotated[
        float, Setting("part of a link's rate that all messages take", ge=0.001, le=0.9)
    ] = 0.33
    rounds: Annotated[int, Setting("of every node in a run", ge=1, le=1_000_000)] = 84
    least_run_s: Annotated[float, Setting("a run lasts at least so long", ge=0, le=600)] = 2.0
    repeat: Repeat = 3
    legs: Annotated[tuple[Leg, ...], Setting("links that are shared")] = (Leg.CNIC, Leg.LOOPBACK)
    block_bytes: Annotated[int, Setting("of a Layer Block", ge=1, le=64 << 20)] = 42 << 10
    blocks: Annotated[int, Setting("Layer Blocks per transfer", ge=1, le=100_000)] = 64
    in_flight: Annotated[int, Setting("transfers between any two agents", ge=1, le=64)] = 2
    settle_s: Annotated[float, Setting("until the bulk fills its links", ge=0, le=60)] = 0.5
    most_busy: Annotated[float, Setting("a run on a busier machine is repeated", ge=0.01, le=1)] = (
        BUSY_LIMIT
    )
    attempts: Annotated[int, Setting("at a run, at most", ge=1, le=20)] = 3
    congestion_control: Annotated[
        str, Setting("what TCP runs the exchange with; the bulk has the system's")
    ] = "reno"
    lab: Annotated[str, Setting("name of the lab")] = "isolation"

    def check(self) -> None:
        """Raise ``ConfigError`` for the first setting that cannot be."""
        super().check()
        for field in ("message_bytes", "legs"):
            values = getattr(self, field)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{{{field}}} is {values}, must name one or more, each once")
        self.lab_settings  # noqa: B018 - checks the rest

    @property
    def lab_settings(self) -> LabSettings:
        """The lab, which no run reads storage of."""
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
        """Return with how many others a node exchanges."""
        return self.count - 1 if leg is Leg.CNIC else 1

    def period_s(self, leg: Leg, message_bytes: int) -> float:
        """Return from when to when rounds begin: a link carries messages both ways, there and back.

        On the loopback leg both ways are one and the same.
        """
        return 2 * self.peers(leg) * message_bytes / (self.load * self.link_bytes_per_s)

    def rounds_of_run(self, leg: Leg, message_bytes: int) -> int:
        """Return how many rounds a node has in one run, if none begins late."""
        return max(self.rounds, round(self.least_run_s / self.period_s(leg, message_bytes)))

    def bulk_limit_bytes_per_s(self, leg: Leg) -> float:
        """Return what all KV bulk together would reach with the links for itself."""
        links = min(self.prefill, self.decode) if leg is Leg.CNIC else self.count
        return links * self.link_bytes_per_s


class Flow(msgspec.Struct, frozen=True):
    """KV bulk from one node to another, or to itself."""

    source: str
    target: str


def flows(leg: Leg, nodes: tuple[Node, ...]) -> tuple[Flow, ...]:
    """Return who sends KV bulk to whom; names of nodes begin with their role."""
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
    """Return the TCP ports of the bulk in a case that has some."""
    return DEFAULT_KV_PORTS if case is Case.QOS else UNMARKED_PORTS
