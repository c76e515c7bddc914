"""Walk through conversations round by round to find what each prompt could reuse (§A.4).

Within a session order is the round number: round i comes after all rounds i - 1, a sub-agent's
rounds counting from the one it starts after, and rounds of one number do not see each other.
Sessions that share are taken *in parallel*, that is by round number as well, or *one after the
other*.  Both are approximations, as agents really run at different speeds; between them lies what
a shared store gives.  A session without sub-agents that shares with nobody has no other order.
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
    """What was found for one conversation; ``parent`` and the round of it, or None."""

    parent: "WalkedConversation | None" = None
    parent_round: int = -1
    prompt_tokens: list[int] = []
    reuse_tokens: list[int] = []
    own_reuse_tokens: list[int] = []
    generated_tokens: list[int] = []
    delay_s: list[float] = []

    @property
    def rounds(self) -> int:
        """Rounds walked so far."""
        return len(self.prompt_tokens)

    def note(self, prompt: int, reuse: int, own_reuse: int, generated: int, delay_s: float) -> None:
        """Add a round, in tokens."""
        self.prompt_tokens.append(prompt)
        self.reuse_tokens.append(reuse)
        self.own_reuse_tokens.append(own_reuse)
        self.generated_tokens.append(generated)
        self.delay_s.append(delay_s)


class _Active(NamedTuple):
    """A conversation being walked, with the stores it looks into."""

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
    """Take all conversations one round further and return those that go on."""
    taken = [one for one in active if _asked(one)]
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


def _asked(one: _Active) -> bool:
    """Note the next round of a conversation; return whether there is one."""
    turn = one.conversation.next_turn()
    if turn is None:
        if one.conversation.truncated:
            # In the place of the round that does not fit: behind a synthetic round it does not
            # either, and ``conversations.truncated`` takes it away.
            limit = one.conversation.settings.max_context_tokens
            assert limit is not None, "it has truncated the conversation"
            one.walked.note(limit, 0, 0, 1, 0.0)
        return False
    prompt = _compared(one.conversation, turn.prompt)
    own = reuse = one.own.common_tokens(prompt)
    if one.shared is not one.own:
        reuse = max(own, one.shared.common_tokens(prompt))
    one.walked.note(turn.prompt.tokens, reuse, own, turn.generate_tokens, turn.delay_s)
    return True


def _compared(conversation: Conversation, sequence: Spans) -> Spans | TokenIds:
    """Return what to compare: of texts the tokens, since texts that differ may begin alike."""
    if isinstance(conversation, TextConversation):
        return conversation.tokens(sequence)
    return sequence


def planned(session: TokenSession, settings: AgentSettings) -> WalkedConversation:
    """Return the rounds of token counts, whose reuse needs no search."""
    walked = WalkedConversation()
    limit = settings.max_context_tokens
    for one in session.planned(settings):
        prompt = one.context_tokens + one.append_tokens
        walked.note(prompt, one.reuse_tokens, one.reuse_tokens, one.generated_tokens, one.delay_s)
        if limit is not None and prompt + one.generated_tokens > limit:
            break  # the last round that may happen, which ``conversations.truncated`` cuts
    return walked


def as_columns(sessions: Sequence[Sequence[WalkedConversation]]) -> ConversationColumns:
    """Return walked conversations as columns; those without a round are left out."""
    kept = [[one for one in session if one.rounds] for session in sessions]
    kept = [session for session in kept if session]
    flat = [one for session in kept for one in session]
    first_round = offsets(np.asarray([one.rounds for one in flat], np.int64))
    begin = {id(one): int(row) for one, row in zip(flat, first_round, strict=False)}

    def column(name: str) -> list[int]:
        return [value for one in flat for value in getattr(one, name)]

    return ConversationColumns(
        first_conversation=offsets(np.asarray([len(session) for session in kept], np.int64)),
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
