"""Which blocks have come or gone since somebody was last told, by their keys."""

from collections.abc import Container, Iterable

from dualpath.core.blocks import BlockKey


class KeyNews:
    """Keys are noted only while somebody listens; owned by whoever knows which are here.

    A block that has come and gone, or gone and come again, is told once, as it is by then.
    """

    def __init__(self) -> None:
        self._changed: dict[BlockKey, None] | None = None

    def tell(self, here: Iterable[BlockKey], *, begin: bool) -> None:
        """Somebody listens from now on, to whom all that are ``here`` are news; or nobody does."""
        self._changed = dict.fromkeys(here) if begin else None

    def note(self, key: BlockKey) -> None:
        """A block has come or gone."""
        if self._changed is not None:
            self._changed[key] = None

    def take(self, limit: int, here: Container[BlockKey]) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return up to ``limit`` keys, of those that are ``here`` now and of those that are not."""
        changed = self._changed or {}
        told = [key for key, _ in zip(changed, range(limit), strict=False)]
        for key in told:
            del changed[key]
        return [key for key in told if key in here], [key for key in told if key not in here]
