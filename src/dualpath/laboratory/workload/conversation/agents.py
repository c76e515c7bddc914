"""Makes the requested number of agents from recorded sessions."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.conversation.contents import Contents
from dualpath.laboratory.workload.conversation.session import (
    MAX_AGENTS,
    AgentSettings,
    Conversation,
    Session,
    Turn,
)
from dualpath.laboratory.workload.conversation.spans import Spans

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
