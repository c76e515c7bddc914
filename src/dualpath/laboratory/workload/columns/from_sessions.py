"""Converts traces and generated trajectories to the simulator's ``AgentTable`` (§7.2, §A.3, §A.4).

    agents = agents_from_sessions(read_trace("trace.jsonl"), WorkloadSettings(agents=2048))

Prompts, cuts, scales and additional agents are the same as in ``dualpath replay`` with the same
settings.  Hits are those of an unlimited store, computed from what every prompt shares with earlier
rounds: full blocks, never the whole prompt, and never the last generated token.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from dualpath.core.errors import ConfigError, TraceError
from dualpath.core.settings import Setting
from dualpath.laboratory.workload.columns.agent_table import AgentTable
from dualpath.laboratory.workload.columns.conversations import (
    ConversationColumns,
    agent_table,
    check_context_limit,
    multiplied,
    truncated,
)
from dualpath.laboratory.workload.columns.rounds import RoundColumns, pure_appends, rounds_of
from dualpath.laboratory.workload.columns.walk import (
    Sharing,
    WalkedConversation,
    as_columns,
    planned,
    walk,
)
from dualpath.laboratory.workload.conversation.agents import SYNTHETIC_APPEND_TOKENS
from dualpath.laboratory.workload.conversation.block_session import BlockSession
from dualpath.laboratory.workload.conversation.contents import Contents, Vocabulary
from dualpath.laboratory.workload.conversation.session import AgentSettings, Session
from dualpath.laboratory.workload.conversation.text_encoder import approximate_encode
from dualpath.laboratory.workload.conversation.text_session import TextSession
from dualpath.laboratory.workload.conversation.token_session import TokenSession

_Encode = Callable[[str], Sequence[int]]


class WorkloadSettings(AgentSettings, frozen=True, kw_only=True):
    """How sessions are converted to agents of the simulator.

    ``max_context_tokens`` truncates trajectories, while rounds beyond ``context_limit_tokens``, the
    model's limit, are refused; None for no limit.  With ``share_across_sessions`` sessions hit
    blocks that others stored: in rounds of lower number (``parallel``), or in all rounds of earlier
    sessions (``sequential``).  Additional agents share with no other, because they begin with
    random tokens.
    """

    synthetic_append_tokens: Annotated[
        int,
        Setting("tokens of the first round of additional agents", ge=1, le=1 << 20, flag=False),
    ] = SYNTHETIC_APPEND_TOKENS
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


def agents_from_rounds(
    columns: RoundColumns, settings: WorkloadSettings | None = None
) -> AgentTable:
    """Return the agents of pure-append trajectories, as returned by ``generate``.

    Raises what ``agents_from_sessions`` raises.
    """
    settings = settings or WorkloadSettings()
    conversations = pure_appends(columns, settings)
    if settings.agents is not None and settings.agents < conversations.sessions:
        conversations = multiplied(conversations, settings.agents, settings.seed, 0)
    return _finished(conversations, settings)


def _finished(columns: ConversationColumns, settings: WorkloadSettings) -> AgentTable:
    """Add agents, truncate, check the context limit and round hits to blocks."""
    added_tokens = settings.synthetic_append_tokens
    columns = multiplied(columns, settings.agents, settings.seed, added_tokens)
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
