"""What a person does to the storage of a simulated cluster, undisturbed by its faults."""

from dualpath.core.cluster import HostProcess
from dualpath.laboratory.chaos.simulation.calls import DiskCalls
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.laboratory.chaos.simulation.disk import ROOT, Disk
from dualpath.storage.directory import key_of
from dualpath.storage.pins import pin_name
from dualpath.storage.posix_objects import PosixObjects


def calm_calls(cluster: Cluster, host: str, disk: Disk | None = None) -> DiskCalls:
    """Return system calls on a machine to which nothing happens; on the storage's disk, usually."""
    known, shared = HostProcess(host=host, pid=0, start_ticks=0), cluster.shared
    return DiskCalls(disk or shared.disk, shared.world, known, shared.runs)


def pin_some(cluster: Cluster) -> None:
    """Pin the chain of some block that is stored, if there is one."""
    shared = cluster.shared
    stored = [path for path, _ in shared.disk.blocks()]
    if not stored:
        return
    path = shared.world.chance.choice(stored)
    key = key_of(path)
    assert key is not None
    name = pin_name("chain", path.split("/")[2], key.hex())
    PosixObjects(ROOT, calm_calls(cluster, "elsewhere")).create(name, b"")
    shared.watch.pin(key)
    shared.world.note("operator", f"pins the chain of block {key.hex()[:8]}")
