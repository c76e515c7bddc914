"""What must be true of a storage when a simulated cluster has come to rest, and a day later."""

from collections.abc import Iterator

from dualpath.core.blocks import BlockKey
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.laboratory.chaos.simulation.disk import NODE_DRAM_ROOT, ROOT, Disk
from dualpath.laboratory.chaos.simulation.operator import calm_calls
from dualpath.policy.quotas import StorageLimits
from dualpath.storage.block_file import defect_of_file
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.directory import key_of
from dualpath.storage.half_written import STALE_S, remove_half_written
from dualpath.storage.janitor import Janitor
from dualpath.storage.lease import LEASE_S
from dualpath.storage.posix import PosixStorage
from dualpath.storage.posix_objects import PosixObjects
from dualpath.storage.protection import block_form
from dualpath.storage.sections import FileOrder

#: Threads of an engine that may add a block to what its machine shares: two read, one writes.
_ADDERS = 3


def storage_problems(cluster: Cluster, right: dict[BlockKey, bytes]) -> Iterator[str]:
    """Yield what is wrong with the storage of a cluster at rest; ``right`` has every payload."""
    for disk in (cluster.shared.disk, *cluster.shared.node_dram.values()):
        yield from _wrong_blocks(cluster, disk, right)
    yield from _shared_beyond_bounds(cluster)
    yield from _after_next_starts(cluster)
    yield from _a_day_later(cluster)


def _wrong_blocks(cluster: Cluster, disk: Disk, right: dict[BlockKey, bytes]) -> Iterator[str]:
    """Every block is whole and right, unless it has rotten."""
    for namespace in cluster.shared.namespaces:
        form, order = block_form(namespace), FileOrder(namespace.geometry)
        for path, file in disk.blocks():
            key, content = key_of(path), bytes(file.content)
            assert key is not None
            if len(content) != HEADER_BYTES + namespace.geometry.full_block_bytes:
                yield f"stored block {key.hex()[:8]} is half-written: {len(content)} bytes"
            elif reason := defect_of_file(form, key, content):
                if not file.rotten:
                    yield f"stored block {key.hex()[:8]} is bad: {reason}"
            elif b"".join(order.of(memoryview(right[key])).buffers) != content[HEADER_BYTES:]:
                yield f"stored block {key.hex()[:8]} is wrong"


def _shared_beyond_bounds(cluster: Cluster) -> Iterator[str]:
    """What engines share is exceeded by no more than all of their threads bring at a moment."""
    bound = cluster.settings.node_dram_blocks + _ADDERS * len(cluster.engines)
    for host, disk in cluster.shared.node_dram.items():
        if (blocks := sum(1 for _ in disk.blocks())) > bound:
            yield f"engines of {host} share {blocks} blocks of {cluster.settings.node_dram_blocks}"


def _after_next_starts(cluster: Cluster) -> Iterator[str]:
    """An engine that starts removes what ended ones of its machine have left."""
    shared = cluster.shared
    for host in sorted({engine.host for engine in cluster.engines.values()}):
        for root, disk in ((ROOT, shared.disk), (NODE_DRAM_ROOT, shared.node_dram[host])):
            calls = calm_calls(cluster, host, disk)
            for namespace in shared.namespaces:
                PosixStorage(root, namespace, direct_io=False, calls=calls)
            for path, _ in disk.half_written():
                writer, _, _ = path.rpartition("/")[2].rpartition("-")
                pid = writer.rpartition("-")[2]
                if writer.startswith(f"{host}-") and not shared.runs(int(pid)):
                    yield f"{path} is left, though its writer has ended"


def _a_day_later(cluster: Cluster) -> Iterator[str]:
    """A janitor leaves nothing half-written, knows every block, and keeps what is pinned alone."""
    disk, now_s = cluster.shared.disk, cluster.world.now_s + STALE_S + LEASE_S
    tree = PosixObjects(ROOT, calm_calls(cluster, "elsewhere"))
    remove_half_written(tree, now_s)
    yield from (f"{path} is left for good" for path, _ in disk.half_written())
    if not cluster.settings.quota_blocks:
        return
    pinned = cluster.shared.watch.pinned
    stay = {path for path, _ in disk.blocks() if key_of(path) in pinned}
    janitor = _janitor_of_the_next_day(tree, now_s)
    if janitor.index is None or janitor.survey is None:
        yield "nobody takes the place of a janitor that is gone"
        return
    janitor.survey.whole()
    if janitor.index.blocks != (blocks := sum(1 for _ in disk.blocks())):
        yield f"the janitor knows {janitor.index.blocks} blocks of {blocks}"
    janitor.step()
    left = {path for path, _ in disk.blocks()}
    yield from (f"{path} is gone, which is pinned" for path in stay - left)
    if not pinned:
        yield from (f"{path} is left, which nobody needs" for path in left)


def _janitor_of_the_next_day(tree: PosixObjects, now_s: float) -> Janitor:
    """Return one that has just become it, and is to leave nothing."""
    steady_s = now_s
    limits = StorageLimits(quota_bytes=1)
    janitor = Janitor(tree, "next-day", limits, lambda: now_s, lambda: steady_s)
    janitor.lease.hold(steady_s)
    steady_s += 2 * LEASE_S
    janitor.step()
    return janitor
