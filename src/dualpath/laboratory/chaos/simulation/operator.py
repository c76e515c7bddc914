"""Actions of a human operator on the storage of a simulated cluster, without faults."""

from dualpath.core.cluster import HostProcess
from dualpath.laboratory.chaos.simulation.calls import DiskCalls
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.laboratory.chaos.simulation.disk import ROOT, Disk
from dualpath.storage.directory import key_of
from dualpath.storage.pins import pin_name
from dualpath.storage.posix_objects import PosixObjects


def fault_free_calls(cluster: Cluster, host: str, disk: Disk | None = None) -> DiskCalls:
    """Return system calls without faults on a machine; by default for the storage's disk."""
    known, shared = HostProcess(host=host, pid=0, start_ticks=0), cluster.shared
    return DiskCalls(disk or shared.disk, shared.world, known, shared.runs)


def pin_stored_block(cluster: Cluster) -> None:
    """Pin the chain of a random stored block, if there is one."""
    shared = cluster.shared
    stored = [path for path, _ in shared.disk.blocks()]
    if not stored:
        return
    path = shared.world.chance.choice(stored)
    key = key_of(path)
    assert key is not None
    name = pin_name("chain", path.split("/")[2], key.hex())
    PosixObjects(ROOT, fault_free_calls(cluster, "elsewhere")).create(name, b"")
    shared.janitor_checker.pin(key)
    shared.world.note("operator", f"pins the chain of block {key.hex()[:8]}")
