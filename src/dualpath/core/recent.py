"""A bounded memory of what was said last, for hints: what is lost costs time, never correctness."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Remembers the latest ``limit`` ≥ 1 keys, to twice as many, each with the last value noted.

    Two generations: when the young one is full it becomes the old one, and the old one is gone.  So
    nothing is moved or counted per use.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __contains__(self, key: K) -> bool:
        """Whether a key is remembered."""
        return key in self._young or key in self._old

    def get(self, key: K) -> V | None:
        """Return what was noted last of a key; None if nothing is remembered."""
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def note(self, keys: Iterable[K], value: V) -> None:
        """Remember ``value`` of all ``keys``."""
        self._young.update(dict.fromkeys(keys, value))
        if len(self._young) >= self._limit:
            self.age()

    def forget(self, key: K) -> None:
        """Remember nothing of a key."""
        self._young.pop(key, None)
        self._old.pop(key, None)

    def age(self) -> None:
        """Let everything be one generation older; what was old is forgotten."""
        self._young, self._old = {}, self._young
