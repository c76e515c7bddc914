"""Sessions of block ids for the simulator: ``BlockConversation`` without any token.

A symbol stands for the content of one block.  A recorded id has one content for all turns; where
the live conversation writes generated tokens into a new block, the block takes the symbol that
these tokens have in the round before, or, filled in part, a symbol of its own.
"""

from collections.abc import Sequence

import numpy as np

from dualpath.laboratory.workload.columns.agent_table import IntArray
from dualpath.laboratory.workload.columns.walk import LaneRound, SymbolLane
from dualpath.laboratory.workload.conversation.block_session import BlockSession, BlockTurn
from dualpath.laboratory.workload.conversation.session import SessionSettings, scaled

#: Blocks compare as big-endian bytes.
_SYMBOL = np.dtype(">u8")
#: Ids of partial blocks, as ``BlockConversation`` numbers them: place and round.
_FIRST_TAIL = 1 << 40
_TAILS_PER_ROUND_BITS = 20
#: Symbols of content that no recorded id names begin above all ids.
_FIRST_UNNAMED = 1 << 62


class UnnamedBlocks:
    """Numbers for contents without an id, unique among the lanes of one session."""

    def __init__(self) -> None:
        """Nothing is numbered yet."""
        self._next = _FIRST_UNNAMED

    def take(self, count: int) -> IntArray:
        """Return ``count`` new symbols."""
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int64)


class BlockLane:
    """One conversation of block ids."""

    width_bytes = _SYMBOL.itemsize

    def __init__(
        self,
        session: BlockSession,
        settings: SessionSettings,
        parent: "BlockLane | None" = None,
    ) -> None:
        """Start a session's own lane, or that of a sub-agent with ``parent``'s blocks so far."""
        self.symbol_tokens = session.block_tokens
        self._session = session
        self._settings = settings
        self._unnamed: UnnamedBlocks = parent._unnamed if parent else UnnamedBlocks()
        self._bound: dict[int, int] = dict(parent._bound) if parent else {}
        self._seen: set[int] = set(parent._seen) if parent else set()
        self._index = 0
        self._previous_ids: IntArray = np.empty(0, np.int64)
        self._previous: IntArray = np.empty(0, np.int64)
        self._previous_tokens = 0
        self._previous_prompt_tokens = 0
        self._last_id_rewritten = False

    def next_round(self) -> LaneRound | None:
        """Return the next request in symbols."""
        if self._index >= len(self._session.block_turns):
            return None
        recorded = self._session.block_turns[self._index]
        block = self.symbol_tokens
        symbols, continued = self._prompt(recorded)
        generated = scaled(recorded.generate_tokens, self._settings.scale_generate)
        total = recorded.prompt_tokens + generated
        full = recorded.prompt_tokens // block
        # From the first block on that the prompt does not fill, contents are new.
        after = np.concatenate([symbols[:full], self._unnamed.take(-(-total // block) - full)])
        self._index += 1
        self._previous = after
        self._previous_tokens = total
        return LaneRound(
            prompt=symbols[:full].astype(_SYMBOL).tobytes(),
            # The last token was sampled but never fed back, so no engine has its KV-cache.
            stored=after[: (total - 1) // block].astype(_SYMBOL).tobytes(),
            prompt_tokens=recorded.prompt_tokens,
            generated_tokens=generated,
            delay_s=recorded.delay_s,
            continued_tokens=continued,
        )

    def spawned(self) -> Sequence[SymbolLane]:
        """Return the sub-agents whose parent turn was taken last."""
        # As in a replay, those of turn -1 start after the first answer as well.
        done = self._index - 1
        due = {done, -1} if done == 0 else {done}
        return [
            BlockLane(sub.session, self._settings, self)
            for sub in self._session.sub_agents
            if sub.after_turn in due
        ]

    def _prompt(self, recorded: BlockTurn) -> tuple[IntArray, int]:
        """Return a symbol per block, the last perhaps partial, and the tokens continued."""
        block = self.symbol_tokens
        ids = recorded.block_ids()
        known = self._previous_ids.size
        goes_on = self._index > 0 and np.array_equal(ids[:known], self._previous_ids)
        # Ids sent before keep their contents; only a partial block's may have to be looked up.
        same = min(known, self._previous_prompt_tokens // block) if goes_on else 0
        places = -(-recorded.prompt_tokens // block)
        tail = np.arange(max(places - ids.size, 0), dtype=np.int64)
        tail += _FIRST_TAIL + (self._index << _TAILS_PER_ROUND_BITS)
        symbols = np.concatenate([self._previous[:same], self._contents(ids[same:]), tail])
        continued = 0
        if goes_on:
            continued = self._continue(recorded, ids[known:].tolist(), known, symbols)
        else:
            self._last_id_rewritten = False
        self._seen.update(ids[same:].tolist())
        self._previous_ids = ids
        self._previous_prompt_tokens = recorded.prompt_tokens
        return symbols, continued

    def _contents(self, ids: IntArray) -> IntArray:
        """Return the symbols of ``ids``, of which some may be bound to generated tokens."""
        if not self._bound:
            return ids
        bound = self._bound
        return np.asarray([bound.get(i, i) for i in ids.tolist()], np.int64)

    def _continue(
        self, recorded: BlockTurn, new_ids: list[int], known: int, symbols: IntArray
    ) -> int:
        """Write the round before into the new blocks of one that goes on, as the live one does.

        Returns the leading tokens that both have, where that is more than whole blocks tell.
        """
        block = self.symbol_tokens
        end = min(self._previous_tokens, recorded.prompt_tokens)
        ends_in_id = known * block > self._previous_prompt_tokens
        common = min(end, self._previous_tokens - 1)
        if ends_in_id:
            # The answer began inside this block, whose id says other contents.
            common = 0 if self._last_id_rewritten else min(end, self._previous_prompt_tokens)
        self._last_id_rewritten = False
        for place in range(known, -(-end // block)):
            new_id = new_ids[place - known] if place - known < len(new_ids) else None
            if new_id is not None and (new_id in self._seen or new_ids.count(new_id) > 1):
                common = 0
                continue
            stop = (place + 1) * block
            symbols[place] = self._previous[place] if stop <= end else self._unnamed.take(1)[0]
            if new_id is not None and stop <= recorded.prompt_tokens:
                self._bound[new_id] = int(symbols[place])
            elif new_id is not None:
                self._last_id_rewritten = True
        return common
