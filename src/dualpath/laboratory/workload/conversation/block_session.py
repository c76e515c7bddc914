"""Sessions of block ids (the weka format): equal ids are equal tokens, and nothing else is known.

A block id stands for ``block_tokens`` tokens derived from the session and the id.  One exception
keeps the replay true to §A.3: where a request extends the one before, its prompt goes on with the
tokens the server really generated, so the *new* ids at those places take these tokens, once and
for all.  Turn k+1 then hits prompt and generated tokens of turn k, as it did when recorded.
"""

import copy
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.conversation.session import (
    Conversation,
    Session,
    SessionSettings,
    Turn,
    scaled,
)

_Tokens = np.ndarray[Any, np.dtype[np.uint32]]
_Ids = np.ndarray[Any, np.dtype[np.int64]]


class BlockTurn(msgspec.Struct, frozen=True):
    """One request: ``id_ranges`` are inclusive (first, last) runs of block ids.

    ``prompt_tokens`` may exceed the blocks' tokens by a partial block, which has no id.
    """

    prompt_tokens: int
    generate_tokens: int
    id_ranges: tuple[tuple[int, int], ...]
    delay_s: float = 0.0

    def block_ids(self) -> _Ids:
        """Return all ids in order."""
        runs = [np.arange(first, last + 1, dtype=np.int64) for first, last in self.id_ranges]
        return np.concatenate(runs) if runs else np.empty(0, np.int64)


class SubAgent(msgspec.Struct, frozen=True):
    """A session that starts after turn ``after_turn`` (-1: at once) and runs beside its parent."""

    after_turn: int
    session: "BlockSession"


class BlockSession(msgspec.Struct, frozen=True):
    """A recorded session; ``scope`` names the space its ids live in, shared by its sub-agents."""

    session_id: str
    block_tokens: int
    block_turns: tuple[BlockTurn, ...]
    sub_agents: tuple[SubAgent, ...] = ()
    scope: str = ""

    @property
    def turns(self) -> int:
        """Recorded requests, sub-agents included."""
        return len(self.block_turns) + sum(sub.session.turns for sub in self.sub_agents)

    def start(self, settings: SessionSettings) -> Conversation:
        """Return a fresh run."""
        if settings.scale_append != 1.0:
            raise ConfigError(
                f"scale_append is {settings.scale_append} but session {self.session_id} is made "
                "of block ids, which cannot be stretched; use its [append, generated] rounds"
            )
        return BlockConversation(self, settings, BlockTokens(self, settings))

    def renamed(self, session_id: str) -> Session:
        """Return the same blocks under another id, hence with other tokens."""
        return msgspec.structs.replace(self, session_id=session_id, scope=session_id)


class BlockTokens:
    """The tokens of every block id of one session."""

    def __init__(self, session: BlockSession, settings: SessionSettings) -> None:
        """Derive from seed and scope; no id is bound to generated tokens yet."""
        self._block_tokens = session.block_tokens
        scope = session.scope or session.session_id
        # Below 2**63 after the shift, so that numpy takes it as an unsigned 64-bit integer.
        self._salt = np.uint64(zlib.crc32(f"{settings.seed}/{scope}".encode()) << 30)
        self._low = settings.token_low
        self._span = np.uint64(settings.token_high - settings.token_low)
        self._bound: dict[int, _Tokens] = {}
        self._seen: set[int] = set()

    def fork(self) -> "BlockTokens":
        """Return an independent copy for a sub-agent, whose progress must not alter ours."""
        fork = copy.copy(self)
        fork._bound = dict(self._bound)
        fork._seen = set(self._seen)
        return fork

    def tokens(self, ids: _Ids) -> _Tokens:
        """Return the tokens of ``ids`` as (blocks, block tokens)."""
        places = ids.astype(np.uint64)[:, None] * np.uint64(self._block_tokens) + np.arange(
            self._block_tokens, dtype=np.uint64
        )
        drawn = _mixed(places + self._salt) % self._span
        tokens = (drawn + np.uint64(self._low)).astype(np.uint32)
        if self._bound:
            for row, block_id in enumerate(ids.tolist()):
                bound = self._bound.get(block_id)
                if bound is not None:
                    tokens[row] = bound
        return tokens

    def sent(self, block_id: int) -> bool:
        """Tell whether the id was sent before, so that its tokens are fixed."""
        return block_id in self._seen

    def send(self, ids: list[int]) -> None:
        """Note that ``ids`` were sent; from now on their tokens are fixed."""
        self._seen.update(ids)

    def bind(self, block_id: int, token_ids: _Tokens) -> None:
        """Fix the tokens of an id that was never sent."""
        self._bound[block_id] = token_ids.copy()


