"""A bounded map of recent keys, for hints: a dropped entry costs time, never correctness."""

from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from dualpath.core.blocks import BlockKey

# ------------------------------------------------------------------------------------- key updates
# Keys of blocks that were added or removed since the last report.


class KeyUpdates:
    """Collects changed keys while a report is due; used by the index that holds the keys.

    A key that was added and removed, or removed and added, is reported once, by its current state.
    """

    def __init__(self) -> None:
        self._changed: dict[BlockKey, None] | None = None

    def report(self, present: Iterable[BlockKey], *, begin: bool) -> None:
        """Begin to collect changes, all ``present`` keys first; or end it."""
        self._changed = dict.fromkeys(present) if begin else None

    def note(self, key: BlockKey) -> None:
        """A block was added or removed."""
        if self._changed is not None:
            self._changed[key] = None

    def take(
        self, limit: int, present: Container[BlockKey]
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return up to ``limit`` changed keys: those that are ``present`` and those that aren't."""
        changed = self._changed
        if not changed:  # As in most calls, several a second.
            return [], []
        taken = [key for key, _ in zip(changed, range(limit), strict=False)]
        for key in taken:
            del changed[key]
        return [key for key in taken if key in present], [k for k in taken if k not in present]


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Holds the latest ``limit`` ≥ 1 keys, at most twice as many, each with its last value.

    Two generations: when the young one is full it becomes the old one, and the old one is dropped.
    So no entry is moved or counted per use.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __contains__(self, key: K) -> bool:
        """Whether a key is present."""
        return key in self._young or key in self._old

    def head(self, keys: Sequence[K], start: int = 0) -> int:
        """Return the length of the prefix of ``keys`` that is present, at least ``start``.

        The first ``start`` keys are not looked up.
        """
        young, old = self._young, self._old
        for position in range(start, len(keys)):
            key = keys[position]
            if key not in young and key not in old:
                return position
        return max(start, len(keys))

    def end(self, keys: Sequence[K]) -> int:
        """Return the number of ``keys`` up to the last one that is present; 0 if none is."""
        young, old = self._young, self._old
        for position in range(len(keys) - 1, -1, -1):
            key = keys[position]
            if key in young or key in old:
                return position + 1
        return 0

    def last(self, keys: Sequence[K]) -> V | None:
        """Return the value of the last of ``keys`` that is present; None if none is."""
        young, old = self._young, self._old
        for key in reversed(keys):
            if key in young:
                return young[key]
            if key in old:
                return old[key]
        return None

    def note(self, keys: Iterable[K], value: V) -> None:
        """Store ``value`` under all ``keys``."""
        self._young.update(dict.fromkeys(keys, value))
        if len(self._young) >= self._limit:
            self.age()

    def remove(self, key: K) -> None:
        """Remove a key."""
        self._young.pop(key, None)
        self._old.pop(key, None)

    def age(self) -> None:
        """Make the young generation the old one and drop the old one."""
        self._young, self._old = {}, self._young
