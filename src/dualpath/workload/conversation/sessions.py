"""Sessions: the prompts of an agent turn by turn, given the generated answers (§A.3).

A ``Session`` is a value read from a trace.  ``session.start(settings, contents)`` returns a
``Conversation``, a mutable run of the session: get a prompt from ``next_turn()``, send it, pass the
generated token ids to ``record()``, and repeat until ``next_turn()`` returns None.  A replay sends
the tokens of prompts; the simulator only needs their lengths and shared prefixes, so no tokens are
created.  Nothing here does I/O or reads a clock.

    conversation = session.start(AgentSettings(), Contents(Vocabulary(seed=7)))
    while (turn := conversation.next_turn()) is not None:
        conversation.record(serve(conversation.token_ids(turn), turn.generate_tokens))
"""

import abc
from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.workload.conversation.prompts import Contents
from dualpath.workload.conversation.spans import Spans, TokenIds

MAX_AGENTS = 1_000_000


class AgentSettings(Settings, frozen=True, kw_only=True):
    """The number of agents, and limits and scales of their sessions.

    ``max_context_tokens`` limits prompt plus generated tokens (MaxLen): a turn that crosses it is
    cut there and ends the conversation.  The scales (§7.3, Fig. 9) apply before the cut.
    """

    agents: Annotated[
        int | None,
        Setting(
            "number of agents; agents beyond the sessions of the trace are sampled sessions "
            "after a synthetic first round (§A.3); none: one agent per session",
            ge=1,
            le=MAX_AGENTS,
        ),
    ] = None
    seed: Annotated[int, Setting("seed of tokens, sampling and arrivals", ge=0, lt=2**63)] = 0
    max_turns: Annotated[int | None, Setting("maximum number of turns per agent", ge=1)] = None
    max_context_tokens: Annotated[
        int | None,
        Setting("cut trajectories at this context length in tokens; none: the model's", ge=1),
    ] = None
    scale_append: Annotated[float, Setting("factor of appended tokens", gt=0, le=1000)] = 1.0
    scale_generate: Annotated[float, Setting("factor of generated tokens", gt=0, le=1000)] = 1.0


class Turn(msgspec.Struct, frozen=True):
    """One request of a conversation.

    ``prompt`` is sent unchanged and exactly ``generate_tokens`` ≥ 1 are generated.
    The first ``context_tokens`` tokens repeat what this conversation sent or received before.
    ``delay_s`` ≥ 0 is the recorded tool time before the turn, 0 if none was recorded.
    """

    prompt: Spans
    generate_tokens: int
    context_tokens: int
    delay_s: float = 0.0


class Conversation(abc.ABC):
    """One run of one session: alternate calls of ``next_turn`` and ``record``.

    ``truncated``: ``max_context_tokens`` ended the conversation early.
    """

    def __init__(self, session_id: str, settings: AgentSettings, contents: Contents) -> None:
        """Start before the first turn; sub-agents share ``contents``."""
        self.session_id = session_id
        self.settings = settings
        self.contents = contents
        self.truncated = False
        self._position = 0
        self._pending: Turn | None = None
        #: The previous prompt and its answer.
        self._previous = Spans()
        self._looked_up = (Spans(), TokenIds())

    def next_turn(self) -> Turn | None:
        """Return the next turn to send, None after the last."""
        if self._pending is not None:
            raise RuntimeError(f"{self.session_id}: record() the last turn before the next one")
        most_turns = self.settings.max_turns
        if self.truncated or (most_turns is not None and self._position >= most_turns):
            return None
        turn = self._compose(self._position)
        if turn is not None:
            turn = self._cut(turn)
        self._pending = turn
        return turn

    def token_ids(self, turn: Turn) -> list[int]:
        """Return the prompt of ``turn`` as token ids for a server."""
        return self.tokens(turn.prompt).listed()

    def tokens(self, sequence: Spans) -> TokenIds:
        """Return the tokens of a prompt, or of a sequence that ``record`` returned."""
        known, token_ids = self._looked_up
        same = known.common_tokens(sequence)
        rest = self.contents.tokens(sequence.between(same, sequence.tokens))
        token_ids = token_ids.changed_from(same, rest)
        self._looked_up = (sequence, token_ids)
        return token_ids

    def record(self, generated_token_ids: Sequence[int] | None = None) -> Spans:
        """Record the pending turn's answer, by default tokens that differ from all others.

        Return the tokens that now have KV: prompt and answer without the last token, which was
        sampled but never fed back.
        """
        if self._pending is None:
            raise RuntimeError(f"{self.session_id}: there is no turn to record")
        count = self._pending.generate_tokens
        if generated_token_ids is not None:
            count = len(generated_token_ids)
        return self.record_spans(self.contents.answer(count, generated_token_ids))

    def record_spans(self, answer: Spans) -> Spans:
        """Record the pending turn's answer, given as spans of the contents; see ``record``."""
        assert self._pending is not None, "record() checks the turn"
        turn, self._pending = self._pending, None
        self._previous = turn.prompt.then(answer)
        self._on_answer(turn, answer)
        self._position += 1
        return self._previous.first(self._previous.tokens - 1)

    def spawned(self) -> list["Conversation"]:
        """Return sub-agents that start now, in parallel to this one; call it after ``record``."""
        return []

    @abc.abstractmethod
    def _compose(self, index: int) -> Turn | None:
        """Return turn ``index`` at full length, None after the last."""

    def _on_answer(self, turn: Turn, answer: Spans) -> None:  # noqa: B027
        """Store what later turns need besides ``_previous``."""

    def _cut(self, turn: Turn) -> Turn | None:
        most_tokens = self.settings.max_context_tokens
        if most_tokens is None:
            return turn
        room = most_tokens - turn.prompt.tokens
        if room >= turn.generate_tokens:
            return turn
        self.truncated = True
        return msgspec.structs.replace(turn, generate_tokens=room) if room >= 1 else None


