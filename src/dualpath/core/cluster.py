"""Engines, roles and the shape of a cluster (§2.3, §4.2)."""

import enum
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from dualpath.core.errors import ConfigError
from dualpath.core.names import Name
from dualpath.core.settings import Setting, Settings

#: More nodes are taken for a typing error.
MAX_NODES = 100_000


class Role(enum.StrEnum):
    """Prefill or decode; all engines of a group have one role (§6.1)."""

    PREFILL = "prefill"
    DECODE = "decode"


class HostProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of a process in the process table of its machine, with those of its other ranks.

    ``host`` identifies the boot of the machine and the PID namespace, empty if unknown;
    ``start_ticks`` after that boot distinguish the process from later ones with the same ``pid``.
    ``ranks`` are the processes of an engine's other ranks: the engine has ended when all have.
    """

    host: str = ""
    pid: int = 0
    start_ticks: int = 0
    ranks: "tuple[HostProcess, ...]" = ()


def next_data_plane(epoch: str) -> str:
    """Return the epoch of a process's next data plane; ``epoch`` is that of its present one.

    A process opens a new data plane when its weights have changed or it has slept, after all
    transfers of the former one are over.  The first one's epoch names the process.
    """
    process, number = _data_plane(epoch)
    return f"{process}.{number + 1}"


def is_earlier_data_plane(epoch: str, present: str) -> bool:
    """Whether one process has had both data planes, and ``epoch`` is the earlier one."""
    (process, number), (other, later) = _data_plane(epoch), _data_plane(present)
    return process == other and number < later


def _data_plane(epoch: str) -> tuple[str, int]:
    """Return the name of the process of an epoch, and the number of its data plane, from 1."""
    process, dot, number = epoch.rpartition(".")
    # The router receives epochs from others: a number has at most nine digits.
    if dot and process and number.isascii() and number.isdigit() and len(number) <= _EPOCH_DIGITS:
        return process, int(number)
    return epoch, 1


_EPOCH_DIGITS = 9


class GroupRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's place in a data-parallel group: its ranks compute in lock step (§A.4).

    Exactly the ranks of one start of a group share ``group`` and ``epoch``; ``rank`` counts from 0
    to ``size`` - 1.  ``at_server`` is its index at an HTTP server that several ranks share, None if
    the rank has a server of its own.
    """

    group: Name
    epoch: Name
    rank: int
    size: int
    at_server: int | None = None

    @property
    def start(self) -> tuple[str, str]:
        """Group and epoch, which identify one start of the group."""
        return self.group, self.epoch


def rank_mark(rank: int) -> str:
    """Return the suffix of the name of a rank of a data-parallel group."""
    return f"-dp{rank}"


def rank_name(unit: str, rank: int, size: int) -> str:
    """Return the name of a rank of a unit of ``size`` ranks; of one rank, the unit's own name."""
    return f"{unit}{rank_mark(rank)}" if size > 1 else unit


class UnitShape(msgspec.Struct, frozen=True):
    """A unit that starts and ends as one: an engine, or ``ranks`` of a data-parallel group."""

    role: Role
    ranks: int = 1

    def __str__(self) -> str:
        return self.role.value if self.ranks == 1 else f"{self.role.value} with {self.ranks} ranks"


class ClusterShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size and bandwidths of a cluster, with the symbols of §4.2.

    ``prefill_nodes`` P, ``decode_nodes`` D, ``gpus_per_node`` g (one compute NIC each),
    ``cnic_bytes_per_s`` B, ``snic_ratio`` s (a node's storage NIC carries s·B),
    ``dram_bytes_per_s`` M per node.  Beyond the paper, for engines of several GPUs: how many of a
    PE's and of a DE's GPUs load the same KV (``plan.movements.Replicas``), r and q in formulas.
    """

    prefill_nodes: int
    decode_nodes: int
    gpus_per_node: int
    cnic_bytes_per_s: float
    snic_ratio: float
    dram_bytes_per_s: float
    prefill_replicas: float = 1
    decode_replicas: float = 1


def parse_nodes(text: str, most: int = MAX_NODES) -> tuple[int, int]:
    """Return prefill and decode nodes of ``"2P4D"``, each at least 1.

    Raises ``ConfigError`` for anything else, and for more than ``most`` nodes together.
    """
    match = re.fullmatch(r"(\d{1,6})[Pp](\d{1,6})[Dd]", text.strip())
    nodes = (int(match[1]), int(match[2])) if match else (0, 0)
    if not all(nodes):
        raise ConfigError(
            f"{{nodes}} is {text!r}; it must be at least one prefill and one decode node, "
            "like 1P2D; correct it"
        )
    if sum(nodes) > most:
        raise ConfigError(
            f"{{nodes}} is {text}, {sum(nodes)} nodes; it must be at most {most}; take fewer"
        )
    return nodes


def nodes_text(prefill: int, decode: int) -> str:
    """Return the nodes as the paper writes them, such as ``1P2D``."""
    return f"{prefill}P{decode}D"


class NodesSettings(Settings, frozen=True, kw_only=True):
    """Base of settings of a cluster: how many prefill and decode nodes it has."""

    nodes: Annotated[str, Setting("prefill and decode nodes, such as 1P2D", metavar="xPyD")] = (
        "1P1D"
    )

    def check(self) -> None:
        """Raise ``ConfigError`` for an invalid number of nodes."""
        super().check()
        parse_nodes(self.nodes)

    @property
    def prefill(self) -> int:
        """Prefill nodes."""
        return parse_nodes(self.nodes)[0]

    @property
    def decode(self) -> int:
        """Decode nodes."""
        return parse_nodes(self.nodes)[1]


# --------------------------------------------------------------------------------------- addresses
# Addresses of engines on the compute network, and the identity of their processes.
#
# An engine of several ranks has an agent per rank, each on the NIC of its device.  All of them
# reach the same buffer, so the pairing of two engines' ranks affects only the load of the NICs.

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


class SharedMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of a process that other processes of the same machine can map.

    ``process`` has it at ``base_address``, and has its memory file open as ``descriptor``.  The
    last page of the file begins with ``nonce``, by which other processes recognise the file.
    """

    process: HostProcess
    descriptor: Annotated[int, Meta(ge=0)]
    base_address: Annotated[int, Meta(ge=1)]
    size_bytes: Annotated[int, Meta(ge=1)]
    nonce: bytes


#: Maximum number of memory files of one agent; an engine has one.
MAX_SHARED_MEMORIES = 16


class AgentAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Wire form of ``transport.contract.AgentInfo``, and a DE's views of its KV in HBM.

    ``hbm`` has a view per part of each layer, in order, with a piece per HBM block; it is empty
    where prefill engines may not write into HBM.
    """

    agent: Name
    metadata: bytes
    regions: tuple[RegionAddress, ...]
    shared: Annotated[tuple[SharedMemory, ...], Meta(max_length=MAX_SHARED_MEMORIES)] = ()
    hbm: tuple[RegionAddress, ...] = ()


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
