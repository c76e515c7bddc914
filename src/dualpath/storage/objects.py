"""A storage as a tree of named objects: the janitor's view of it, of blocks and its own files.

``create`` is atomic: if two processes create the same name at the same time, one succeeds.
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
    """Objects under names such as ``janitor/lease/00000001``; thread-safe.

    Names consist of letters, digits and ``/-._``.  All methods raise ``StorageError`` if the
    storage does not answer or refuses.  Writes are atomic.
    """

    def create(self, name: str, content: bytes) -> bool:
        """Store an object unless the name exists; return whether it was stored."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Store an object, replacing any object of this name."""
        ...

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Return an object's first ``max_bytes``, or all of it; None if there is no object."""
        ...

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects, in order where possible; return how many existed.

        S3 does not report whether an object existed: there, all names count.
        """
        ...

    def folders(self, prefix: str) -> list[str]:
        """Return the sorted names of direct subfolders of a folder (``""`` or ``…/``)."""
        ...

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects below a folder (``""`` or ``…/``), at any depth.

        Objects created or removed during the iteration may or may not be included.
        """
        ...
