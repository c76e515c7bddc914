"""What kinds of movement there are: the table that is DualPath's data path (§4.1, Fig. 4).

A kind of movement says where from, where to, over which links (§4.2) and in which traffic class
(§5.1).  Which blocks it moves for a prompt is ``steps``.
"""

import enum
import functools
from typing import NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.plan.traffic_class import TrafficClass


class Place(enum.StrEnum):
    """Where KV can lie."""

    STORAGE = "storage"
    PE_BUFFER = "pe-buffer"
    PE_HBM = "pe-hbm"
    DE_BUFFER = "de-buffer"
    DE_HBM = "de-hbm"
    DE_STAGING = "de-staging"
    """DRAM through which generated blocks leave the DE's HBM."""

    @functools.cached_property
    def side(self) -> Role | None:
        """Whose memory it is; None for storage."""
        sides = {"pe": Role.PREFILL, "de": Role.DECODE}
        return sides.get(self.value.partition("-")[0])


class Unit(enum.StrEnum):
    """Granularity of a step (§A.5)."""

    FULL_BLOCK = "full-block"
    LAYER_BLOCK = "layer-block"


class Link(enum.StrEnum):
    """A direction of a device that a step loads; reads leave a memory, writes enter one (§4.2)."""

    PE_SNIC_READ = "pe-snic-read"
    DE_SNIC_READ = "de-snic-read"
    DE_SNIC_WRITE = "de-snic-write"
    PE_CNIC_READ = "pe-cnic-read"
    PE_CNIC_WRITE = "pe-cnic-write"
    DE_CNIC_READ = "de-cnic-read"
    DE_CNIC_WRITE = "de-cnic-write"
    PE_DRAM = "pe-dram"
    DE_DRAM = "de-dram"


class Movement(msgspec.Struct, frozen=True):
    """A kind of step, an arrow of Fig. 4: ``verb`` is what traces call it.

    ``links`` are the device directions that carry each of its bytes once.
    """

    label: str
    verb: str
    source: Place
    destination: Place
    traffic_class: TrafficClass
    links: tuple[Link, ...]

    @property
    def engine(self) -> Role:
        """Whose engine executes it: a transfer between engines is started by the PE."""
        prefill = Role.PREFILL in (self.source.side, self.destination.side)
        return Role.PREFILL if prefill else Role.DECODE

    def copies(self, replicas: "Replicas") -> float:
        """How often its links carry each of its bytes: what enters HBM enters every replica's.

        Towards DRAM the replicas of an engine take turns, so that it goes once; into a PE's HBM as
        well, if they give each other what they load.
        """
        if self.destination is Place.PE_HBM:
            return replicas.prefill_loads
        return replicas.decode if self.destination is Place.DE_HBM else 1

    @property
    def network(self) -> str:
        """What it crosses: "snic" to storage, "cnic" to another engine, "loopback" within one."""
        if Place.STORAGE in (self.source, self.destination):
            return "snic"
        return "loopback" if self.source.side is self.destination.side else "cnic"

    @property
    def read_path(self) -> str:
        """The path that needs it: "pe" or "de" for a step of Fig. 4a or 4b alone, else "both"."""
        return {"4a": "pe", "4b": "de"}.get(self.label.partition(".")[0], "both")


class Replicas(NamedTuple):
    """How many ranks of a PE and of a DE hold the same KV, on average over its bytes.

    1 where each of an engine's GPUs holds its own heads; with tensor parallelism a of latent
    attention a, of grouped-query attention with k < a KV heads a/k.  ``shares_loads``: those of a
    PE load a part each and give it to each other, over links that are not counted.
    """

    prefill: float = 1
    decode: float = 1
    shares_loads: bool = False

    @property
    def prefill_loads(self) -> float:
        """How often each byte is loaded by a PE: r in formulas."""
        return 1 if self.shares_loads else self.prefill


# CNIC directions follow §4.2: a host-device copy is an RDMA
# write through the engine's own CNIC, so its bytes are read and written by the same NIC.
READ_TO_PE = Movement(
    "4a.1-2",
    "read",
    Place.STORAGE,
    Place.PE_BUFFER,
    TrafficClass.STORAGE_READ,
    (Link.PE_SNIC_READ, Link.PE_DRAM),
)
READ_TO_DE = Movement(
    "4b.1-2",
    "read",
    Place.STORAGE,
    Place.DE_BUFFER,
    TrafficClass.STORAGE_READ,
    (Link.DE_SNIC_READ, Link.DE_DRAM),
)
LOAD_FROM_PE_BUFFER = Movement(
    "4a.3-4",
    "load",
    Place.PE_BUFFER,
    Place.PE_HBM,
    TrafficClass.KV,
    (Link.PE_DRAM, Link.PE_CNIC_READ, Link.PE_CNIC_WRITE),
)
LOAD_FROM_DE_BUFFER = Movement(
    "4b.3-5",
    "load",
    Place.DE_BUFFER,
    Place.PE_HBM,
    TrafficClass.KV,
    (Link.DE_DRAM, Link.DE_CNIC_READ, Link.PE_CNIC_WRITE),
)
RELOAD_CHUNK = Movement(
    "chunk.reload",
    "load",
    Place.DE_BUFFER,
    Place.PE_HBM,
    TrafficClass.KV,
    (Link.DE_DRAM, Link.DE_CNIC_READ, Link.PE_CNIC_WRITE),
)
SEND_HITS = Movement(
    "4a.5-7",
    "send",
    Place.PE_HBM,
    Place.DE_BUFFER,
    TrafficClass.KV,
    (Link.PE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM),
)
SEND_MISSES = Movement(
    "miss",
    "send",
    Place.PE_HBM,
    Place.DE_BUFFER,
    TrafficClass.KV,
    (Link.PE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM),
)
FILL_DE_HBM = Movement(
    "8-9",
    "h2d",
    Place.DE_BUFFER,
    Place.DE_HBM,
    TrafficClass.KV,
    (Link.DE_DRAM, Link.DE_CNIC_READ, Link.DE_CNIC_WRITE),
)
PERSIST_PROMPT = Movement(
    "persist",
    "persist",
    Place.DE_BUFFER,
    Place.STORAGE,
    TrafficClass.STORAGE_WRITE,
    (Link.DE_DRAM, Link.DE_SNIC_WRITE),
)
STAGE_GENERATED = Movement(
    "generated",
    "d2h",
    Place.DE_HBM,
    Place.DE_STAGING,
    TrafficClass.KV,
    (Link.DE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM),
)
PERSIST_GENERATED = Movement(
    "generated.persist",
    "persist",
    Place.DE_STAGING,
    Place.STORAGE,
    TrafficClass.STORAGE_WRITE,
    (Link.DE_DRAM, Link.DE_SNIC_WRITE),
)

#: All kinds of steps, in the order in which a prompt meets them.
MOVEMENTS = (
    READ_TO_PE,
    READ_TO_DE,
    LOAD_FROM_PE_BUFFER,
    LOAD_FROM_DE_BUFFER,
    RELOAD_CHUNK,
    SEND_HITS,
    SEND_MISSES,
    FILL_DE_HBM,
    STAGE_GENERATED,
    PERSIST_PROMPT,
    PERSIST_GENERATED,
)
