"""Planted bugs of the file storage and its janitor."""

import os

import msgspec

from dualpath.core.blocks import BlockKey, BlockOrigin
from dualpath.core.errors import StorageError
from dualpath.laboratory.chaos.simulation.plant import PlantedBug, replaced
from dualpath.policy.chain_index import ChainIndex, Rows
from dualpath.policy.eviction import NO_PINS, Pins, victims
from dualpath.policy.quotas import StorageLimits
from dualpath.storage import janitor
from dualpath.storage.block_file import PlainVerifier
from dualpath.storage.directory import NamespaceDirectory, refused
from dualpath.storage.janitor import apply_events
from dualpath.storage.journal import segments
from dualpath.storage.lease import Lease
from dualpath.storage.objects import ObjectTree
from dualpath.storage.posix import PosixStorage
from dualpath.storage.system_calls import create_file


def _written_in_place(
    self: PosixStorage, key: BlockKey, source: memoryview, origin: BlockOrigin
) -> bool:
    """``PosixStorage._write_one`` without a temporary name."""
    if self.is_stored(key):
        return False
    path = str(self.block_path(key))
    try:
        self._calls.makedirs(os.path.dirname(path), exist_ok=True)
        create_file(path, self._codec.encoded(key, self._order.of(source), origin), self._calls)
    except OSError as error:
        raise refused("write", path, source.nbytes, error, self._calls) from error
    return True


def _heard_anyway(
    tree: ObjectTree, index: ChainIndex, taken: dict[str, int]
) -> tuple[set[int], int]:
    """``janitor.apply_events`` that skips events which it could not read at first."""
    try:
        return apply_events(tree, index, taken)
    except StorageError:
        taken.update({writer: number for writer, number, _ in segments(tree)})
        raise


def _unprotected(index: ChainIndex, limits: StorageLimits, pins: Pins, now_s: float) -> Rows:
    return victims(index, msgspec.structs.replace(limits, protect_s=0.0), pins, now_s)


#: By name, in the order of docs/reference/simulated-faults.md.
STORAGE_BUGS: dict[str, PlantedBug] = {
    "checksum-ignored": PlantedBug(
        "a stored block's checksum is not verified",
        replaced(PlainVerifier, "defect", lambda self, key, header: None),
    ),
    "written-in-place": PlantedBug(
        "a block gets its name before it is complete",
        replaced(PosixStorage, "_write_one", _written_in_place),
    ),
    "stale-stays": PlantedBug(
        "a starting engine does not remove temporary files of exited processes",
        replaced(NamespaceDirectory, "_remove_stale", lambda self: None),
    ),
    "unlink-forgotten": PlantedBug(
        "a temporary name is not removed after its block got its name",
        replaced(NamespaceDirectory, "remove_temporary", lambda self, temporary: None),
    ),
    "lease-unchecked": PlantedBug(
        "a janitor continues after another has acquired its lease",
        replaced(Lease, "_is_ours", lambda self, newest: True),
    ),
    "janitor-dead": PlantedBug(
        "no engine takes over from a janitor that has exited",
        replaced(Lease, "_is_stale", lambda self, term, content, now_s: False),
    ),
    "pins-ignored": PlantedBug(
        "pinned blocks are evicted like others",
        replaced(janitor, "read_pins", lambda tree: NO_PINS),
    ),
    "unprotected": PlantedBug(
        "recently used blocks are evicted like others",
        replaced(janitor, "victims", _unprotected),
    ),
    "events-forgotten": PlantedBug(
        "events that could not be read at first are never applied",
        replaced(janitor, "apply_events", _heard_anyway),
    ),
}
