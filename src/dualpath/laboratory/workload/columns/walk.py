"""Walks through conversations round by round to find what each prompt can reuse (§A.4).

Within a session rounds are ordered by number: round i comes after all rounds i - 1, a sub-agent's
rounds are counted from the round it starts after, and rounds with the same number do not see each
other.  Sessions that share blocks are walked *in parallel*, also by round number, or
*sequentially*.  Both are approximations, because real agents run at different speeds; the hits of a
shared store are between the two.  For a session without sub-agents that shares no blocks the order
is exact.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dualpath.laboratory.workload.columns.conversations import ConversationColumns, offsets
from dualpath.laboratory.workload.conversation.prefixes import StoredPrefixes
from dualpath.laboratory.workload.conversation.session import AgentSettings, Conversation
from dualpath.laboratory.workload.conversation.spans import Spans, TokenIds
from dualpath.laboratory.workload.conversation.text_session import TextConversation
from dualpath.laboratory.workload.conversation.token_session import TokenSession

Sharing = Literal["none", "parallel", "sequential"]


class WalkedConversation(msgspec.Struct):
    """The rounds of one conversation; for a sub-agent also its parent and the parent's round."""

    parent: "WalkedConversation | None" = None
    parent_round: int = -1
    prompt_tokens: list[int] = []
    reuse_tokens: list[int] = []
    own_reuse_tokens: list[int] = []
    generated_tokens: list[int] = []
    delay_s: list[float] = []

    @property
    def rounds(self) -> int:
        """The number of rounds walked so far."""
        return len(self.prompt_tokens)

    def add_round(
        self, prompt: int, reuse: int, own_reuse: int, generated: int, delay_s: float
    ) -> None:
        """Add a round; lengths are in tokens."""
        self.prompt_tokens.append(prompt)
        self.reuse_tokens.append(reuse)
        self.own_reuse_tokens.append(own_reuse)
        self.generated_tokens.append(generated)
        self.delay_s.append(delay_s)


class _Active(NamedTuple):
    """A conversation being walked, with the stores in which it looks up prefixes."""

    session: int
    conversation: Conversation
    walked: WalkedConversation
    own: StoredPrefixes[Any]
    shared: StoredPrefixes[Any]


def walk(
    sessions: Sequence[Conversation], sharing: Sharing = "none"
) -> list[list[WalkedConversation]]:
    """Return the conversations of every session, its own first."""
    found: list[list[WalkedConversation]] = []
    active: list[_Active] = []
    common: StoredPrefixes[Any] = StoredPrefixes()
    for number, conversation in enumerate(sessions):
        walked = WalkedConversation()
        own: StoredPrefixes[Any] = StoredPrefixes()
        shared = own if sharing == "none" else common
        found.append([walked])
        active.append(_Active(number, conversation, walked, own, shared))
        while sharing != "parallel" and active:
            active = _step(active, found)
    while active:
        active = _step(active, found)
    return found


def _step(active: list[_Active], found: list[list[WalkedConversation]]) -> list[_Active]:
    """Advance all conversations by one round and return those that are not finished."""
    taken = [one for one in active if _advance(one)]
    after: list[_Active] = []
    for one in taken:
        stored = _compared(one.conversation, one.conversation.record())
        one.own.add(stored)
        if one.shared is not one.own:
            one.shared.add(stored)
        after.append(one)
        for helper in one.conversation.spawned():
            walked = WalkedConversation(one.walked, one.walked.rounds - 1)
            found[one.session].append(walked)
            after.append(one._replace(conversation=helper, walked=walked))
    return after


def _advance(one: _Active) -> bool:
    """Add the next round of a conversation; return whether there is one."""
    turn = one.conversation.next_turn()
    if turn is None:
        if one.conversation.truncated:
            # A placeholder for the round that does not fit, also not after a synthetic round;
            # ``conversations.truncated`` removes it.
            limit = one.conversation.settings.max_context_tokens
            assert limit is not None, "it has truncated the conversation"
            one.walked.add_round(limit, 0, 0, 1, 0.0)
        return False
    prompt = _compared(one.conversation, turn.prompt)
    own = reuse = one.own.common_tokens(prompt)
    if one.shared is not one.own:
        reuse = max(own, one.shared.common_tokens(prompt))
    one.walked.add_round(turn.prompt.tokens, reuse, own, turn.generate_tokens, turn.delay_s)
    return True


def _compared(conversation: Conversation, sequence: Spans) -> Spans | TokenIds:
    """Return what to compare: tokens of texts, because different texts may have a common prefix."""
    if isinstance(conversation, TextConversation):
        return conversation.tokens(sequence)
    return sequence


def planned(session: TokenSession, settings: AgentSettings) -> WalkedConversation:
    """Return the rounds of a session of token counts, for which reuse is known without search."""
    walked = WalkedConversation()
    limit = settings.max_context_tokens
    for one in session.planned(settings):
        prompt = one.context_tokens + one.append_tokens
        walked.add_round(
            prompt, one.reuse_tokens, one.reuse_tokens, one.generated_tokens, one.delay_s
        )
        if limit is not None and prompt + one.generated_tokens > limit:
            break  # The last possible round, which ``conversations.truncated`` cuts.
    return walked


def as_columns(sessions: Sequence[Sequence[WalkedConversation]]) -> ConversationColumns:
    """Return walked conversations as arrays; conversations without rounds are left out."""
    walked = [[one for one in session if one.rounds] for session in sessions]
    walked = [session for session in walked if session]
    flat = [one for session in walked for one in session]
    first_round = offsets(np.asarray([one.rounds for one in flat], np.int64))
    begin = {id(one): int(row) for one, row in zip(flat, first_round, strict=False)}

    def column(name: str) -> list[int]:
        return [value for one in flat for value in getattr(one, name)]

    return ConversationColumns(
        first_conversation=offsets(np.asarray([len(session) for session in walked], np.int64)),
        first_round=first_round,
        parent_round=np.asarray(
            [begin[id(x.parent)] + x.parent_round if x.parent else -1 for x in flat], np.int64
        ),
        prompt_tokens=np.asarray(column("prompt_tokens"), np.int64),
        reuse_tokens=np.asarray(column("reuse_tokens"), np.int64),
        own_reuse_tokens=np.asarray(column("own_reuse_tokens"), np.int64),
        generated_tokens=np.asarray(column("generated_tokens"), np.int64),
        delay_s=np.asarray(column("delay_s"), np.float32),
    )
