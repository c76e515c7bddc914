"""Traces and generated trajectories as the simulator's ``AgentTable`` (§7.2, §A.3, §A.4).

    agents = agents_from_sessions(read_trace("trace.jsonl"), WorkloadSettings(agents=2048))

Prompts, cuts, scales and additional agents are those of ``dualpath replay`` with the same
settings.  Hits are what a perfect store would give, from what every prompt really shares with
earlier rounds: full blocks, never the whole prompt, and never the last generated token.
"""

from collections.abc import Callable, Sequence
from typing import get_args

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError, TraceError
from dualpath.laboratory.workload.columns.agent_table import AgentTable
from dualpath.laboratory.workload.columns.block_lane import BlockLane
from dualpath.laboratory.workload.columns.lanes import (
    Lanes,
    agent_table,
    multiplied,
    refuse_beyond,
    truncated,
)
from dualpath.laboratory.workload.columns.text_lane import TextLane, TextPieces, approximate_encode
from dualpath.laboratory.workload.columns.token_lane import (
    RoundColumns,
    pure_append_lanes,
    walked_token_session,
)
from dualpath.laboratory.workload.columns.walk import Limits, Sharing, WalkedLane, as_lanes, walk
from dualpath.laboratory.workload.conversation.agents import MAX_AGENTS, SYNTHETIC_APPEND_TOKENS
from dualpath.laboratory.workload.conversation.block_session import BlockSession
from dualpath.laboratory.workload.conversation.session import Session, SessionSettings
from dualpath.laboratory.workload.conversation.text_session import TextSession
from dualpath.laboratory.workload.conversation.token_session import TokenSession

_Encode = Callable[[str], Sequence[int]]


class WorkloadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How sessions become agents of the simulator.

    ``agents`` None: as many as there are sessions; more are made as in §A.3, drawn with ``seed``,
    the synthetic round appending ``synthetic_append_tokens``.  ``max_turns`` bounds every
    conversation.  ``max_context_tokens`` truncates trajectories there (MaxLen), while
    ``context_limit_tokens``, the model's, refuses rounds beyond it; None for no limit.
    ``scale_append`` and ``scale_generate`` multiply every round's lengths (§7.3, Fig. 9), before
    truncation.  ``tool_delay_scale`` multiplies recorded tool delays, 0 leaves them out.  Hits
    come in blocks of ``block_tokens``.  ``share_across_sessions`` lets sessions hit what others
    stored: in rounds of lower number (``parallel``), or in all rounds of the sessions before them
    (``sequential``).  Additional agents share with nobody, their first tokens being random.
    """

    agents: int | None = None
    seed: int = 0
    synthetic_append_tokens: int = SYNTHETIC_APPEND_TOKENS
    max_turns: int | None = None
    max_context_tokens: int | None = None
    context_limit_tokens: int | None = None
    scale_append: float = 1.0
    scale_generate: float = 1.0
    tool_delay_scale: float = 0.0
    block_tokens: int = 64
    share_across_sessions: Sharing = "none"

    def check(self) -> None:
        """Raise ``ConfigError`` for the first setting out of range."""
        self._require("agents", 1, MAX_AGENTS)
        self._require("seed", 0, (1 << 63) - 1)
        self._require("synthetic_append_tokens", 1, 1 << 20)
        self._require("context_limit_tokens", 1, 1 << 30)
        self._require("tool_delay_scale", 0, 1e6)
        self._require("block_tokens", 1, 1 << 16)
        if self.share_across_sessions not in get_args(Sharing):
            raise ConfigError(
                f"share_across_sessions is {self.share_across_sessions!r}, must be one of "
                f"{', '.join(get_args(Sharing))}"
            )
        self.session_settings().check()

    def session_settings(self) -> SessionSettings:
        """Return what a replay would be told."""
        return SessionSettings(
            seed=self.seed,
            max_context_tokens=self.max_context_tokens,
            max_turns=self.max_turns,
            scale_append=self.scale_append,
            scale_generate=self.scale_generate,
        )

    def limits(self) -> Limits:
        """Return where conversations end."""
        return Limits(self.max_turns, self.max_context_tokens)

    def _require(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"{name} is {value}, must be between {least:g} and {most:g}; correct the setting"
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
    lanes = _lanes(chosen, settings, encode or approximate_encode)
    return _finished(lanes, settings)


def agents_from_rounds(
    columns: RoundColumns, settings: WorkloadSettings | None = None
) -> AgentTable:
    """Return the agents of trajectories of pure appends, as ``generate`` makes them.

    Raises what ``agents_from_sessions`` does.
    """
    settings = settings or WorkloadSettings()
    settings.check()
    lanes = pure_append_lanes(columns, settings.session_settings(), settings.limits())
    if settings.agents is not None and settings.agents < lanes.sessions:
        lanes = multiplied(lanes, settings.agents, settings.seed, 0)
    return _finished(lanes, settings)


def rounds_of(sessions: Sequence[TokenSession]) -> RoundColumns:
    """Return pure-append sessions as columns."""
    rounds = [session.trajectory.rounds for session in sessions]
    flat = [one for part in rounds for one in part]
    counts = np.asarray([0, *map(len, rounds)], np.int64)
    return RoundColumns(
        first_round=np.cumsum(counts),
        append_tokens=np.asarray([one.append_tokens for one in flat], np.int64),
        generated_tokens=np.asarray([one.generated_tokens for one in flat], np.int64),
        delay_s=np.asarray([one.delay_s for one in flat], np.float32),
    )


def _finished(lanes: Lanes, settings: WorkloadSettings) -> AgentTable:
    """Multiply, cut, refuse and round to blocks."""
    lanes = multiplied(lanes, settings.agents, settings.seed, settings.synthetic_append_tokens)
    lanes = truncated(lanes, settings.max_context_tokens)
    if not lanes.sessions:
        raise TraceError(
            f"no round fits max_context_tokens {settings.max_context_tokens}; raise it"
        )
    refuse_beyond(lanes, settings.context_limit_tokens)
    table = agent_table(lanes, settings.block_tokens, settings.tool_delay_scale)
    table.check()
    return table


def _lanes(sessions: Sequence[Session], settings: WorkloadSettings, encode: _Encode) -> Lanes:
    """Return one lane per conversation, walking each kind of session in its own way."""
    pure = [s for s in sessions if isinstance(s, TokenSession) and not s.kept_tokens]
    if len(pure) == len(sessions):
        return pure_append_lanes(rounds_of(pure), settings.session_settings(), settings.limits())
    pieces = TextPieces(encode)
    if settings.share_across_sessions != "none":
        # Token counts and block ids name nothing beyond their session: only text is shared.
        texts = [session for session in sessions if isinstance(session, TextSession)]
        lanes = [TextLane(session, settings.session_settings(), pieces) for session in texts]
        shared = iter(walk(lanes, settings.limits(), settings.share_across_sessions))
        return as_lanes(
            [
                next(shared) if isinstance(session, TextSession) else _walked(session, settings)
                for session in sessions
            ]
        )
    return as_lanes([_walked(session, settings, pieces) for session in sessions])


def _walked(
    session: Session, settings: WorkloadSettings, pieces: TextPieces | None = None
) -> list[WalkedLane]:
    """Return the conversations of one session that shares with nobody."""
    told = settings.session_settings()
    match session:
        case TokenSession():
            return [walked_token_session(session, told, settings.limits())]
        case BlockSession():
            session.start(told)  # refuses settings that do not fit block ids
            return walk([BlockLane(session, told)], settings.limits())[0]
        case TextSession() if pieces is not None:
            return walk([TextLane(session, told, pieces)], settings.limits())[0]
    raise ConfigError(
        f"session {session.session_id} is a {type(session).__name__}, which has no recorded "
        "rounds; give the sessions of a trace and the number of agents in the settings"
    )
