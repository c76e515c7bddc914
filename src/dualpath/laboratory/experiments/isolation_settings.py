"""What the isolation experiment is asked to do, and what follows from it."""

import enum

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.laboratory.experiments.machine_load import BUSY_LIMIT
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


class IsolationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One isolation experiment.

    ``prefill`` and ``decode`` nodes make a lab called ``lab`` whose CNICs and loopback legs carry
    ``link_bytes_per_s``.  In a round every node sends one message of ``message_bytes`` to each of
    its peers and is done when each has sent it back (dispatch and combine of expert parallelism).
    ``load`` (0.001 to 0.9) is the part of a link's rate that all messages in one direction take;
    it sets the period of the rounds.

    One run is one size in one case on one of ``legs``: ``rounds`` of every node, more where they
    last less than ``least_run_s``, fewer where they begin late.  Everything is repeated
    ``repetitions`` times with the cases in alternation.

    The bulk is Layer Blocks of ``block_bytes``, ``blocks`` per (request, layer), that is per posted
    transfer, ``in_flight`` of them between any two agents; ``settle_s``
    after its start it has filled the queues of its links.

    A run is repeated if the machine was busier than ``most_busy`` (0 to 1), ``attempts`` times at
    most.  ``congestion_control`` is what TCP runs the exchange with; the bulk has the system's.
    """

    prefill: int = 2
    decode: int = 2
    link_bytes_per_s: float = 125e6
    message_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20)
    load: float = 0.33
    rounds: int = 84
    least_run_s: float = 2.0
    repetitions: int = 3
    legs: tuple[Leg, ...] = (Leg.CNIC, Leg.LOOPBACK)
    block_bytes: int = 42 << 10
    blocks: int = 64
    in_flight: int = 2
    settle_s: float = 0.5
    most_busy: float = BUSY_LIMIT
    attempts: int = 3
    congestion_control: str = "reno"
    lab: str = "isolation"

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for the first setting that cannot be."""
        limits: dict[str, tuple[float, float]] = {
            "load": (0.001, 0.9),
            "rounds": (1, 1_000_000),
            "least_run_s": (0, 600),
            "repetitions": (1, 100),
            "block_bytes": (1, 64 << 20),
            "blocks": (1, 100_000),
            "in_flight": (1, 64),
            "settle_s": (0, 60),
            "most_busy": (0.01, 1),
            "attempts": (1, 20),
        }
        for field, (least, most) in limits.items():
            value = getattr(self, field)
            if not least <= value <= most:
                raise ConfigError(
                    f"{field} is {value:g}, must be between {least:g} and {most:g}; correct it"
                )
        for size in self.message_bytes:
            if not 16 <= size <= 64 << 20:
                raise ConfigError(f"message of {size} bytes, must be 16 to 67108864; correct it")
        for field in ("message_bytes", "legs"):
            values = getattr(self, field)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{field} is {values}, must name one or more, each once")
        self.lab_settings  # noqa: B018 - checks the rest

    @property
    def lab_settings(self) -> LabSettings:
        """The lab, which no run reads storage of."""
        return LabSettings(
            name=self.lab,
            prefill=self.prefill,
            decode=self.decode,
            cnic_bytes_per_s=self.link_bytes_per_s,
            image_bytes=16 << 20,
            shaping=Shaping.AUTO,
        )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.prefill + self.decode

    def peers(self, leg: Leg) -> int:
        """Return with how many others a node exchanges."""
        return self.nodes - 1 if leg is Leg.CNIC else 1

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
        links = min(self.prefill, self.decode) if leg is Leg.CNIC else self.nodes
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
