"""One simulated engine's access to the storage: the real file storage on the simulated disk."""

from collections.abc import Callable

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import HostProcess
from dualpath.engine.settings import EngineSettings
from dualpath.engine.surroundings import open_node_dram
from dualpath.laboratory.chaos.simulation.blocks import Pace, SimStorage, SimTree
from dualpath.laboratory.chaos.simulation.calls import SimCalls
from dualpath.laboratory.chaos.simulation.cluster_parts import ClusterResources
from dualpath.laboratory.chaos.simulation.disk import ROOT
from dualpath.laboratory.chaos.simulation.storage_watch import CheckedCalls
from dualpath.laboratory.chaos.simulation.threads import SimThreads
from dualpath.storage.contract import BlockStorage
from dualpath.storage.node_dram import NodeDram
from dualpath.storage.objects import ObjectTree
from dualpath.storage.posix import PosixStorage
from dualpath.storage.posix_objects import PosixObjects


class EngineFiles:
    """``check`` is called with the memory that a block is about to be read into."""

    def __init__(
        self,
        shared: ClusterResources,
        threads: SimThreads,
        known: HostProcess,
        check: Callable[[memoryview], None],
    ) -> None:
        context = (threads, shared.storage_faults, known, shared.runs)
        self._shared = shared
        self._block_calls = SimCalls(shared.disk, *context)
        self._object_calls = CheckedCalls(shared.janitor_checker, shared.disk, *context)
        self._dram_calls = SimCalls(shared.node_dram[known.host], *context)
        self._pace = Pace(threads, shared.storage_faults)
        self._check = check

    @property
    def open(self) -> int:
        """Number of open files."""
        calls = self._block_calls, self._object_calls, self._dram_calls
        return sum(each.descriptors for each in calls)

    def half_written(self, writer: str) -> list[str]:
        """Return the temporary files of one process whose removal was not refused."""
        return self._shared.disk.temporaries_of(writer) + self._dram_calls.disk.temporaries_of(
            writer
        )

    def open_storage(self, settings: EngineSettings, namespace: StoreNamespace) -> BlockStorage:
        """Open the storage; without faults, which would only make the engine restart."""
        self._shared.namespaces[namespace] = None
        self._block_calls.reliable = True
        inner = PosixStorage(ROOT, namespace, direct_io=False, calls=self._block_calls)
        self._block_calls.reliable = False
        return SimStorage(inner, self._shared.disk, self._pace, self._check)

    def open_node_dram(
        self, settings: EngineSettings, namespace: StoreNamespace
    ) -> NodeDram | None:
        """Open the DRAM that it shares with other engines of its machine, if there is one."""
        self._dram_calls.reliable = True
        dram = open_node_dram(settings, namespace, self._dram_calls)
        self._dram_calls.reliable = False
        return dram

    def open_tree(self, settings: EngineSettings) -> ObjectTree:
        """Open the objects that are stored with the blocks."""
        return SimTree(PosixObjects(ROOT, self._object_calls), self._pace)
