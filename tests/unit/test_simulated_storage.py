"""Storage of simulated engines: the real file storage on a disk where every call may fail."""

import errno
import os
from collections.abc import Callable

import pytest
from tests.fault_stories import Stories, finds

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.cluster import HostProcess
from dualpath.core.errors import StorageError
from dualpath.policy.events import Assignment
from dualpath.router.scheduler.attempt import EngineAttempt
from dualpath.storage.chain_index import ChainIndex
from dualpath.storage.objects import PosixObjects
from dualpath.storage.posix import PosixStorage
from dualpath_lab.faults.simulation.disk import (
    ROOT,
    Disk,
    DiskCalls,
    File,
    SimCalls,
    StorageFaults,
)
from dualpath_lab.faults.simulation.janitor_checks import JanitorChecker
from dualpath_lab.faults.simulation.threads import SimThreads
from dualpath_lab.faults.simulation.world import Process, World

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=32)
NAMESPACE = StoreNamespace("model", "uint8", "raw", GEOMETRY)
KEYS = block_keys(range(16), 4)
PAYLOAD = memoryview(bytes(range(GEOMETRY.full_block_bytes)))


class Machine:
    """A process with storage on a disk; its work runs on a simulated thread."""

    def __init__(self, seed: int = 0, *, links: bool = True) -> None:
        self.world = World(seed)
        self.disk = Disk(links=links)
        self.faults = StorageFaults()
        self.process = Process(self.world, "process")
        self.threads = SimThreads(self.process)
        known = HostProcess(host="host", pid=1, start_ticks=1)
        self.calls = SimCalls(
            self.disk, self.threads, self.faults, known, lambda pid: self.process.alive
        )

    def open(self) -> PosixStorage:
        return PosixStorage(ROOT, NAMESPACE, direct_io=False, calls=self.calls)

    def writes(self) -> None:
        storage = self.open()
        for key in KEYS:
            storage.write([key], [PAYLOAD])

    def next_process(self) -> PosixStorage:
        known = HostProcess(host="host", pid=2, start_ticks=2)
        calls = DiskCalls(self.disk, self.world, known, lambda pid: pid == 2)
        return PosixStorage(ROOT, NAMESPACE, direct_io=False, calls=calls)


