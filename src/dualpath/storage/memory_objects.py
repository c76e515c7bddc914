"""Objects in a dict, for tests and simulations."""

import threading
from collections.abc import Callable, Iterator, Sequence

from dualpath.storage.objects import ObjectInfo


class MemoryObjects:
    """See ``dualpath.storage.objects.ObjectTree``; ``now_s`` is the clock of ``written_s``."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def create(self, name: str, content: bytes) -> bool:
        """See the contract."""
        with self._lock:
            if name in self._objects:
                return False
            self._objects[name] = (bytes(content), self._now_s())
            return True

    def replace(self, name: str, content: bytes) -> None:
        """See the contract."""
        with self._lock:
            self._objects[name] = (bytes(content), self._now_s())

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """See the contract."""
        with self._lock:
            found = self._objects.get(name)
        return None if found is None else found[0][:max_bytes]

    def remove(self, names: Sequence[str]) -> int:
        """See the contract."""
        with self._lock:
            return sum(self._objects.pop(name, None) is not None for name in names)

    def folders(self, prefix: str) -> list[str]:
        """See the contract."""
        with self._lock:
            below = [name[len(prefix) :] for name in self._objects if name.startswith(prefix)]
        return sorted({head for head, slash, _ in (n.partition("/") for n in below) if slash})

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """See the contract."""
        with self._lock:
            found = [
                ObjectInfo(name, len(content), written_s)
                for name, (content, written_s) in self._objects.items()
                if name.startswith(prefix)
            ]
        yield from found
