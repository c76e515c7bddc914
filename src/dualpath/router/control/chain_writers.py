"""Which decode engines write, or wrote, the blocks of a prompt."""

from collections.abc import Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.recent import Recent

#: Blocks whose DEs are remembered, to twice as many, at some 130 bytes each.
_MOST_BLOCKS = 1 << 17
#: DEs remembered of one block: those of the latest requests with this very prompt.
MOST_WRITERS = 8


class ChainWriters:
    """Remembers of each block of a prompt which DEs were given it to write, the latest first.

    An agent's next turn extends the last block of its prompt, so that blocks that a DE generates
    need no keys of their own here.  Several DEs have the same last block where one prompt was asked
    for several times: each may be writing another continuation of it.
    """

    def __init__(self) -> None:
        self._writers: Recent[BlockKey, tuple[str, ...]] = Recent(_MOST_BLOCKS)

    def note(self, keys: Sequence[BlockKey], engine_id: str) -> None:
        """``engine_id`` writes these blocks, or what it generates behind the last of them."""
        again = {key: self._writers.last([key]) for key in keys if key in self._writers}
        self._writers.note(keys, (engine_id,))
        for key, writers in again.items():
            others = tuple(name for name in writers or () if name != engine_id)
            if others:
                self._writers.note([key], (engine_id, *others)[:MOST_WRITERS])

    def of(self, keys: Sequence[BlockKey]) -> tuple[str, ...]:
        """Return the DEs of the last known block of a chain, the latest first."""
        return self._writers.last(keys) or ()
