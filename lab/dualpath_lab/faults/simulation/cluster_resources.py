"""Resources shared by the processes of a simulated cluster: networks, storage, memory owners."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from random import Random
from typing import TYPE_CHECKING

from dualpath.core.blocks import BlockKey, StoreNamespace
from dualpath.core.cluster import HostProcess
from dualpath.node import host_process
from dualpath.node.host_process import Sight
from dualpath.storage.posix import key_of, namespace_name
from dualpath.transport.in_process import InProcessFabric
from dualpath_lab.emulated.checkable_kv import CheckedAt
from dualpath_lab.faults.simulation.connections import Network, WireFaults
from dualpath_lab.faults.simulation.disk import Disk, StorageFaults
from dualpath_lab.faults.simulation.http import HttpNetwork
from dualpath_lab.faults.simulation.janitor_checks import JanitorChecker
from dualpath_lab.faults.simulation.leadership import LeaderElection, SchedulerLeadership
from dualpath_lab.faults.simulation.transfers import TransferFaults
from dualpath_lab.faults.simulation.world import Process, World

if TYPE_CHECKING:
    from dualpath_lab.faults.simulation.engine import SimEngine


# ---------------------------------------------------------------------------------- process tables
# What the processes of a machine see of each other.

#: The share of numbers of dead processes that the kernel gives to other processes.
_REUSED = 0.2


class ProcView(Enum):
    """What ``/proc`` shows on a machine.

    ``HIDDEN``: processes of the own user alone.  ``FOREIGN``: the table of another PID namespace,
    in which the same numbers belong to other processes.
    """

    COMPLETE = "complete"
    HIDDEN = "hidden"
    FOREIGN = "foreign"


NO_VIEWS: Mapping[str, ProcView] = {}


class SimProcessTable:
    """``host_process.ProcessTable`` of a simulated machine, as all of its processes see it."""

    def __init__(self, host: str, view: ProcView, processes: dict[int, Process], seed: int) -> None:
        self._host = host
        self._view = view
        self._processes = processes
        self._seed = seed

    def host(self) -> str:
        """See ``ProcessTable``."""
        return "" if self._view is ProcView.FOREIGN else self._host

    def sight(self, pid: int) -> Sight:
        """See ``ProcessTable``."""
        process = self._processes.get(pid)
        if process is None:
            return Sight.ABSENT
        if not process.has_exited or self._is_reused(pid):
            return Sight.ALIVE
        return Sight.EXITED if pid % 2 else Sight.ABSENT

    def start_ticks(self, pid: int) -> int | None:
        """See ``ProcessTable``."""
        if self._view is ProcView.HIDDEN or self.sight(pid) is not Sight.ALIVE:
            return None
        if self._view is ProcView.FOREIGN:
            return None if pid % 2 else pid - 1
        return pid + 1_000_000 * self._is_reused(pid)

    def runs(self, pid: int) -> bool:
        """Whether a process has this number, as signal 0 finds out."""
        return self.sight(pid) is Sight.ALIVE

    def _is_reused(self, pid: int) -> bool:
        # It does not take from the random source of the run: asking changes nothing.
        chance = Random(f"number {pid} of {self._seed}")
        return self._processes[pid].has_exited and chance.random() < _REUSED


class UnitNetworks:
    """The networks of one scheduler and its standbys, and which of these leads."""

    def __init__(self, world: World, faults: WireFaults, election: LeaderElection) -> None:
        #: Connections of engines, and of front ends, to the scheduler.
        self.control, self.links = (Network(world, faults) for _ in range(2))
        self.leadership = SchedulerLeadership(world, election)


class ThirdEngines:
    """Checks of third DEs: what they hold while a PE loads, and what a prefill counts with.

    ``waits_for_pe`` returns whether a live scheduler waits for the end of a PE's loads for an
    attempt: it does until the PE is lost or late.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.waits_for_pe: Callable[[str], bool] = lambda attempt_id: False
        #: By attempt: third DEs that have granted slots and have not been released since.
        self._holding: dict[str, set[str]] = {}
        #: By attempt: third DEs that its PE loads from.
        self._used: dict[str, set[str]] = {}
        self._released: set[tuple[str, str]] = set()
        self._wrong: set[str] = set()

    def granted(self, engine_id: str, attempt_id: str) -> None:
        """A third DE has granted slots."""
        self._holding.setdefault(attempt_id, set()).add(engine_id)
        self._released.discard((engine_id, attempt_id))

    def serve(self, attempt_id: str) -> bool:
        """Whether a third DE has granted slots to an attempt."""
        return attempt_id in self._holding

    def released(self, engine_id: str, attempt_id: str, *, holds: bool, loads: bool) -> None:
        """A third DE executes a ``Release``; it still ``holds`` the slots, and a PE ``loads``."""
        self._released.add((engine_id, attempt_id))
        if holds:
            self._holding[attempt_id].discard(engine_id)
        # A third DE of which nothing is loaded, as another one has refused, may free them late.
        loads = loads and engine_id in self._used.get(attempt_id, set())
        if loads and self.waits_for_pe(attempt_id):
            self._world.problem(f"{engine_id} frees slots of {attempt_id}, which a PE loads")

    def loads(self, engine_id: str, attempt_id: str) -> None:
        """A PE begins a pass that loads from a third DE."""
        self._used.setdefault(attempt_id, set()).add(engine_id)
        if (engine_id, attempt_id) in self._released and self.waits_for_pe(attempt_id):
            self._world.problem(f"a PE loads {attempt_id} from slots that {engine_id} has freed")

    def compared(self, attempt_id: str, place: CheckedAt, found: str | None) -> str | None:
        """KV in HBM was compared; return what is wrong with it, if that is to end the request.

        What a PE has loaded does not end it, as that would hide that its prefill counts.
        """
        if attempt_id not in self._holding:
            return found
        if place is CheckedAt.PE_HBM:
            self._wrong |= {attempt_id} if found else set()
            return None
        if holding := self._holding[attempt_id] & self._used.get(attempt_id, set()):
            self._world.problem(f"{attempt_id} counts, and {sorted(holding)} have not confirmed")
        if attempt_id in self._wrong:
            self._world.problem(f"{attempt_id} counts, of which a PE has loaded wrong KV")
        return found


