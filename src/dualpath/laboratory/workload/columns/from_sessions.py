"""Traces and generated trajectories as the simulator's ``AgentTable`` (§7.2, §A.3, §A.4).

    agents = agents_from_sessions(read_trace("trace.jsonl"), WorkloadSettings(agents=2048))

Prompts, cuts, scales and additional agents are those of ``dualpath replay`` with the same
settings.  Hits are what a perfect store would give, from what every prompt really shares with
earlier rounds: full blocks, never the whole prompt, and never the last generated token.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from dualpath.core.errors import ConfigError, TraceError
from dualpath.core.settings import Setting
from dualpath.laboratory.workload.columns.agent_table import AgentTable
from dualpath.laboratory.workload.columns.conversations import (
    ConversationColumns,
    agent_table,
    multiplied,
    refuse_beyond,
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
    """How sessions become agents of the simulator.

    ``max_context_tokens`` truncates trajectories, while ``context_limit_tokens``, the model's,
    refuses rounds beyond it; None for no limit.  With ``share_across_sessions`` sessions hit what
    others stored: in rounds of lower number (``parallel``), or in all rounds of the sessions before
    them (``sequential``).  Additional agents share with nobody, their first tokens being random.
    """

    synthetic_append_tokens: Annotated[
        int, Setting("of the first round of additional agents", ge=1, le=1 << 20, flag=False)
    ] = SYNTHETIC_APPEND_TOKENS
    context_limit_tokens: Annotated[
        int | None, Setting("the model's", ge=1, le=1 << 30, flag=False)
    ] = None
    tool_delay_scale: Annotated[
        float,
        Setting("multiplies recorded delays, 0 leaves them out", ge=0, le=1e6, flag=False),
    ] = 0.0
    block_tokens: Annotated[int, Setting("in which hits come", ge=1, le=1 << 16, flag=False)] = 64
    share_across_sessions: Annotated[
        Sharing, Setting("sessions hit each other's blocks: side by side, or one after the other")
    ] = "none"


def agents_from_sessions(
    sessions: Sequence[Session],
    settings: WorkloadSettings | None = None,
    *,
    encode: _Encode | None = None,
) -> AgentTable:
    """Return the agents of a trace of any format; sub-agents follow their session's agent.

    ``encode`` turns text into token ids as for a replay; without it a token is four bytes of
    text (``approximate_encode``).  Sessions of which truncation leaves nothing are left out.
    Raises ``ConfigError`` for settings that do not fit, ``TraceError`` for rounds beyond
    ``context_limit_tokens`` and where no round is left.
    """
    settings = settings or WorkloadSettings()
    if not sessions:
        raise ConfigError("there is no session to make agents of; give a trace that has some")
    chosen = sessions[: settings.agents]
    return _finished(_columns(chosen, settings, encode or approximate_encode), settings)


def agents_from_rounds(
    columns: RoundColumns, settings: WorkloadSettings | None = None
) -> AgentTable:
    """Return the agents of trajectories of pure appends, as ``generate`` makes them.

    Raises what ``agents_from_sessions`` does.
    """
    settings = settings or WorkloadSettings()
    conversations = pure_appends(columns, settings)
    if settings.agents is not None and settings.agents < conversations.sessions:
        conversations = multiplied(conversations, settings.agents, settings.seed, 0)
    return _finished(conversations, settings)


def _finished(columns: ConversationColumns, settings: WorkloadSettings) -> AgentTable:
    """Multiply, cut, refuse and round to blocks."""
    added_tokens = settings.synthetic_append_tokens
    columns = multiplied(columns, settings.agents, settings.seed, added_tokens)
    columns = truncated(columns, settings.max_context_tokens)
    if not columns.sessions:
        raise TraceError(
            f"no round fits max_context_tokens {settings.max_context_tokens}; raise it"
        )
    refuse_beyond(columns, settings.context_limit_tokens)
    table = agent_table(columns, settings.block_tokens, settings.tool_delay_scale)
    table.check()
    return table


def _columns(
    sessions: Sequence[Session], settings: WorkloadSettings, encode: _Encode
) -> ConversationColumns:
    """Return all conversations with what their prompts could reuse."""
    pure = [s for s in sessions if isinstance(s, TokenSession) and not s.kept_tokens]
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
    """Yield the sessions that may hit each other's blocks: texts, and block ids of one scope.

    Token counts name nothing beyond their session, nor do most block ids.
    """
    yield [session for session in sessions if isinstance(session, TextSession)]
    yield [s for s in sessions if isinstance(s, BlockSession) and s.shared_ids]


def _alone(
    session: Session, settings: WorkloadSettings, contents: Contents
) -> list[WalkedConversation]:
    """Return the conversations of one session that shares with nobody."""
    match session:
        case TokenSession():
            return [planned(session, settings)]
        case BlockSession() | TextSession():
            return walk([session.start(settings, contents)])[0]
    raise ConfigError(
        f"session {session.session_id} is a {type(session).__name__}, which has no recorded "
        "rounds; give the sessions of a trace and the number of agents in the settings"
    )