def test_a_full_storage_leaves_hits_that_only_dram_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found, some are evicted before they are used, and every token is right."""
    hits: list[int] = []
    take = EngineAttempt._assigned_to

    def assigned(self: EngineAttempt, assignment: Assignment) -> None:
        hits.append(assignment.unstored_tokens)
        take(self, assignment)

    monkeypatch.setattr(EngineAttempt, "_assigned_to", assigned)
    runs = Stories(range(24), "full storage", least=8)
    assert runs.until(lambda: sum(tokens > 0 for tokens in hits) >= 10)


@pytest.mark.parametrize("links", [True, False])
def test_a_process_that_is_killed_at_any_change_leaves_complete_blocks(links: bool) -> None:
    left_half_written = 0
    for changes in range(60):
        machine = Machine(links=links)
        machine.calls._step = _kills_after(machine, changes)  # type: ignore[method-assign]
        machine.threads.start("writes", machine.writes)
        machine.world.run(lambda: False, 1.0)
        left_half_written += sum(1 for _ in machine.disk.half_written())
        storage = machine.next_process()
        assert not list(machine.disk.half_written())
        for key in KEYS:
            into = memoryview(bytearray(GEOMETRY.full_block_bytes))
            stored, outcome = storage.is_stored(key), storage.read(key, into)
            assert outcome.is_good is stored
            assert not stored or into == PAYLOAD
        machine.world.end()
    assert left_half_written > 10


def _kills_after(machine: Machine, before: int) -> Callable[..., None]:
    left = [before]
    step = machine.calls._step

    def kills(*, changes: bool = False) -> None:
        left[0] -= changes
        if left[0] < 0 and machine.process.alive:
            machine.process.kill()
        step(changes=changes)

    return kills


def test_a_partial_write_to_a_full_disk_never_becomes_a_block() -> None:
    machine = Machine()
    refused: list[str] = []

    def writes() -> None:
        storage = machine.open()
        machine.faults.full = True
        with pytest.raises(StorageError, match="No space left"):
            storage.write(KEYS[:1], [PAYLOAD])
        refused.append("first")
        assert not storage.is_stored(KEYS[0])
        machine.faults.full = False
        assert storage.write(KEYS[:1], [PAYLOAD]).new == 1

    machine.threads.start("writes", writes)
    machine.world.run(lambda: False, 1.0)
    assert refused == ["first"]
    assert not machine.world.problems
    assert len(list(machine.disk.blocks())) == 1
    assert not list(machine.disk.half_written())


def test_the_disk_raises_the_errors_of_a_kernel() -> None:
    machine = Machine(links=False)
    calls = DiskCalls(machine.disk, machine.world, HostProcess(), lambda pid: False)
    calls.makedirs(f"{ROOT}/folder")
    calls.close(calls.open(f"{ROOT}/file", os.O_CREAT | os.O_EXCL))
    for error, refused in (
        (FileExistsError, lambda: calls.open(f"{ROOT}/file", os.O_CREAT | os.O_EXCL)),
        (FileExistsError, lambda: calls.mkdir(f"{ROOT}/folder")),
        (FileNotFoundError, lambda: calls.link(f"{ROOT}/file", f"{ROOT}/none/file")),
        (FileExistsError, lambda: calls.link(f"{ROOT}/file", f"{ROOT}/folder")),
        (PermissionError, lambda: calls.link(f"{ROOT}/file", f"{ROOT}/other")),
        (FileNotFoundError, lambda: calls.stat(f"{ROOT}/none")),
        (NotADirectoryError, lambda: calls.stat(f"{ROOT}/file/below")),
        (IsADirectoryError, lambda: calls.unlink(f"{ROOT}/folder")),
        (ProcessLookupError, lambda: calls.kill(5, 0)),
    ):
        with pytest.raises(error):
            refused()
    calls.close(calls.open(f"{ROOT}/folder/file", os.O_CREAT | os.O_EXCL))
    with pytest.raises(OSError) as full:  # noqa: PT011 - errno is checked below
        calls.rmdir(f"{ROOT}/folder")
    assert full.value.errno == errno.ENOTEMPTY


def test_objects_on_the_disk_behave_as_in_any_tree() -> None:
    machine = Machine()
    tree = PosixObjects(
        ROOT, DiskCalls(machine.disk, machine.world, HostProcess(), lambda pid: False)
    )
    assert tree.create("janitor/lease/1", b"a")
    assert not tree.create("janitor/lease/1", b"b")
    tree.replace("janitor/status", b"status")
    assert {info.name for info in tree.objects("janitor/")} == {"janitor/lease/1", "janitor/status"}
    assert tree.get("janitor/status", 3) == b"sta"
    assert tree.folders("janitor/") == ["lease", "tmp"]
    assert tree.remove(["janitor/lease/1", "janitor/lease/2"]) == 1


def test_a_janitor_that_evicts_a_block_it_knows_to_be_used_is_a_problem() -> None:
    world = World(0)
    checker = JanitorChecker(world, Disk(links=True), protect_s=1.0)
    checker._parents[KEYS[1]] = KEYS[0]
    checker._used(KEYS[1], (world.now_s, world.now_s))
    checker.on_evicted(KEYS[0], "janitor", events_s=world.now_s, pins_s=0.0)
    assert not world.problems, "the use was recorded after the janitor read the journal"
    checker.on_evicted(KEYS[0], "janitor", events_s=world.now_s + 0.1, pins_s=0.0)
    assert len(world.problems) == 1


def test_blocks_that_are_recorded_of_a_chain_after_it_was_pinned_are_pinned_as_well() -> None:
    """A janitor reads of them too, and rightly leaves the whole chain above the quota."""
    disk = Disk(links=True)
    checker = JanitorChecker(World(0), disk, protect_s=1.0)
    checker.pin(KEYS[1])
    assert checker.pinned == {KEYS[1]}
    checker._parents[KEYS[1]] = KEYS[0]
    assert checker.pinned == {KEYS[0], KEYS[1]}
    assert checker.possibly_pinned == set(), "nothing is stored"


@pytest.mark.parametrize("writer_dies", [False, True])
def test_a_temporary_file_is_removed_by_another_process_only_after_its_writer_has_exited(
    writer_dies: bool,
) -> None:
    machine = Machine()
    path = f"{ROOT}/tmp/of-the-machine"
    known = HostProcess(host="host", pid=2, start_ticks=2)
    removes = SimCalls(
        *(machine.disk, SimThreads(Process(machine.world, "other")), machine.faults, known),
        lambda pid: True,
    )

    def writes() -> None:
        machine.calls.makedirs(f"{ROOT}/tmp")
        machine.calls.close(machine.calls.open(path, os.O_CREAT | os.O_EXCL))

    machine.threads.start("writes", writes)
    machine.world.run(lambda: False, 1.0)
    if writer_dies:
        machine.process.kill()
    removes._threads.start("removes", lambda: removes.unlink(path))
    machine.world.run(lambda: False, 1.0)
    assert path not in machine.disk.files
    assert bool(machine.world.problems) is not writer_dies


def test_blocks_that_the_journal_records_last_as_written_must_be_in_the_janitors_index() -> None:
    """Those that are not stored, or whose removal was recorded after their write, need not be."""
    world, disk, index = World(0), Disk(links=True), ChainIndex()
    checker = JanitorChecker(world, disk, protect_s=1.0)
    stored, removed, evicted = block_keys(range(12), 4)
    disk.folders |= {ROOT: {}, f"{ROOT}/n": {}}
    for key in (stored, removed):
        disk.create(f"{ROOT}/n/{key.hex()}.kv", File("writer", 0.0))
    checker._recorded |= {stored, evicted}
    assert checker.unknown_to(index) == [stored]
    index.add("n", stored, b"", "", 1, 0.0)
    assert checker.unknown_to(index) == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("stale-stays", "kill an engine"),
        ("unlink-forgotten", "slow storage"),
        ("janitor-dead", "kill an engine"),
        ("unprotected", "slow storage"),
        ("pins-ignored", "slow storage"),
        ("lease-unchecked", "stop an engine"),
        ("events-forgotten", "failing storage"),
        ("host-name-only", "kill an engine"),
    ],
)
def test_planted_bugs_of_the_storage_are_found(name: str, fault: str) -> None:
    assert finds(name, range(3, 120, 6), fault)


def test_an_engine_that_cannot_open_its_storage_is_started_again() -> None:
    kinds = "failing storage", "full storage", "kill an engine", "kill a rank"
    runs = Stories((*range(2, 120, 5), *range(0, 60, 4)), *kinds)
    assert runs.more_than(3, "cannot start: storage directory")
    assert runs.more_than(0, "cannot start: dram_dir")
