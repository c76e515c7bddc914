"""Converts traces and generated trajectories to the simulator's ``AgentTable`` (§7.2, §A.3, §A.4).

    agents = agents_from_sessions(read_trace("trace.jsonl"), WorkloadSettings(agents=2048))

Prompts, cuts, scales and additional agents are the same as in ``dualpath replay`` with the same
settings.  Hits are those of an unlimited store, computed from what every prompt shares with earlier
rounds: full blocks, never the whole prompt, and never the last generated token.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError, TraceError
from dualpath.core.request import Round, Trajectory
from dualpath.core.settings import Setting
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.conversations import (
    ConversationColumns,
    RoundColumns,
    agent_table,
    check_context_limit,
    multiplied,
    offsets,
    pure_appends,
    rounds_of,
    truncated,
)
from dualpath.workload.conversation.block_session import BlockSession
from dualpath.workload.conversation.prompts import Contents, Vocabulary, approximate_encode
from dualpath.workload.conversation.sessions import (
    AgentSettings,
    Conversation,
    Session,
)
from dualpath.workload.conversation.spans import Spans, StoredPrefixes, TokenIds
from dualpath.workload.conversation.text_session import TextConversation, TextSession
from dualpath.workload.conversation.token_session import TokenSession

# -------------------------------------------------------------------------------------------- walk
# Walks through conversations round by round to find what each prompt can reuse (§A.4).
#
# Within a session rounds are ordered by number: round i comes after all rounds i - 1, a sub-agent's
# rounds are counted from the round it starts after, and rounds with the same number do not see each
# other.  Sessions that share blocks are walked *in parallel*, also by round number, or
# *sequentially*.  Both are approximations, because real agents run at different speeds; the hits of
# a shared store are between the two.  For a session without sub-agents that shares no blocks the
# order is exact.

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


# ----------------------------------------------------------------------------------------- lengths
# Converts sessions of any format to trajectories of token counts (§A.3).


def as_lengths(
    sessions: Sequence[Session], encode: Callable[[str], Sequence[int]] = approximate_encode
) -> Iterator[TokenSession]:
    """Yield sessions as token counts: how much of earlier tokens every prompt retains and appends.

    Retained tokens are found from block ids or from the tokens of texts by ``encode``.  Sub-agents
    become separate sessions, so tokens that they share with their parent count as appended.
    """
    for session in sessions:
        if isinstance(session, TokenSession):
            yield session
            continue
        # One session at a time, to free the contents of each before the next.
        started = session.start(AgentSettings(), Contents(Vocabulary(encode=encode)))
        for number, walked in enumerate(walk([started])[0]):
            name = session.session_id if number == 0 else f"{session.session_id}/{number}"
            yield _lengths(name, walked)


def _lengths(name: str, walked: WalkedConversation) -> TokenSession:
    rounds: list[Round] = []
    retained_tokens: list[int | None] = []
    total = 0
    for index, (prompt, generated) in enumerate(
        zip(walked.prompt_tokens, walked.generated_tokens, strict=True)
    ):
        reuse = walked.own_reuse_tokens[index]
        # The last token of an answer is retained although it has no KV.
        continues = 0 < total == reuse + 1 <= prompt
        retained = total if continues else min(reuse, total, prompt - 1)
        retained_tokens.append(None if retained == total else retained)
        rounds.append(Round(prompt - retained, generated, walked.delay_s[index]))
        total = prompt + generated
    edited = any(retained is not None for retained in retained_tokens)
    return TokenSession(Trajectory(name, tuple(rounds)), tuple(retained_tokens) if edited else ())


_Encode = Callable[[str], Sequence[int]]


class WorkloadSettings(AgentSettings, frozen=True, kw_only=True):
    """How sessions are converted to agents of the simulator.

    ``max_context_tokens`` truncates trajectories, while rounds beyond ``context_limit_tokens``, the
    model's limit, are refused; None for no limit.  With ``share_across_sessions`` sessions hit
    blocks that others stored: in rounds of lower number (``parallel``), or in all rounds of earlier
    sessions (``sequential``).  Additional agents share with no other, because they begin with
    random tokens.
    """

    context_limit_tokens: Annotated[
        int | None, Setting("the model's context limit", ge=1, le=1 << 30, flag=False)
    ] = None
    tool_delay_scale: Annotated[
        float,
        Setting("factor of recorded tool delays; 0: no delays", ge=0, le=1e6, flag=False),
    ] = 0.0
    block_tokens: Annotated[
        int, Setting("tokens of a block, the unit of hits", ge=1, le=1 << 16, flag=False)
    ] = 64
    share_across_sessions: Annotated[
        Sharing,
        Setting("sessions hit each other's blocks: parallel or sequential sessions, or none"),
    ] = "none"


def agents_from_sessions(
    sessions: Sequence[Session],
    settings: WorkloadSettings | None = None,
    *,
    encode: _Encode | None = None,
) -> AgentTable:
    """Return the agents of a trace of any format; sub-agents follow their session's agent.

    ``encode`` converts text to token ids as in a replay; without it a token is four bytes of text
    (``approximate_encode``).  Sessions without rounds after truncation are left out.  Raises
    ``ConfigError`` for invalid settings, ``TraceError`` for rounds beyond ``context_limit_tokens``
    and if no round is left.
    """
    settings = settings or WorkloadSettings()
    if not sessions:
        raise ConfigError("there are no sessions; give a trace that has some")
    chosen = sessions[: settings.agents]
    return _finished(_columns(chosen, settings, encode or approximate_encode), settings)


def dropped_sessions(
    sessions: Sequence[Session],
    settings: WorkloadSettings,
    *,
    encode: _Encode | None = None,
) -> list[str]:
    """Return the ids of the sessions without rounds after truncation (``max_context_tokens``).

    Not even one generated token fits behind the first prompt of such a session.
    """
    if settings.max_context_tokens is None:
        return []
    contents = Contents(Vocabulary(seed=settings.seed, encode=encode or approximate_encode))
    dropped = []
    for session in sessions[: settings.agents]:
        conversation = session.start(settings, contents)
        if conversation.next_turn() is None and conversation.truncated:
            dropped.append(session.session_id)
    return dropped


def agents_from_rounds(
    columns: RoundColumns, settings: WorkloadSettings | None = None
) -> AgentTable:
    """Return the agents of pure-append trajectories, as returned by ``generate``.

    Raises what ``agents_from_sessions`` raises.
    """
    settings = settings or WorkloadSettings()
    conversations = pure_appends(columns, settings)
    if settings.agents is not None and settings.agents < conversations.sessions:
        conversations = multiplied(conversations, settings.agents, settings.seed)
    return _finished(conversations, settings)


def _finished(columns: ConversationColumns, settings: WorkloadSettings) -> AgentTable:
    """Add agents, truncate, check the context limit and round hits to blocks."""
    columns = multiplied(columns, settings.agents, settings.seed)
    columns = truncated(columns, settings.max_context_tokens)
    if not columns.sessions:
        raise TraceError(
            f"no round fits into max_context_tokens {settings.max_context_tokens}; raise it"
        )
    check_context_limit(columns, settings.context_limit_tokens)
    table = agent_table(columns, settings.block_tokens, settings.tool_delay_scale)
    table.check()
    return table


def _columns(
    sessions: Sequence[Session], settings: WorkloadSettings, encode: _Encode
) -> ConversationColumns:
    """Return all conversations with the tokens that their prompts can reuse."""
    pure = [s for s in sessions if isinstance(s, TokenSession) and not s.retained_tokens]
    if len(pure) == len(sessions):
        return pure_appends(rounds_of(pure), settings)
    contents = Contents(Vocabulary(seed=settings.seed, encode=encode))
    sharing = settings.share_across_sessions
    shared: dict[int, list[WalkedConversation]] = {}
    for sharers in _sharers(sessions) if sharing != "none" else ():
        walked = walk([session.start(settings, contents) for session in sharers], sharing)
        shared |= {id(one): found for one, found in zip(sharers, walked, strict=True)}
    return as_columns(
        [shared.get(id(session)) or _alone(session, settings, contents) for session in sessions]
    )


def _sharers(sessions: Sequence[Session]) -> Iterator[list[Session]]:
    """Yield groups of sessions that may hit each other's blocks: texts, and shared block ids.

    Token counts, and block ids that are not shared, identify no content beyond their session.
    """
    yield [session for session in sessions if isinstance(session, TextSession)]
    yield [s for s in sessions if isinstance(s, BlockSession) and s.shared_ids]


def _alone(
    session: Session, settings: WorkloadSettings, contents: Contents
) -> list[WalkedConversation]:
    """Return the conversations of a session that shares no blocks with others."""
    match session:
        case TokenSession():
            return [planned(session, settings)]
        case BlockSession() | TextSession():
            return walk([session.start(settings, contents)])[0]
    raise ConfigError(
        f"session {session.session_id} is a {type(session).__name__}, which has no recorded "
        "rounds; pass the sessions of a trace, and the number of agents in the settings"
    )
