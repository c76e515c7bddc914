"""Where chains of blocks end in storage, and which decode engines write them.

A DE reports the chain of a request once the request is over and all that it has written is stored
(``core.control.StoredChain``).  The agent's next turn goes on behind it, so most turns need no
look-up: their keys are searched from the end for the last known one, and nothing behind it is
stored if all its writers have reported and the blocks behind were new when they were written.

This is a belief.  Storage is shared with other schedulers, and its janitor removes blocks:

* *Too much* costs a read that ends early: the reader verifies each block, and what is missing is
  computed, as it would have been after a look-up.  The end of a chain is known for ``TRUST_S``,
  which is less than storage protects blocks that were just used.  While DRAM has the blocks no read
  shows that storage has lost them, so a chain is looked up at least every ``LOOK_UP_S``.
* *Too little* costs the computation of blocks that are stored, of ``MOST_UNSTORED_BLOCKS`` at most.
  It happens where another scheduler's engines have continued the chain.  The DE then finds blocks
  stored that it is to write: their chain is looked up at the next turn, and so are all others for
  a while (``FIRST_PAUSE_S``).
"""

from collections.abc import Callable, Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.control import StoredChain
from dualpath.core.recent import Recent

#: Blocks with remembered DEs, and ends of chains, up to twice as many, at some 130 bytes each.
_MOST_BLOCKS = 1 << 17
#: DEs remembered per block: those of the latest requests with this prompt.
MOST_WRITERS = 8
#: For this long after its report the end of a chain is known without a look-up, in seconds.
TRUST_S = 120.0
#: A chain that goes on is looked up at least so often, in seconds.
LOOK_UP_S = 600.0
#: With more blocks behind the known end a look-up costs nothing beside their computation.
MOST_UNSTORED_BLOCKS = 64
#: After an answer that was too short all prompts are looked up for this long; each time twice as
#: long, unless the last time was ``LAST_PAUSE_S`` ago.
FIRST_PAUSE_S, LAST_PAUSE_S = 60.0, 3600.0


class _Writer:
    """A request that writes a chain at a DE.

    ``new_blocks`` of its prompt are believed not to be stored, ``tail`` is the prompt's last key.
    ``alone``: that is by what this scheduler knows, and no other request writes these blocks.
    ``looked_up_s`` is when an engine has looked the chain up, ``stored_s`` when it was reported.
    """

    __slots__ = (
        *("alone", "credible", "engine_id", "looked_up_s", "new_blocks"),
        *("stored_s", "tail"),
    )

    def __init__(
        self,
        engine_id: str,
        tail: BlockKey,
        new_blocks: int,
        looked_up_s: float,
        *,
        alone: bool,
    ) -> None:
        self.engine_id, self.tail, self.new_blocks = engine_id, tail, new_blocks
        self.looked_up_s, self.alone = looked_up_s, alone
        self.stored_s: float | None = None
        #: False if its chain has a gap, or its report could be that of another request.
        self.credible = True


