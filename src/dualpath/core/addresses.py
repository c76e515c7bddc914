"""How engines reach each other over the compute network, and which process each of them is.

An engine of several ranks has an agent per rank, each on the NIC of its device.  All of them reach
the same buffer: which rank of one engine speaks with which of another is a matter of NICs alone.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from dualpath.core.cluster import HostProcess, Role
from dualpath.core.names import Name

#: Ranks of one engine; more are an error.
MOST_RANKS = 256


class RegionAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Wire form of ``transport.contract.RegionInfo``."""

    name: Name
    base_address: int
    stride_bytes: int
    piece_bytes: int
    pieces: int
    memory: str = "DRAM"
    device: int = 0


class AgentAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Wire form of ``transport.contract.AgentInfo``."""

    agent: Name
    metadata: bytes
    regions: tuple[RegionAddress, ...]


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How other engines reach this one over the compute network, and which process it is.

    ``agents`` has one per rank, rank 0 first.
    """

    engine_id: Name
    epoch: Name
    role: Role
    agents: Annotated[tuple[AgentAddress, ...], Meta(min_length=1, max_length=MOST_RANKS)]
    process: HostProcess = HostProcess()

    def agents_for(self, rank: int, ranks: int) -> tuple[AgentAddress, ...]:
        """Return whom rank ``rank`` of an engine of ``ranks`` speaks with: in turn, if several.

        Every rank has a partner, every agent about as many, and neighbours share one.
        """
        mine = len(self.agents)
        first = rank * mine // ranks
        return self.agents[first : max(first + 1, (rank + 1) * mine // ranks)]

    @property
    def writer(self) -> "Writer":
        """This process as one that may write into others' buffers."""
        return Writer(self.engine_id, self.epoch, self.process)


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process of a prefill engine, whose transfers write into decode engines' buffers."""

    engine_id: Name
    epoch: Name
    process: HostProcess = HostProcess()

    @property
    def id(self) -> tuple[str, str]:
        """Engine and epoch, which name the process."""
        return self.engine_id, self.epoch
