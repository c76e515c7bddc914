"""The kinds of movement of DualPath's data path, as one table (§4.1, Fig. 4).

A movement has a source, a destination, links (§4.2) and a traffic class (§5.1).  The blocks that it
moves for a prompt are in ``steps``.
"""

import enum
import functools
from typing import NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.plan.traffic_class import TrafficClass


class Place(enum.StrEnum):
    """Where KV can be."""

    STORAGE = "storage"
    PE_BUFFER = "pe-buffer"
    PE_HBM = "pe-hbm"
    DE_BUFFER = "de-buffer"
    DE_HBM = "de-hbm"
    DE_STAGING = "de-staging"
    """DRAM through which new blocks leave the DE's HBM."""
    THIRD_BUFFER = "third-buffer"
    """The DRAM buffer of a DE that is not the request's; its links are those of a DE."""

    @functools.cached_property
    def side(self) -> Role | None:
        """The role of the engine that owns the memory; None for storage."""
        sides = {"pe": Role.PREFILL, "de": Role.DECODE, "third": Role.DECODE}
        return sides.get(self.owner)

    @functools.cached_property
    def owner(self) -> str:
        """Which of a request's engines owns the memory: "pe", "de" or "third"; or "storage"."""
        return self.value.partition("-")[0]


class Unit(enum.StrEnum):
    """Granularity of a step (§A.5)."""

    FULL_BLOCK = "full-block"
    LAYER_BLOCK = "layer-block"


class Link(enum.StrEnum):
    """One direction of a device that a step uses; reads leave a memory, writes enter it (§4.2)."""

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
    """A kind of step, an arrow of Fig. 4; ``verb`` is its name in traces.

    Each of its bytes crosses each of ``links`` once, and a link that is named twice twice.
    """

    label: str
    verb: str
    source: Place
    destination: Place
    traffic_class: TrafficClass
    links: tuple[Link, ...]

    @property
    def engine(self) -> Role:
        """The role of the engine that executes it.

        PEs start all transfers between a PE and a DE, the DE that decodes those between two DEs.
        """
        prefill = Role.PREFILL in (self.source.side, self.destination.side)
        return Role.PREFILL if prefill else Role.DECODE

    def copies(self, replicas: "Replicas") -> float:
        """How often its links carry each of its bytes: KV for HBM is copied to every replica.

        KV for DRAM is sent once, as the replicas of an engine take turns; so is KV for a PE's HBM
        if the replicas share their loads.
        """
        if self.destination is Place.PE_HBM:
            return replicas.prefill_loads
        return replicas.decode if self.destination is Place.DE_HBM else 1

    @property
    def network(self) -> str:
        """The network: "snic" to storage, "cnic" to another engine, "loopback" within an engine."""
        if Place.STORAGE in (self.source, self.destination):
            return "snic"
        return "loopback" if self.source.owner == self.destination.owner else "cnic"

    @property
    def read_path(self) -> str:
        """The read path: "pe" or "de" for a step of Fig. 4a or 4b only, else "both"."""
        return {"4a": "pe", "4b": "de"}.get(self.label.partition(".")[0], "both")


class Replicas(NamedTuple):
    """How many ranks of a PE and of a DE replicate the same KV, on average over its bytes.

    1 if each GPU of an engine has its own heads; with tensor parallelism of a ranks: a for latent
    attention, a/k for grouped-query attention with k < a KV heads.  ``shares_loads``: each replica
    of a PE loads a part and exchanges it with the others, over links that are not counted.
    """

    prefill: float = 1
    decode: float = 1
    shares_loads: bool = False

    @property
    def prefill_loads(self) -> float:
        """How often a PE loads each byte: r in formulas."""
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
# The same steps where a PE sends into the DE's HBM: no DRAM carries them.  Their labels, and so the
# counters of their bytes, are those of the steps that they replace.
SEND_HITS_TO_HBM = msgspec.structs.replace(
    SEND_HITS, destination=Place.DE_HBM, links=(Link.PE_CNIC_READ, Link.DE_CNIC_WRITE)
)
SEND_MISSES_TO_HBM = msgspec.structs.replace(
    SEND_MISSES, destination=Place.DE_HBM, links=(Link.PE_CNIC_READ, Link.DE_CNIC_WRITE)
)
RELOAD_CHUNK_FROM_HBM = msgspec.structs.replace(
    RELOAD_CHUNK, source=Place.DE_HBM, links=(Link.DE_CNIC_READ, Link.PE_CNIC_WRITE)
)
# The steps of the DE path where a third DE caches or reads hits: the PE loads them from its buffer.
READ_TO_THIRD = msgspec.structs.replace(READ_TO_DE, destination=Place.THIRD_BUFFER)
LOAD_FROM_THIRD_BUFFER = msgspec.structs.replace(LOAD_FROM_DE_BUFFER, source=Place.THIRD_BUFFER)
# A DE takes a whole prompt from the buffer of another DE, which has received it.  The links are
# those of both DEs, so that DRAM of a DE carries each byte twice.
MOVE_PROMPT = Movement(
    "move",
    "move",
    Place.THIRD_BUFFER,
    Place.DE_BUFFER,
    TrafficClass.KV,
    (Link.DE_DRAM, Link.DE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM),
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

#: The kinds of steps by label, in the order of a prompt's data path.
MOVEMENTS = (
    READ_TO_PE,
    READ_TO_DE,
    LOAD_FROM_PE_BUFFER,
    LOAD_FROM_DE_BUFFER,
    RELOAD_CHUNK,
    SEND_HITS,
    SEND_MISSES,
    MOVE_PROMPT,
    FILL_DE_HBM,
    STAGE_GENERATED,
    PERSIST_PROMPT,
    PERSIST_GENERATED,
)
