"""Keys of blocks that were added or removed since the last report."""

from collections.abc import Container, Iterable

from dualpath.core.blocks import BlockKey


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
        changed = self._changed or {}
        taken = [key for key, _ in zip(changed, range(limit), strict=False)]
        for key in taken:
            del changed[key]
        return [key for key in taken if key in present], [k for k in taken if k not in present]
