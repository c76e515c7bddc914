"""Bugs that can be planted, to see that the simulation finds them.

Each takes back one thing that keeps KV right or the cluster alive.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

from dualpath.core.errors import ConfigError
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.slots import SlotPool
from dualpath.storage import block_file

Plant = Callable[[], AbstractContextManager[object]]


def _checksum_ignored() -> AbstractContextManager[object]:
    return mock.patch.object(block_file, "defect", return_value=None)


def _reads_without_pin() -> AbstractContextManager[object]:
    """The reader of storage does not pin the slot it reads into."""
    return mock.patch.multiple(
        BlockBuffer, pin=lambda self, slots: None, unpin=lambda self, slots: None
    )


def _no_quarantine() -> AbstractContextManager[object]:
    """Slots that a lost engine may still write to are free at once."""
    return mock.patch.object(SlotPool, "quarantine", SlotPool.release)


#: By name: what was taken back, and how.
PLANTS: dict[str, tuple[str, Plant]] = {
    "checksum-ignored": ("a stored block's checksum is not compared", _checksum_ignored),
    "no-pins": ("nobody pins slots while reading or writing them", _reads_without_pin),
    "no-quarantine": ("slots of a lost writer are free at once", _no_quarantine),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for a while, none for an empty name; raises ``ConfigError`` for an unknown."""
    if not name:
        yield
        return
    if name not in PLANTS:
        raise ConfigError(f"{{plant}} is {name!r}; choose one of {', '.join(PLANTS)}")
    with PLANTS[name][1]():
        yield
