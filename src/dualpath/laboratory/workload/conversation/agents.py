"""From recorded sessions to agents: as many as asked for, arriving all at once or one by one."""

from collections.abc import Sequence

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.conversation.session import (
    Conversation,
    Session,
    SessionSettings,
    Turn,
    random_token_ids,
)

#: Length of the synthetic first round of additional agents; the paper does not tell.  One Full
#: Block is the least that makes all later block keys differ from the original's.
SYNTHETIC_APPEND_TOKENS = 64
MAX_AGENTS = 1_000_000


def make_agents(sessions: Sequence[Session], agents: int | None, seed: int) -> list[Session]:
    """Return the first ``agents`` sessions, or all of them if None, and more where asked for.

    Additional agents are sampled existing trajectories with a synthetic round of random tokens
    prepended, which generates one token (§A.3).
    """
    if agents is None:
        return list(sessions)
    if not 1 <= agents <= MAX_AGENTS:
        raise ConfigError(f"agents is {agents}, must be 1 to {MAX_AGENTS}")
    if not sessions:
        raise ConfigError("there is no session to make agents of; give a trace that has some")
    chosen = list(sessions[:agents])
    sampled = np.random.default_rng([seed, 1]).integers(0, len(sessions), agents - len(chosen))
    for copy, index in enumerate(sampled.tolist(), start=1):
        original = sessions[index]
        chosen.append(AdditionalAgent(original.renamed(f"{original.session_id}+{copy}")))
    return chosen


def arrival_times_s(agents: int, agents_per_s: float | None, seed: int) -> list[float]:
    """Return when each agent starts: all at 0, or Poisson at ``agents_per_s`` (§7.4)."""
    if agents_per_s is None:
        return [0.0] * agents
    if not 0 < agents_per_s <= 1e6:
        raise ConfigError(f"agents per second is {agents_per_s}, must be above 0 and at most 1e6")
    gaps = np.random.default_rng([seed, 2]).exponential(1 / agents_per_s, agents)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


class AdditionalAgent(msgspec.Struct, frozen=True):
    """A session with a synthetic round before it."""

    original: Session

    @property
    def session_id(self) -> str:
        """Name given to this agent."""
        return self.original.session_id

    @property
    def turns(self) -> int:
        """Recorded turns and the synthetic one."""
        return self.original.turns + 1

    def start(self, settings: SessionSettings) -> Conversation:
        """Return a fresh run."""
        return _PrefixedConversation(self.original.start(settings), settings, None)

    def renamed(self, session_id: str) -> Session:
        """Return the same agent under another id."""
        return AdditionalAgent(self.original.renamed(session_id))


class _PrefixedConversation(Conversation):
    """Puts ``prefix`` before every prompt of ``inner``; None: obtain it by a synthetic round."""

    def __init__(
        self, inner: Conversation, settings: SessionSettings, prefix: list[int] | None
    ) -> None:
        # The inner conversation counts its own turns; the synthetic one comes on top.
        super().__init__(inner.session_id, msgspec.structs.replace(settings, max_turns=None))
        self._inner = inner
        self._prefix = prefix

    def _compose(self, index: int) -> Turn | None:
        if self._prefix is None:
            count = SYNTHETIC_APPEND_TOKENS
            return Turn(random_token_ids(self._settings, self.session_id, -1 + 2**32, count), 1, 0)
        turn = self._inner.next_turn()
        if turn is None:
            self.truncated = self._inner.truncated
            return None
        return msgspec.structs.replace(
            turn,
            prompt_token_ids=self._prefix + turn.prompt_token_ids,
            context_tokens=len(self._prefix) + turn.context_tokens,
        )

    def _remember(self, index: int, turn: Turn, generated_token_ids: Sequence[int]) -> None:
        if self._prefix is None:
            self._prefix = [*turn.prompt_token_ids, *generated_token_ids]
        else:
            self._inner.record(generated_token_ids)

    def spawned(self) -> list[Conversation]:
        """Return the inner conversation's sub-agents, behind the same prefix."""
        if self._position < 2:
            return []
        helpers = self._inner.spawned()
        return [_PrefixedConversation(h, self._settings, self._prefix) for h in helpers]
