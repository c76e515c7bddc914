"""Bugs to plant in what storage in files is made of, and in its janitor."""

import os

import msgspec

from dualpath.core.blocks import BlockKey, BlockOrigin
from dualpath.core.errors import StorageError
from dualpath.laboratory.chaos.simulation.plant import Plant, instead
from dualpath.policy.chain_index import ChainIndex, Rows
from dualpath.policy.eviction import NO_PINS, Pins, victims
from dualpath.policy.quotas import StorageLimits
from dualpath.storage import janitor
from dualpath.storage.block_file import PlainArrival
from dualpath.storage.directory import NamespaceDirectory, refused
from dualpath.storage.janitor import take_news
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
        create_file(path, self._form.encoded(key, self._order.of(source), origin), self._calls)
    except OSError as error:
        raise refused("write", path, source.nbytes, error, self._calls) from error
    return True


def _heard_anyway(
    tree: ObjectTree, index: ChainIndex, taken: dict[str, int]
) -> tuple[set[int], int]:
    """``janitor.take_news`` that does not come back to what it could not read."""
    try:
        return take_news(tree, index, taken)
    except StorageError:
        taken.update({writer: number for writer, number, _ in segments(tree)})
        raise


def _unprotected(index: ChainIndex, limits: StorageLimits, pins: Pins, now_s: float) -> Rows:
    return victims(index, msgspec.structs.replace(limits, protect_s=0.0), pins, now_s)


#: By name, in the order of the reference.
STORAGE_PLANTS: dict[str, Plant] = {
    "checksum-ignored": Plant(
        "a stored block's checksum is not compared",
        instead(PlainArrival, "defect", lambda self, key, header: None),
    ),
    "written-in-place": Plant(
        "a block has its name before it is whole",
        instead(PosixStorage, "_write_one", _written_in_place),
    ),
    "stale-stays": Plant(
        "an engine that starts leaves what ended ones have half-written",
        instead(NamespaceDirectory, "_remove_stale", lambda self: None),
    ),
    "unlink-forgotten": Plant(
        "a temporary name stays when its block has its own",
        instead(NamespaceDirectory, "remove_temporary", lambda self, temporary: None),
    ),
    "lease-unchecked": Plant(
        "a janitor stays one, though another has taken its place",
        instead(Lease, "_is_ours", lambda self, newest: True),
    ),
    "janitor-dead": Plant(
        "nobody takes the place of a janitor that is gone",
        instead(Lease, "_is_stale", lambda self, term, content, now_s: False),
    ),
    "pins-unheard": Plant(
        "what is pinned is removed as everything is",
        instead(janitor, "read_pins", lambda tree: NO_PINS),
    ),
    "unprotected": Plant(
        "what was used a moment ago is removed as everything is",
        instead(janitor, "victims", _unprotected),
    ),
    "news-forgotten": Plant(
        "news that cannot be read at once are never taken in",
        instead(janitor, "take_news", _heard_anyway),
    ),
}