class BlockConversation(Conversation):
    """Replays block ids, putting generated tokens where a prompt goes on after them."""

    def __init__(
        self, session: BlockSession, settings: SessionSettings, tokens: BlockTokens
    ) -> None:
        """Start before the first request; ``tokens`` belongs to this conversation alone."""
        super().__init__(session.session_id, settings)
        self._session = session
        self._tokens = tokens
        self._ids: list[int] = []
        self._previous: _Tokens = np.empty(0, np.uint32)
        self._spawned_upto = -2

    def _compose(self, index: int) -> Turn | None:
        if index >= len(self._session.block_turns):
            return None
        recorded = self._session.block_turns[index]
        ids = recorded.block_ids()
        prompt = self._prompt(recorded, ids, index)
        common = int(_common_prefix(self._previous, prompt))
        generate = max(scaled(recorded.generate_tokens, self._settings.scale_generate), 1)
        return Turn(prompt.tolist(), generate, common, recorded.delay_s)

    def _prompt(self, recorded: BlockTurn, ids: _Ids, index: int) -> _Tokens:
        listed = ids.tolist()
        block = self._session.block_tokens
        flat = self._tokens.tokens(ids).reshape(-1)
        rest = recorded.prompt_tokens - len(flat)
        if rest > 0:
            # The partial block: an id of its own that no recorded id can equal.
            tail = np.arange(-(-rest // block), dtype=np.int64) + (1 << 40) + (index << 20)
            flat = np.concatenate([flat, self._tokens.tokens(tail).reshape(-1)[:rest]])
        flat = flat[: recorded.prompt_tokens]
        if index > 0 and listed[: len(self._ids)] == self._ids:
            self._continue_previous(flat, listed)
        self._tokens.send(listed)
        self._ids = listed
        return flat

    def _continue_previous(self, flat: _Tokens, listed: list[int]) -> None:
        """Write what the server generated into the new blocks of a prompt that goes on."""
        block = self._session.block_tokens
        end = min(len(self._previous), len(flat))
        for place in range(len(self._ids), -(-end // block)):
            new_id = listed[place] if place < len(listed) else None
            if new_id is not None and (self._tokens.sent(new_id) or listed.count(new_id) > 1):
                # Its tokens are fixed already, or would have to differ within this prompt.
                continue
            start, stop = place * block, (place + 1) * block
            flat[start : min(stop, end)] = self._previous[start : min(stop, end)]
            if new_id is not None and stop <= len(flat):
                self._tokens.bind(new_id, flat[start:stop])

    def _remember(self, index: int, turn: Turn, generated_token_ids: Sequence[int]) -> None:
        self._previous = np.asarray([*turn.prompt_token_ids, *generated_token_ids], np.uint32)

    def spawned(self) -> list[Conversation]:
        """Return the sub-agents whose parent turn is done."""
        done = self._position - 1
        due = [s for s in self._session.sub_agents if self._spawned_upto < s.after_turn <= done]
        self._spawned_upto = done
        return [BlockConversation(s.session, self._settings, self._tokens.fork()) for s in due]


def _mixed(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Scramble 64-bit integers one to one (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _common_prefix(left: _Tokens, right: _Tokens) -> int:
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter
