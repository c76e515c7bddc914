"""Addresses of engines on the compute network, and the identity of their processes.

An engine of several ranks has an agent per rank, each on the NIC of its device.  All of them reach
the same buffer, so the pairing of two engines' ranks affects only the load of the NICs.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from dualpath.core.cluster import HostProcess, Role
from dualpath.core.names import Name

#: Maximum ranks of one engine.
MAX_RANKS = 256


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
    """The address of an engine on the compute network, and the identity of its process.

    ``agents`` has one per rank, rank 0 first.
    """

    engine_id: Name
    epoch: Name
    role: Role
    agents: Annotated[tuple[AgentAddress, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    process: HostProcess = HostProcess()

    def agents_for(self, rank: int, ranks: int) -> tuple[AgentAddress, ...]:
        """Return the agents that rank ``rank`` of an engine with ``ranks`` ranks connects to.

        Every rank has at least one, the agents are spread evenly, and neighbouring ranks share one.
        """
        mine = len(self.agents)
        first = rank * mine // ranks
        return self.agents[first : max(first + 1, (rank + 1) * mine // ranks)]

    @property
    def writer(self) -> "Writer":
        """This process as a writer into buffers of other engines."""
        return Writer(self.engine_id, self.epoch, self.process)


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process of a prefill engine; its transfers write into decode engines' buffers."""

    engine_id: Name
    epoch: Name
    process: HostProcess = HostProcess()

    @property
    def id(self) -> tuple[str, str]:
        """Engine and epoch, which identify the process."""
        return self.engine_id, self.epoch
