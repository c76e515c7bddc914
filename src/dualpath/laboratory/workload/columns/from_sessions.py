"""Traces and generated trajectories as the simulator's ``AgentTable`` (§7.2, §A.3, §A.4).

    agents = agents_from_sessions(read_trace("trace.jsonl"), WorkloadSettings(agents=2048))

Prompts, cuts, scales and additional agents are those of ``dualpath replay`` with the same
settings.  Hits are what a perfect store would give, from what every prompt really shares with
earlier rounds: full blocks, never the whole prompt, and never the last generated token.
"""

from collections.abc import Callable, Sequence
from typing import get_args

from dualpath.core.errors import ConfigError, TraceError
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
from dualpath.laboratory.workload.conversation.session import AgentSettings, Session, require
from dualpath.laboratory.workload.conversation.text_encoder import approximate_encode
from dualpath.laboratory.workload.conversation.text_session import TextSession
from dualpath.laboratory.workload.conversation.token_session import TokenSession

_Encode = Callable[[str], Sequence[int]]


class WorkloadSettings(AgentSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How sessions become agents of the simulator.

    The synthetic round of additional agents appends ``synthetic_append_tokens``.
    ``max_context_tokens`` truncates trajectories there (MaxLen), while ``context_limit_tokens``,
    the model's, refuses rounds beyond it; None for no limit.  ``tool_delay_scale`` multiplies
    recorded tool delays, 0 leaves them out.  Hits come in blocks of ``block_tokens``.
    ``share_across_sessions`` lets sessions hit what others stored: in rounds of lower number
    (``parallel``), or in all rounds of the sessions before them (``sequential``).  Additional
    agents share with nobody, their first tokens being random.
    """

    synthetic_append_tokens: int = SYNTHETIC_APPEND_TOKENS
    context_limit_tokens: int | None = None
    tool_delay_scale: float = 0.0
    block_tokens: int = 64
    share_across_sessions: Sharing = "none"

    def check(self) -> None:
        """Raise ``ConfigError`` for the first setting out of range."""
        super().check()
        require("synthetic_append_tokens", self.synthetic_append_tokens, 1, 1 << 20)
        require("context_limit_tokens", self.context_limit_tokens, 1, 1 << 30)
        require("tool_delay_scale", self.tool_delay_scale, 0, 1e6)
        require("block_tokens", self.block_tokens, 1, 1 << 16)
        if self.share_across_sessions not in get_args(Sharing):
            raise ConfigError(
                f"share_across_sessions is {self.share_across_sessions!r}, must be one of "
                f"{', '.join(get_args(Sharing))}"
            )


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
    settings.check()
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
    settings.check()
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
    # Token counts and block ids name nothing beyond their session: only text is shared.
    shared = sharing != "none"
    texts = [s.start(settings, contents) for s in sessions if shared and isinstance(s, TextSession)]
    walked = iter(walk(texts, sharing))
    return as_columns(
        [
            next(walked)
            if shared and isinstance(session, TextSession)
            else _alone(session, settings, contents)
            for session in sessions
        ]
    )


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
