"""Resources shared by the processes of a simulated cluster: networks, storage, memory owners."""

from collections import defaultdict
from typing import TYPE_CHECKING

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import HostProcess
from dualpath.transport.in_process import InProcessFabric
from dualpath_lab.faults.simulation.connections import Network, WireFaults
from dualpath_lab.faults.simulation.disk import Disk, StorageFaults
from dualpath_lab.faults.simulation.http import HttpNetwork
from dualpath_lab.faults.simulation.janitor_checks import JanitorChecker
from dualpath_lab.faults.simulation.leadership import LeaderElection, SchedulerLeadership
from dualpath_lab.faults.simulation.transfers import TransferFaults
from dualpath_lab.faults.simulation.world import Process, World

if TYPE_CHECKING:
    from dualpath_lab.faults.simulation.engine import SimEngine


class ClusterResources:
    """Networks, storage and processes; ``agents`` are engines by the name of their agent.

    ``links``: whether the storage's file system supports hard links.  Its janitor must not evict
    blocks used in the last ``protect_s``.  ``election`` decides which scheduler leads.
    """

    def __init__(
        self,
        world: World,
        *,
        links: bool = True,
        protect_s: float = 0.0,
        election: LeaderElection = LeaderElection.ONE,
    ) -> None:
        self.world = world
        self.wire_faults = WireFaults()
        #: Connections of engines to the router, and of front ends to the router.
        self.control, self.links = (Network(world, self.wire_faults) for _ in range(2))
        self.http = HttpNetwork(world)
        self.fabric = InProcessFabric()
        self.transfer_faults = TransferFaults()
        self.storage_faults = StorageFaults()
        self.agents: dict[str, SimEngine] = {}
        self.disk = Disk(links=links)
        #: The DRAM file system of each machine, by its name.
        self.node_dram: dict[str, Disk] = defaultdict(lambda: Disk(links=True))
        self.janitor_checker = JanitorChecker(world, self.disk, protect_s)
        #: Namespaces of all stored blocks.
        self.namespaces: dict[StoreNamespace, None] = {}
        self._processes: dict[int, Process] = {}
        self.leadership = SchedulerLeadership(world, election)

    def process(self, name: str, host: str) -> tuple[Process, HostProcess]:
        """Start a process on a machine; return it, and its identity on that machine."""
        process = Process(self.world, name)
        number = len(self._processes) + 1
        known = HostProcess(host=host, pid=number, start_ticks=number)
        self._processes[number] = process
        return process, known

    def has_exited(self, host: str, process: HostProcess) -> bool:
        """Whether a machine can confirm that a process and all its ranks have exited.

        False for a process of another machine.
        """
        exited = process.host == host and self._processes[process.pid].has_exited
        return exited and all(self.has_exited(host, rank) for rank in process.ranks)

    def runs(self, process_id: int) -> bool:
        """Whether a process has this number."""
        process = self._processes.get(process_id)
        return process is not None and not process.has_exited

    def owner_of(self, agent: str, region: str, piece: int) -> str | None:
        """Return the owner of a piece of an agent's memory."""
        return self.agents[agent].owner_of(region, piece)
