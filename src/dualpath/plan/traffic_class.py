"""Traffic classes of §5.1: model communication goes first, KV takes what is left.

Two lanes share every compute link.  The inference lane is reserved nearly all of the bandwidth and
the KV lane the rest, so that KV never starves; whatever one lane leaves idle the other may use.
How a fabric learns of them is `dualpath.ops.fabric_settings`; for Ethernet without RDMA it is the
list of `tc` commands below, which the lab applies to its own links.
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
    """Who may wait for whom."""

    INFERENCE = "inference"
    """Collectives of model execution; no step of a plan ever uses it."""
    KV = "kv"
    """KV-cache on the compute network, host-device copies included (§5.2)."""
    STORAGE_READ = "storage-read"
    """Hit blocks on the storage network; a request waits for them."""
    STORAGE_WRITE = "storage-write"
    """New blocks on the storage network; nobody waits for them, they yield to reads."""


class LaneWeights(msgspec.Struct, frozen=True):
    """Shares of a link while both lanes want more than it carries; §5.1 reserves about 99 %."""

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
        """The ratio as people write it."""
        return f"{self.inference}:{self.kv}"


class PortRange(msgspec.Struct, frozen=True):
    """TCP ports by which the KV lane is told from the rest, both ends included.

    The default lies below the ports that systems give to outgoing connections (from 32768 on), so
    that nothing else falls into it by chance.
    """

    first: int = 20480
    last: int = 24575

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for ranges that one comparison of bits cannot describe."""
        size = self.last - self.first + 1
        aligned = size > 0 and size & (size - 1) == 0 and self.first % size == 0
        if not (1024 <= self.first <= self.last <= 65535 and aligned):
            raise ConfigError(
                f"KV ports {self.first}-{self.last} must lie within 1024-65535, be a power of two "
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
    """One `tc` command and what it is for."""

    argv: tuple[str, ...]
    why: str


#: Handle of the queueing discipline and minors of its classes.
ROOT_HANDLE = "1:"
LINK_CLASS = "1:1"
INFERENCE_CLASS = "1:10"
KV_CLASS = "1:20"
#: What a class may send before the next one of its priority; a segment that TCP hands to a device
#: has at most this size.
_QUANTUM_BYTES = 65536
_SMALLEST_BURST_BYTES = 65536
#: Wake-ups of the kernel come late by up to about this; a smaller burst loses bandwidth.
_BURST_S = 0.001


def burst_bytes(bytes_per_s: float) -> int:
    """Return the burst a link of this rate needs to be used fully: a power of two."""
    return max(_SMALLEST_BURST_BYTES, 1 << math.ceil(math.log2(bytes_per_s * _BURST_S)))


def shaping_commands(
    device: str,
    bytes_per_s: float,
    weights: LaneWeights = DEFAULT_WEIGHTS,
    kv_ports: PortRange = DEFAULT_KV_PORTS,
) -> tuple[ShapingCommand, ...]:
    """Return the commands that give what ``device`` sends a rate and two lanes.

    HTB serves its priorities strictly: spare bandwidth goes to inference first, where InfiniBand
    would go on by weights.  Traffic that is not KV by its TCP ports is inference.
    """
    bits = round(bytes_per_s * 8)
    reserved = round(bits * weights.inference_share)
    burst = str(burst_bytes(bytes_per_s))
    commands = [
        _tc(
            f"qdisc add dev {device} root handle {ROOT_HANDLE} htb default 10",
            "queues by class; what no filter below names goes to class 10",
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
            f"inference: reserved {weights.inference_share:.2%}, may use all of it, goes first",
        ),
        _tc(
            f"class add dev {device} parent {LINK_CLASS} classid {KV_CLASS} htb "
            f"rate {max(bits - reserved, 8000)}bit ceil {bits}bit prio 1 burst {burst} "
            f"cburst {burst} quantum {_QUANTUM_BYTES}",
            f"KV: reserved {1 - weights.inference_share:.2%}, may use what inference leaves",
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
