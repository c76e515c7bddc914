"""A run of stored blocks, read one after the other as one of an engine's reader threads does."""

from collections.abc import Sequence
from typing import NamedTuple

from dualpath.core.blocks import BlockKey
from dualpath.storage.contract import BlockStorage


class RunOutcome(NamedTuple):
    """How many leading blocks are good, the bytes read, and the reason of the first bad one."""

    good_blocks: int
    bytes_read: int
    reason: str | None


def read_run(
    storage: BlockStorage, keys: Sequence[BlockKey], destinations: Sequence[memoryview]
) -> RunOutcome:
    """Read blocks until one is bad."""
    bytes_read = 0
    for position, (key, destination) in enumerate(zip(keys, destinations, strict=True)):
        outcome = storage.read(key, destination)
        bytes_read += outcome.bytes_read
        if not outcome.is_good:
            return RunOutcome(position, bytes_read, outcome.reason)
    return RunOutcome(len(keys), bytes_read, None)


def stored_head(storage: BlockStorage, keys: Sequence[BlockKey]) -> int:
    """Return how many leading blocks are stored, looked up one by one."""
    return next((i for i, key in enumerate(keys) if not storage.is_stored(key)), len(keys))