class Session(Protocol):
    """A recorded agent, which can be run any number of times."""

    @property
    def session_id(self) -> str:
        """The id of the session, unique within a trace."""

    @property
    def turns(self) -> int:
        """The number of recorded turns, including sub-agents."""

    def start(self, settings: AgentSettings, contents: Contents) -> Conversation:
        """Return a new conversation; raises ``ConfigError`` for unsupported settings."""

    def renamed(self, session_id: str) -> "Session":
        """Return the same session with another id."""


def scaled(tokens: int, factor: float) -> int:
    """Return ``tokens`` times ``factor``, rounded, and at least 1 unless ``tokens`` is 0."""
    return max(round(tokens * factor), 1) if tokens else 0


# ------------------------------------------------------------------------------------------ agents
# Makes the requested number of agents from recorded sessions.

#: Tokens of the synthetic first round of additional agents; the paper does not give a number.  One
#: Full Block is the minimum that makes all later block keys differ from the original's.
SYNTHETIC_APPEND_TOKENS = 64
#: Tokens generated in the synthetic round (§A.3: g_1 = 1).
SYNTHETIC_GENERATED_TOKENS = 1


def make_agents(sessions: Sequence[Session], agents: int | None, seed: int) -> list[Session]:
    """Return the first ``agents`` sessions (None: all), with additional agents if they are too few.

    An additional agent is a sampled session with a synthetic round of random tokens prepended,
    which generates one token (§A.3).
    """
    if agents is None:
        return list(sessions)
    if not 1 <= agents <= MAX_AGENTS:
        raise ConfigError(f"agents is {agents}; it must be 1 to {MAX_AGENTS}")
    if not sessions:
        raise ConfigError("there are no sessions; give a trace that has some")
    chosen = list(sessions[:agents])
    sampled = sampled_sessions(len(sessions), agents - len(chosen), seed)
    for copy, index in enumerate(sampled.tolist(), start=1):
        original = sessions[index]
        chosen.append(AdditionalAgent(original.renamed(f"{original.session_id}+{copy}")))
    return chosen


def sampled_sessions(sessions: int, additional: int, seed: int) -> NDArray[np.int64]:
    """Return the index of the session that each additional agent repeats."""
    return np.random.default_rng([seed, 1]).integers(0, sessions, additional)


class AdditionalAgent(msgspec.Struct, frozen=True):
    """A session preceded by a synthetic round."""

    original: Session

    @property
    def session_id(self) -> str:
        """The id of this agent."""
        return self.original.session_id

    @property
    def turns(self) -> int:
        """The number of recorded turns plus the synthetic one."""
        return self.original.turns + 1

    def start(self, settings: AgentSettings, contents: Contents) -> Conversation:
        """Return a new conversation."""
        return _PrefixedConversation(self.original.start(settings, contents), None)

    def renamed(self, session_id: str) -> Session:
        """Return the same agent with another id."""
        return AdditionalAgent(self.original.renamed(session_id))


class _PrefixedConversation(Conversation):
    """Prepends ``prefix`` to every prompt of ``inner``; None: a synthetic round creates it."""

    def __init__(self, inner: Conversation, prefix: Spans | None) -> None:
        # The inner conversation counts only its own turns, without the synthetic one.
        settings = msgspec.structs.replace(inner.settings, max_turns=None)
        super().__init__(inner.session_id, settings, inner.contents)
        self._inner = inner
        self._prefix = prefix

    def _compose(self, index: int) -> Turn | None:
        if self._prefix is None:
            appended = self.contents.random(self.session_id, -1 + 2**32, SYNTHETIC_APPEND_TOKENS)
            return Turn(appended, SYNTHETIC_GENERATED_TOKENS, 0)
        turn = self._inner.next_turn()
        if turn is None:
            self.truncated = self._inner.truncated
            return None
        return msgspec.structs.replace(
            turn,
            prompt=self._prefix.then(turn.prompt),
            context_tokens=self._prefix.tokens + turn.context_tokens,
        )

    def _on_answer(self, turn: Turn, answer: Spans) -> None:
        if self._prefix is None:
            self._prefix = self._previous
        else:
            self._inner.record_spans(answer)

    def spawned(self) -> list[Conversation]:
        """Return the inner conversation's sub-agents, after the same prefix."""
        if self._position < 2:
            return []
        return [_PrefixedConversation(agent, self._prefix) for agent in self._inner.spawned()]
