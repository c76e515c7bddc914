"""Invariants of the storage of a simulated cluster that is idle, and a day later."""

from collections.abc import Iterator

from dualpath.core.blocks import BlockKey
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.laboratory.chaos.simulation.disk import NODE_DRAM_ROOT, ROOT, Disk
from dualpath.laboratory.chaos.simulation.operator import fault_free_calls
from dualpath.policy.quotas import StorageLimits
from dualpath.storage.block_file import defect_of_file
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.directory import key_of
from dualpath.storage.half_written import STALE_S, remove_stale_temporaries
from dualpath.storage.janitor import Janitor
from dualpath.storage.lease import LEASE_S
from dualpath.storage.posix import PosixStorage
from dualpath.storage.posix_objects import PosixObjects
from dualpath.storage.protection import block_codec
from dualpath.storage.sections import FileOrder

#: Threads of an engine that may add a block to the shared DRAM: two that read, one that writes.
_ADDERS = 3


def storage_problems(cluster: Cluster, right: dict[BlockKey, bytes]) -> Iterator[str]:
    """Yield problems of the storage of an idle cluster; ``right`` has the payload of each block."""
    for disk in (cluster.shared.disk, *cluster.shared.node_dram.values()):
        yield from _wrong_blocks(cluster, disk, right)
    yield from _shared_beyond_bounds(cluster)
    yield from _after_next_starts(cluster)
    yield from _a_day_later(cluster)


def _wrong_blocks(cluster: Cluster, disk: Disk, right: dict[BlockKey, bytes]) -> Iterator[str]:
    """Every block is complete and right, unless a fault has corrupted it."""
    for namespace in cluster.shared.namespaces:
        form, order = block_codec(namespace), FileOrder(namespace.geometry)
        for path, file in disk.blocks():
            key, content = key_of(path), bytes(file.content)
            assert key is not None
            if len(content) != HEADER_BYTES + namespace.geometry.full_block_bytes:
                yield f"stored block {key.hex()[:8]} is half-written: {len(content)} bytes"
            elif reason := defect_of_file(form, key, content):
                if not file.corrupted:
                    yield f"stored block {key.hex()[:8]} is bad: {reason}"
            elif b"".join(order.of(memoryview(right[key])).buffers) != content[HEADER_BYTES:]:
                yield f"stored block {key.hex()[:8]} is wrong"


def _shared_beyond_bounds(cluster: Cluster) -> Iterator[str]:
    """Shared DRAM exceeds its size by at most one block per thread that adds blocks."""
    bound = cluster.settings.node_dram_blocks + _ADDERS * len(cluster.engines)
    for host, disk in cluster.shared.node_dram.items():
        if (blocks := sum(1 for _ in disk.blocks())) > bound:
            yield f"engines of {host} share {blocks} blocks of {cluster.settings.node_dram_blocks}"


def _after_next_starts(cluster: Cluster) -> Iterator[str]:
    """A starting engine removes temporary files of processes of its machine that have exited."""
    shared = cluster.shared
    for host in sorted({engine.host for engine in cluster.engines.values()}):
        for root, disk in ((ROOT, shared.disk), (NODE_DRAM_ROOT, shared.node_dram[host])):
            calls = fault_free_calls(cluster, host, disk)
            for namespace in shared.namespaces:
                PosixStorage(root, namespace, direct_io=False, calls=calls)
            for path, _ in disk.half_written():
                writer, _, _ = path.rpartition("/")[2].rpartition("-")
                pid = writer.rpartition("-")[2]
                if writer.startswith(f"{host}-") and not shared.runs(int(pid)):
                    yield f"{path} was not removed although its writer has exited"


def _a_day_later(cluster: Cluster) -> Iterator[str]:
    """A janitor removes temporary files, knows every block, and evicts all but pinned blocks."""
    disk, now_s = cluster.shared.disk, cluster.world.now_s + STALE_S + LEASE_S
    tree = PosixObjects(ROOT, fault_free_calls(cluster, "elsewhere"))
    remove_stale_temporaries(tree, now_s)
    yield from (f"{path} is never removed" for path, _ in disk.half_written())
    if not cluster.settings.quota_blocks:
        return
    pinned = cluster.shared.janitor_checker.pinned
    pinned_paths = {path for path, _ in disk.blocks() if key_of(path) in pinned}
    janitor = _janitor_of_the_next_day(tree, now_s)
    if janitor.index is None or janitor.survey is None:
        yield "no engine replaces a janitor that has exited"
        return
    janitor.survey.run_to_end()
    if janitor.index.blocks != (blocks := sum(1 for _ in disk.blocks())):
        yield f"the janitor knows {janitor.index.blocks} blocks of {blocks}"
    janitor.step()
    left = {path for path, _ in disk.blocks()}
    yield from (f"{path} was evicted although it is pinned" for path in pinned_paths - left)
    if not pinned:
        yield from (f"{path} was not evicted" for path in left)


def _janitor_of_the_next_day(tree: PosixObjects, now_s: float) -> Janitor:
    """Return a janitor that has just acquired the lease, with a quota of one byte."""
    steady_s = now_s
    limits = StorageLimits(quota_bytes=1)
    janitor = Janitor(tree, "next-day", limits, lambda: now_s, lambda: steady_s)
    janitor.lease.acquire(steady_s)
    steady_s += 2 * LEASE_S
    janitor.step()
    return janitor
