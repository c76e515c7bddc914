"""How engines reach each other over the compute network, and which process each of them is."""

import msgspec

from dualpath.core.cluster import HostProcess, Role
from dualpath.core.names import Name


class RegionAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Wire form of ``transport.contract.RegionInfo``."""

    name: Name
    base_address: int
    stride_bytes: int
    piece_bytes: int
    pieces: int
    memory: str = "DRAM"
    device: int = 0


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How other engines reach this one over the compute network, and which process it is."""

    engine_id: Name
    epoch: Name
    role: Role
    agent: Name
    agent_metadata: bytes
    regions: tuple[RegionAddress, ...]
    process: HostProcess = HostProcess()

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
