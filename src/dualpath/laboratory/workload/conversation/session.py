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

from dualpath.core.settings import Setting, Settings
from dualpath.laboratory.workload.conversation.contents import Contents
from dualpath.laboratory.workload.conversation.spans import Spans, TokenIds

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
