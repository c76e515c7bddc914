"""A storage as names and contents, whatever lies in it: what its janitor needs beside blocks.

``create`` is the one step that two can take at the same moment and one alone succeeds.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec


class ObjectInfo(msgspec.Struct, frozen=True):
    """One object: its name below the root, its size, and when it was written (Unix time)."""

    name: str
    bytes: int
    written_s: float


class ObjectTree(Protocol):
    """Objects under names such as ``janitor/lease/00000001``; for use by several threads.

    Names consist of letters, digits and ``/-._``.  All methods raise ``StorageError`` if the
    storage does not answer or refuses.  An object appears whole or not at all.
    """

    def create(self, name: str, content: bytes) -> bool:
        """Store an object unless there is one of this name; return whether it is new."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Store an object in the place of what has the name."""
        ...

    def get(self, name: str, most_bytes: int | None = None) -> bytes | None:
        """Return an object's first bytes, or all; None without one."""
        ...

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects, in order where that is possible; return how many there were.

        Where the storage cannot say (S3), all count.
        """
        ...

    def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below a folder (``""`` or ``…/``), sorted."""
        ...

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects below a folder (``""`` or ``…/``), at any depth.

        What comes or goes meanwhile may be missing or not.
        """
        ...
