"""What the processes of a simulated cluster share: networks, storage, and who owns which memory."""

from collections import defaultdict
from typing import TYPE_CHECKING

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import HostProcess
from dualpath.laboratory.chaos.simulation.api import HttpNetwork
from dualpath.laboratory.chaos.simulation.calls import StorageFaults
from dualpath.laboratory.chaos.simulation.data import TransferFaults
from dualpath.laboratory.chaos.simulation.disk import Disk
from dualpath.laboratory.chaos.simulation.storage_watch import StorageWatch
from dualpath.laboratory.chaos.simulation.turns import TurnKind, Turns
from dualpath.laboratory.chaos.simulation.wires import Network, WireFaults
from dualpath.laboratory.chaos.simulation.world import Process, World
from dualpath.transport.in_process import InProcessFabric

if TYPE_CHECKING:
    from dualpath.laboratory.chaos.simulation.engine import SimEngine


class Shared:
    """One of each; ``agents`` are engines by the name of their transport's agent.

    The storage's file system may know no hard ``links``; its janitor spares what was used in the
    last ``protect_s``.  Schedulers take their ``turn`` by it.
    """

    def __init__(
        self,
        world: World,
        *,
        links: bool = True,
        protect_s: float = 0.0,
        turn: TurnKind = TurnKind.ONE,
    ) -> None:
        self.world = world
        self.wire_faults = WireFaults()
        #: Of engines to the router, and of front ends to it.
        self.control, self.links = (Network(world, self.wire_faults) for _ in range(2))
        self.http = HttpNetwork(world)
        self.fabric = InProcessFabric()
        self.transfer_faults = TransferFaults()
        self.storage_faults = StorageFaults()
        self.agents: dict[str, SimEngine] = {}
        self.disk = Disk(links=links)
        #: Of each machine, by its name.
        self.node_dram: dict[str, Disk] = defaultdict(lambda: Disk(links=True))
        self.watch = StorageWatch(world, self.disk, protect_s)
        #: Of all blocks that are stored.
        self.namespaces: dict[StoreNamespace, None] = {}
        self._processes: dict[int, Process] = {}
        self.turns = Turns(world, turn)

    def process(self, name: str, host: str) -> tuple[Process, HostProcess]:
        """Start a process on a machine; return it, and how that machine knows it."""
        process = Process(self.world, name)
        number = len(self._processes) + 1
        known = HostProcess(host=host, pid=number, start_ticks=number)
        self._processes[number] = process
        return process, known

    def is_gone(self, host: str, asked: HostProcess) -> bool:
        """Whether a machine sees that a process has ended, and the ranks it works with.

        False for one of another machine.
        """
        ended = asked.host == host and self._processes[asked.pid].is_gone
        return ended and all(self.is_gone(host, rank) for rank in asked.ranks)

    def runs(self, process_id: int) -> bool:
        """Whether a process has this number."""
        process = self._processes.get(process_id)
        return process is not None and not process.is_gone

    def owner_of(self, agent: str, region: str, piece: int) -> str | None:
        """Return who owns a piece of an agent's memory."""
        return self.agents[agent].owner_of(region, piece)
