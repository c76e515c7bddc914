"""Traffic classes of §5.1: model communication has priority, KV uses the remaining bandwidth.

Two lanes share every compute link.  Nearly all of the bandwidth is reserved for the inference lane
and the rest for the KV lane, so that KV never starves; each lane may use the idle bandwidth of the
other.  `dualpath.launch.fabric_settings` configures a fabric for them; for Ethernet without RDMA
the list of `tc` commands below does, which the lab applies to its own links.
"""

import enum
import math
import re
from typing import Annotated

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting

Ratio = Annotated[str, Setting("reserved shares of a full link", metavar="INFERENCE:KV")]
KvPorts = Annotated[str, Setting("TCP ports of the KV lane", metavar="A-B")]


class TrafficClass(enum.StrEnum):
    """The priority classes of transfers."""

    INFERENCE = "inference"
    """Collectives of model execution; no step of a plan uses it."""
    KV = "kv"
    """KV-cache on the compute network, host-device copies included (§5.2)."""
    STORAGE_READ = "storage-read"
    """Hit blocks on the storage network; a request waits for them."""
    STORAGE_WRITE = "storage-write"
    """New blocks on the storage network; no request waits for them, they yield to reads."""


class LaneWeights(msgspec.Struct, frozen=True):
    """Shares of a saturated link; §5.1 reserves about 99 % for inference."""

    inference: int = 99
    kv: int = 1

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` unless inference gets the larger share and KV at least 1 in 255."""
        if self.kv < 1 or not self.kv <= self.inference <= 254 * self.kv:
            raise ConfigError(
                f"{{ratio}} {self.inference}:{self.kv} must be between 1:1 and 254:1, inference "
                "first; the paper's is 99:1"
            )

    @property
    def inference_share(self) -> float:
        """Reserved share of a link, 0 to 1."""
        return self.inference / (self.inference + self.kv)

    @property
    def text(self) -> str:
        """The ratio, such as ``99:1``."""
        return f"{self.inference}:{self.kv}"


class PortRange(msgspec.Struct, frozen=True):
    """TCP ports that identify the KV lane, both ends included.

    The default is below the range of ephemeral ports (from 32768 on), so that other connections do
    not use these ports by chance.
    """

    first: int = 20480
    last: int = 24575

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a range that is not a single bit mask."""
        size = self.last - self.first + 1
        aligned = size > 0 and size & (size - 1) == 0 and self.first % size == 0
        if not (1024 <= self.first <= self.last <= 65535 and aligned):
            raise ConfigError(
                f"KV ports {self.first}-{self.last} must be within 1024-65535, be a power of two "
                "in number and start at a multiple of it; 20480-24575 is such a range"
            )

    @property
    def mask(self) -> int:
        """The bits of a port that all ports of the range share."""
        return 0xFFFF & ~(self.last - self.first)

    @property
    def text(self) -> str:
        """The range as UCX writes it in ``TCP_PORT_RANGE``."""
        return f"{self.first}-{self.last}"


DEFAULT_WEIGHTS = LaneWeights()
DEFAULT_KV_PORTS = PortRange()


def parse_weights(text: str) -> LaneWeights:
    """Return the weights of ``"99:1"``; raises ``ConfigError`` for anything else."""
    match = re.fullmatch(r"\s*(\d{1,4})\s*:\s*(\d{1,4})\s*", text)
    if not match:
        raise ConfigError(
            f"{{ratio}} {text!r} must be two whole numbers like 99:1, inference first"
        )
    return LaneWeights(int(match[1]), int(match[2]))


def parse_ports(text: str) -> PortRange:
    """Return the ports of ``"20480-24575"``; raises ``ConfigError`` for anything else."""
    match = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", text)
    if not match:
        raise ConfigError(f"KV ports {text!r} must be first and last port like 20480-24575")
    return PortRange(int(match[1]), int(match[2]))


class ShapingCommand(msgspec.Struct, frozen=True):
    """One `tc` command and its purpose."""

    argv: tuple[str, ...]
    why: str


#: Handle of the queueing discipline and minors of its classes.
ROOT_HANDLE = "1:"
LINK_CLASS = "1:1"
INFERENCE_CLASS = "1:10"
KV_CLASS = "1:20"
#: Bytes that a class may send before the next class of its priority; the largest size of a segment
#: that TCP passes to a device.
_QUANTUM_BYTES = 65536
_SMALLEST_BURST_BYTES = 65536
#: The kernel's timers are late by up to about this time; a smaller burst loses bandwidth.
_BURST_S = 0.001


def burst_bytes(bytes_per_s: float) -> int:
    """Return the burst, a power of two, that a link of this rate needs to reach its bandwidth."""
    return max(_SMALLEST_BURST_BYTES, 1 << math.ceil(math.log2(bytes_per_s * _BURST_S)))


def shaping_commands(
    device: str,
    bytes_per_s: float,
    weights: LaneWeights = DEFAULT_WEIGHTS,
    kv_ports: PortRange = DEFAULT_KV_PORTS,
) -> tuple[ShapingCommand, ...]:
    """Return the commands that limit the egress rate of ``device`` and divide it into two lanes.

    HTB serves its priorities strictly: spare bandwidth goes to inference first, whereas InfiniBand
    divides it by weights.  Traffic on other TCP ports than those of KV is inference.
    """
    bits = round(bytes_per_s * 8)
    reserved = round(bits * weights.inference_share)
    burst = str(burst_bytes(bytes_per_s))
    commands = [
        _tc(
            f"qdisc add dev {device} root handle {ROOT_HANDLE} htb default 10",
            "queues by class; traffic that matches no filter below goes to class 10",
        ),
        _tc(
            f"class add dev {device} parent {ROOT_HANDLE} classid {LINK_CLASS} htb "
            f"rate {bits}bit ceil {bits}bit burst {burst} cburst {burst} quantum {_QUANTUM_BYTES}",
            "the whole link; its two classes borrow from each other through it",
        ),
        _tc(
            f"class add dev {device} parent {LINK_CLASS} classid {INFERENCE_CLASS} htb "
            f"rate {reserved}bit ceil {bits}bit prio 0 burst {burst} cburst {burst} "
            f"quantum {_QUANTUM_BYTES}",
            f"inference: reserved {weights.inference_share:.2%}, may use all of it, has priority",
        ),
        _tc(
            f"class add dev {device} parent {LINK_CLASS} classid {KV_CLASS} htb "
            f"rate {max(bits - reserved, 8000)}bit ceil {bits}bit prio 1 burst {burst} "
            f"cburst {burst} quantum {_QUANTUM_BYTES}",
            f"KV: reserved {1 - weights.inference_share:.2%}, may use idle bandwidth of inference",
        ),
    ]
    for side, what in (("sport", "sent by"), ("dport", "sent to")):
        commands.append(
            _tc(
                f"filter add dev {device} parent {ROOT_HANDLE} protocol ip prio 1 u32 "
                f"match ip protocol 6 0xff match ip {side} {kv_ports.first} {kv_ports.mask:#06x} "
                f"flowid {KV_CLASS}",
                f"TCP {what} ports {kv_ports.text} is KV",
            )
        )
    return tuple(commands)


def _tc(words: str, why: str) -> ShapingCommand:
    return ShapingCommand(("tc", *words.split()), why)
