"""Sessions of block ids (weka, Mooncake, …): equal ids are equal tokens, which are not known.

A block id stands for ``block_tokens`` tokens derived from the session's scope and the id.  There is
one exception, as §A.3 requires: if a request extends the previous one, its prompt continues with
the tokens that the server generated, so *new* ids at these positions are bound to these tokens from
then on.  Turn k+1 then hits prompt and generated tokens of turn k, as when it was recorded.  Ids
that also occur in other sessions are not bound, because other sessions do not know the tokens that
were generated for this one.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.workload.conversation.prompts import Contents
from dualpath.workload.conversation.sessions import (
    AgentSettings,
    Conversation,
    Session,
    Turn,
    scaled,
)
from dualpath.workload.conversation.spans import Spans

#: Blocks without an id get ids from turn and position, above all recorded ids.
_FIRST_TAIL = 1 << 40
_TAILS_PER_TURN_BITS = 20


class BlockTurn(msgspec.Struct, frozen=True):
    """One request: ``id_ranges`` are inclusive (first, last) runs of block ids.

    ``prompt_tokens`` may exceed the blocks' tokens by a partial block, which has no id.
    ``delay_s`` ≥ 0 is the time since the previous answer; ``start_s`` is the time at which the
    request was sent, in seconds since the start of the trace, None if it is not known.
    """

    prompt_tokens: int
    generate_tokens: int
    id_ranges: tuple[tuple[int, int], ...]
    delay_s: float = 0.0
    start_s: float | None = None

    def block_ids(self) -> Spans:
        """Return all ids in order as spans, with one token per id."""
        return Spans.of_runs(0, [(first, last + 1) for first, last in self.id_ranges])


class SubAgent(msgspec.Struct, frozen=True):
    """A session that starts after turn ``after_turn`` of its parent (-1: at once)."""

    after_turn: int
    session: "BlockSession"


class BlockSession(msgspec.Struct, frozen=True):
    """A recorded session; ``scope`` names the id space, which its sub-agents share.

    ``shared_ids`` are its ids that also occur in other sessions of the same scope.
    """

    session_id: str
    block_tokens: int
    block_turns: tuple[BlockTurn, ...]
    sub_agents: tuple[SubAgent, ...] = ()
    scope: str = ""
    shared_ids: frozenset[int] = frozenset()

    @property
    def turns(self) -> int:
        """The number of recorded requests, including sub-agents."""
        return len(self.block_turns) + sum(sub.session.turns for sub in self.sub_agents)

    def start(self, settings: AgentSettings, contents: Contents) -> Conversation:
        """Return a new conversation."""
        if settings.scale_append != 1.0:
            raise ConfigError(
                f"scale_append is {settings.scale_append}, but session {self.session_id} consists "
                "of block ids, which cannot be scaled; use its [append, generated] rounds"
            )
        return BlockConversation(self, settings, contents)

    def renamed(self, session_id: str) -> Session:
        """Return the same session with another id, and so with other tokens."""
        return msgspec.structs.replace(self, session_id=session_id, scope=session_id)


class BlockConversation(Conversation):
    """Composes prompts from block ids, with generated tokens where a prompt contains them."""

    def __init__(
        self,
        session: BlockSession,
        settings: AgentSettings,
        contents: Contents,
        parent: "BlockConversation | None" = None,
    ) -> None:
        """Start before the first request; a sub-agent begins with its ``parent``'s blocks."""
        super().__init__(session.session_id, settings, contents)
        self._session = session
        scope = session.scope or session.session_id
        self._content: int = parent._content if parent else contents.blocks(scope)
        self._ids = Spans()
        self._prompt_tokens = 0
        #: Ids with fixed contents, because they were sent before or occur in other sessions.
        self._seen: set[int] = set(parent._seen if parent else session.shared_ids)
        #: Runs of ids that are bound to generated tokens, by their first id: (end, tokens).
        self._bound: dict[int, tuple[int, Spans]] = dict(parent._bound) if parent else {}
        self._bound_firsts = sorted(self._bound)
        self._spawned_upto = -2

    def _compose(self, index: int) -> Turn | None:
        if index >= len(self._session.block_turns):
            return None
        recorded = self._session.block_turns[index]
        ids = recorded.block_ids()
        prompt = self._prompt(recorded.prompt_tokens, ids, index)
        generate = max(scaled(recorded.generate_tokens, self.settings.scale_generate), 1)
        return Turn(prompt, generate, self._previous.common_tokens(prompt), recorded.delay_s)

    def _prompt(self, prompt_tokens: int, ids: Spans, index: int) -> Spans:
        known = self._ids.tokens
        if index == 0 or ids.common_tokens(self._ids) < known:
            new_ids = ids
            prompt = self._own(ids, 0, index).first(prompt_tokens)
        else:
            new_ids = ids.between(known, ids.tokens)
            prompt = self._gone_on(prompt_tokens, ids, new_ids, index)
        for _, first, stop, _ in new_ids.spans:
            self._seen.update(range(first, stop))
        self._ids = ids
        self._prompt_tokens = prompt_tokens
        return prompt

    def _gone_on(self, prompt_tokens: int, ids: Spans, new_ids: Spans, index: int) -> Spans:
        """Return the previous prompt followed by ``new_ids``, which may hold generated tokens."""
        block = self._session.block_tokens
        known = self._ids.tokens
        end = min(self._previous.tokens, prompt_tokens)
        new = list(self._new_places(new_ids, known, -(-end // block)))
        # Whole blocks of the previous prompt are sent unchanged.
        same = min(known, self._prompt_tokens // block)
        start = done = same * block
        own = self._own(ids, same, index)
        parts: list[Spans] = []
        for first, stop in new:
            parts.append(own.between(done - start, first * block - start))
            done = min(stop * block, end)
            parts.append(self._previous.between(first * block, done))
        parts.append(own.between(done - start, prompt_tokens - start))
        prompt = self._previous.first(start).then(*parts)
        for first, stop in new:
            self._bind(ids, first, min(stop, prompt_tokens // block), prompt)
        return prompt

    def _own(self, ids: Spans, place: int, index: int) -> Spans:
        """Return the tokens of ``ids`` from block ``place`` on, followed by blocks without ids."""
        block = self._session.block_tokens
        tail = (_FIRST_TAIL + (index << _TAILS_PER_TURN_BITS)) * block
        without_id = Spans.of(self._content, tail, tail + (block << _TAILS_PER_TURN_BITS))
        return Spans().then(*self._contents(ids.between(place, ids.tokens)), without_id)

    def _contents(self, ids: Spans) -> Iterator[Spans]:
        """Yield the tokens of ``ids``: their own or those to which they are bound."""
        block = self._session.block_tokens
        for _, first, stop, _ in ids.spans:
            place = max(bisect_right(self._bound_firsts, first) - 1, 0)
            for bound in self._bound_firsts[place : bisect_left(self._bound_firsts, stop)]:
                bound_stop, tokens = self._bound[bound]
                if bound_stop > first:
                    yield Spans.of(self._content, first * block, bound * block)
                    first = max(first, bound)
                    last = min(stop, bound_stop)
                    yield tokens.between((first - bound) * block, (last - bound) * block)
                    first = last
            yield Spans.of(self._content, first * block, stop * block)

    def _new_places(self, new_ids: Spans, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of blocks with ``start`` ≤ place < ``stop`` that can be bound to ids.

        ``new_ids`` are the ids from ``start`` on.  The tokens of an id that was sent before are
        fixed.  An id that occurs twice cannot be bound, because its blocks would have to differ.
        """
        listed = list(chain(*(range(first, last) for _, first, last, _ in new_ids.spans)))
        fixed = self._seen.intersection(listed)
        if len(set(listed)) < len(listed):
            fixed.update(i for i, count in Counter(listed).items() if count > 1)
        places = [start + n for n, i in enumerate(listed) if i in fixed] if fixed else []
        for place in [*places, stop]:
            if start < min(place, stop):
                yield start, min(place, stop)
            start = place + 1

    def _bind(self, ids: Spans, start: int, stop: int, prompt: Spans) -> None:
        """Bind the ids at ``start`` ≤ place < ``stop`` to their tokens in ``prompt``."""
        block = self._session.block_tokens
        for _, first_id, stop_id, end in ids.between(start, stop).spans:
            last = (start + end) * block
            tokens = prompt.between(last - (stop_id - first_id) * block, last)
            self._bound[first_id] = (stop_id, tokens)
            insort(self._bound_firsts, first_id)

    def spawned(self) -> list[Conversation]:
        """Return the sub-agents that start after the last turn."""
        done = self._position - 1
        due = [s for s in self._session.sub_agents if self._spawned_upto < s.after_turn <= done]
        self._spawned_upto = done
        return [BlockConversation(s.session, self.settings, self.contents, self) for s in due]