class ClusterResources:
    """Networks, storage and processes; ``agents`` are engines by the name of their agent.

    ``links``: whether the storage's file system supports hard links.  Its janitor must not evict
    blocks used in the last ``protect_s``.  ``election`` decides which scheduler of the first unit
    leads; that of the second unit, if there are two ``units``, has no standby.  ``views`` are what
    ``/proc`` shows on machines, by name; by default it is complete.
    """

    def __init__(
        self,
        world: World,
        *,
        links: bool = True,
        protect_s: float = 0.0,
        election: LeaderElection = LeaderElection.ONE,
        views: Mapping[str, ProcView] = NO_VIEWS,
        units: int = 1,
    ) -> None:
        self.world = world
        self.wire_faults = WireFaults()
        elections = (election, *[LeaderElection.ONE] * (units - 1))
        self.units = [UnitNetworks(world, self.wire_faults, one) for one in elections]
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
        #: Whether a fault has made connections or transfers silent, perhaps for ever.
        self.silenced = False
        #: The names of all attempts that engines have begun for legs.
        self.leg_names: set[str] = set()
        self.thirds = ThirdEngines(world)
        self._processes: dict[int, Process] = {}
        #: The processes of other ranks of an engine, by the number of its first rank's process.
        self._ranks: dict[int, list[Process]] = defaultdict(list)
        self._views = views
        self._tables: dict[str, SimProcessTable] = {}
        self._on_host: dict[str, dict[int, Process]] = defaultdict(dict)
        #: Whether a process has exited without proof on its own machine.
        self.unproven = ProcView.FOREIGN in views.values()

    def process(
        self, name: str, host: str, first_rank: HostProcess | None = None
    ) -> tuple[Process, HostProcess]:
        """Start a process on a machine; return it, and its identity on that machine.

        ``first_rank`` is the process of the engine that a follower rank belongs to.
        """
        process = Process(self.world, name)
        number = len(self._processes) + 1
        known = HostProcess(host=host, pid=number, start_ticks=number)
        self._processes[number] = process
        self._on_host[host][number] = process
        if first_rank is not None:
            self._ranks[first_rank.pid].append(process)
        return process, known

    def check_known_end(
        self, namespace: StoreNamespace, keys: Sequence[BlockKey], end: int
    ) -> str | None:
        """Return what is wrong if the first ``end`` blocks of a chain are believed to be stored.

        Some may have been removed, or refused in the middle of a chain, which a look-up need not
        notice; and those of another unit may follow.
        """
        folder = f"/{namespace_name(namespace)}/"
        stored = {key_of(path) for path, _ in self.disk.blocks() if folder in path}
        lost = bool(self.storage_faults.injected) or bool(self.janitor_checker.evicted)
        absent = [key for key in keys[:end] if key not in stored]
        if absent and not lost:
            return f"{len(absent)} of {end} blocks are absent, as {absent[0].hex()[:8]}"
        if len(self.units) == 1 and end < len(keys) and keys[end] in stored:
            return f"{keys[end].hex()[:8]} follows the first {end} blocks"
        return None

    def table(self, host: str) -> SimProcessTable:
        """Return what the processes of a machine see of each other."""
        if host not in self._tables:
            view = self._views.get(host, ProcView.COMPLETE)
            self._tables[host] = SimProcessTable(host, view, self._on_host[host], self.world.seed)
        return self._tables[host]

    def identity(self, known: HostProcess) -> HostProcess:
        """Return the identity that a process reports: empty where it cannot be established."""
        return known if self.table(known.host).host() else HostProcess()

    def has_exited(self, host: str, process: HostProcess) -> bool:
        """Return the answer of ``host_process.has_exited`` on a machine, and check it.

        An engine has exited when all its ranks have, whether its identity names them or not.
        """
        answer = host_process.has_exited(process, self.table(host))
        first = self._processes.get(process.pid)
        exited = first is not None and all(
            one.has_exited for one in (first, *self._ranks.get(process.pid, ()))
        )
        if answer and not exited:
            self.world.problem(f"{host} takes process {process.pid} for dead, which is alive")
        self.unproven |= exited and not answer and host == process.host
        return answer

    def runs(self, host: str, process_id: int) -> bool:
        """Whether a machine has a process of this number."""
        return self.table(host).runs(process_id)

    def owner_of(self, agent: str, region: str, piece: int) -> str | None:
        """Return the owner of a piece of an agent's memory."""
        return self.agents[agent].owner_of(region, piece)