class StoredChains:
    """Remembers which DEs write, or wrote, each block of a prompt, and which ends are stored.

    An agent's next turn extends the last block of its prompt, so blocks that a DE generates are
    remembered once they are stored.  Several DEs have the same last block if one prompt was
    requested several times: each may be writing another continuation of it.  ``clock`` gives
    seconds, ``too_short`` is called when an answer has proved to be.
    """

    def __init__(
        self, clock: Callable[[], float], too_short: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._too_short = too_short
        #: The latest writer first.
        self._writers: Recent[BlockKey, tuple[_Writer, ...]]
        #: Blocks behind which no other block is stored than those that are known.
        self._tails: Recent[BlockKey, _Writer]
        self.clear()
        self._paused_until_s = self._last_short_s = float("-inf")
        self._pause_s = FIRST_PAUSE_S

    def clear(self) -> None:
        """Drop all blocks: the weights have changed, and with them what is stored."""
        self._writers, self._tails = Recent(_MOST_BLOCKS), Recent(_MOST_BLOCKS)

    def note(
        self,
        keys: Sequence[BlockKey],
        first: int,
        stored_blocks: int,
        engine_id: str,
        *,
        known: bool = False,
        whole: bool = False,
    ) -> None:
        """A DE is about to write a prompt's blocks from ``first`` on, and blocks behind its last.

        ``stored_blocks`` are believed to be stored, ``known`` by ``end`` without a look-up, and
        ``whole`` if more could be no hit.
        """
        if not keys:
            return
        noted, looked_up_s = keys[first:] or keys[-1:], self._clock()
        if known:
            before = self._writers.last(keys[max(stored_blocks - 1, 0) : stored_blocks]) or ()
            looked_up_s = max((one.looked_up_s for one in before), default=float("-inf"))
        writer = _Writer(
            *(engine_id, keys[-1], len(keys) - max(first, stored_blocks), looked_up_s),
            alone=known and not whole,
        )
        writer.credible = first <= stored_blocks
        again = {key: self._writers.last([key]) or () for key in noted if key in self._writers}
        self._writers.note(noted, (writer,))
        for key, writers in again.items():
            self._tails.remove(key)
            self._writers.note([key], (writer, *writers)[:MOST_WRITERS])
            for one in writers:
                # One of them finds stored what the other has written.
                one.alone = writer.alone = False
                if one.stored_s is None and _names(one) == _names(writer):
                    one.credible = writer.credible = False

    def stored(self, engine_id: str, chain: StoredChain) -> None:
        """Take a DE's report of a chain that is stored."""
        writers = self._writers.last([chain.prompt_tail]) or ()
        own = (w for w in writers if (w.engine_id, w.tail) == (engine_id, chain.prompt_tail))
        writer = next((w for w in own if w.stored_s is None), None)
        if writer is None or not writer.credible:
            return
        writer.stored_s = self._clock()
        for key in chain.generated:
            # Others are those of later turns.
            others = self._writers.last([key]) or ()
            self._tails.remove(key)
            self._writers.note([key], (*others, writer)[:MOST_WRITERS])
        expected_blocks = writer.new_blocks + len(chain.generated)
        if chain.new_blocks == expected_blocks:
            prompt = [chain.prompt_tail] if writer.new_blocks else []
            self._tails.note([*prompt, *chain.generated], writer)
        elif chain.new_blocks < expected_blocks and writer.alone:
            self._was_too_short(writer.stored_s)

    def of(self, keys: Sequence[BlockKey]) -> tuple[str, ...]:
        """Return the DEs of the last known block of a chain, the latest first."""
        return tuple(dict.fromkeys(w.engine_id for w in self._writers.last(keys) or ()))

    def end(self, keys: Sequence[BlockKey]) -> int | None:
        """Return how many of ``keys``, from the first on, are stored; None if that is not known."""
        now_s = self._clock()
        if now_s < self._paused_until_s:
            return None
        if not (end := self._writers.end(keys)):
            return None
        key = keys[end - 1]
        writers = self._writers.last([key]) or ()
        if end == len(keys) and any(_is_trusted(writer, now_s) for writer in writers):
            return end
        tail = self._tails.last([key])
        if tail is None or not _is_trusted(tail, now_s) or len(keys) - end > MOST_UNSTORED_BLOCKS:
            return None
        return end if self._all_reported(keys[:end], tail.tail) else None

    def _all_reported(self, keys: Sequence[BlockKey], prompt_tail: BlockKey) -> bool:
        """Whether all that may write behind a chain of ``keys`` has been reported.

        A request with the same prompt, or with a part of its answer, may generate what follows.
        """
        for key in reversed(keys):
            writers = self._writers.last([key]) or ()
            known = 0 < len(writers) < MOST_WRITERS
            if not known or any(writer.stored_s is None for writer in writers):
                return False
            if key == prompt_tail:
                return True
        return False

    def _was_too_short(self, now_s: float) -> None:
        if now_s - self._last_short_s > LAST_PAUSE_S:
            self._pause_s = FIRST_PAUSE_S
        self._paused_until_s, self._last_short_s = now_s + self._pause_s, now_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        self._too_short()


def _is_trusted(writer: _Writer, now_s: float) -> bool:
    stored_s = writer.stored_s
    fresh = stored_s is not None and now_s - stored_s <= TRUST_S
    return fresh and now_s - writer.looked_up_s <= LOOK_UP_S


def _names(writer: _Writer) -> tuple[str, BlockKey]:
    """Return what identifies the request of a report."""
    return writer.engine_id, writer.tail
