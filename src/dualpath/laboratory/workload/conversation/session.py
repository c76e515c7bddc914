"""Sessions: what an agent sends, turn by turn, given what it got as answers (§A.3).

A ``Session`` is a value read from a trace.  ``session.start(settings, contents)`` makes a
``Conversation``, the mutable run of it: ask ``next_turn()`` for a prompt, send it, hand the
generated token ids to ``record()``, and so on until ``next_turn()`` is None.  A replay sends the
prompts' tokens; the simulator asks how long they are and what they share, and no token is made.
Nothing here does I/O or knows a clock.

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
    """How many agents sessions become, and what of the sessions they send.

    ``max_context_tokens`` bounds prompt plus generated tokens (MaxLen): a turn that crosses it is
    cut there and ends the conversation.  The scales (§7.3, Fig. 9) apply before the cut.
    """

    agents: Annotated[
        int | None,
        Setting(
            "more than the trace has are made by sampling and a synthetic first round (§A.3); "
            "none: as many as it has",
            ge=1,
            le=MAX_AGENTS,
        ),
    ] = None
    seed: Annotated[int, Setting("of tokens, sampling and arrivals", ge=0, lt=2**63)] = 0
    max_turns: Annotated[int | None, Setting("turns per agent at most", ge=1)] = None
    max_context_tokens: Annotated[
        int | None, Setting("cuts trajectories at this context length; none: the model's", ge=1)
    ] = None
    scale_append: Annotated[float, Setting("multiplies what turns append", gt=0, le=1000)] = 1.0
    scale_generate: Annotated[float, Setting("multiplies what turns generate", gt=0, le=1000)] = 1.0


class Turn(msgspec.Struct, frozen=True):
    """One request of a conversation.

    ``prompt`` is sent as it is and exactly ``generate_tokens`` ≥ 1 come back.
    ``context_tokens`` leading tokens repeat what this conversation sent or received before.
    ``delay_s`` ≥ 0 is the recorded tool time before the turn, 0 where none was recorded.
    """

    prompt: Spans
    generate_tokens: int
    context_tokens: int
    delay_s: float = 0.0


class Conversation(abc.ABC):
    """One run of one session: alternates ``next_turn`` and ``record``.

    ``truncated``: ``max_context_tokens`` ended it early.
    """

    def __init__(self, session_id: str, settings: AgentSettings, contents: Contents) -> None:
        """Start before the first turn; sub-agents share ``contents``."""
        self.session_id = session_id
        self.settings = settings
        self.contents = contents
        self.truncated = False
        self._position = 0
        self._pending: Turn | None = None
        #: The turn before and its answer.
        self._previous = Spans()
        self._looked_up = (Spans(), TokenIds())

    def next_turn(self) -> Turn | None:
        """Return the next turn to send, or None when the conversation is over."""
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
        """Return the prompt of ``turn`` as a server takes it."""
        return self.tokens(turn.prompt).listed()

    def tokens(self, sequence: Spans) -> TokenIds:
        """Return the tokens of a prompt, or of what ``record`` returned."""
        known, token_ids = self._looked_up
        same = known.common_tokens(sequence)
        rest = self.contents.tokens(sequence.between(same, sequence.tokens))
        token_ids = token_ids.changed_from(same, rest)
        self._looked_up = (sequence, token_ids)
        return token_ids

    def record(self, generated_token_ids: Sequence[int] | None = None) -> Spans:
        """Take the pending turn's answer, by default tokens unlike all others.

        Returns what has KV-cache now: prompt and answer without the last token, which was sampled
        but never fed back.
        """
        if self._pending is None:
            raise RuntimeError(f"{self.session_id}: there is no turn to record")
        count = self._pending.generate_tokens
        if generated_token_ids is not None:
            count = len(generated_token_ids)
        return self.go_on(self.contents.answer(count, generated_token_ids))

    def go_on(self, answer: Spans) -> Spans:
        """Take the answer to the pending turn as a part of the contents, as ``record`` does."""
        assert self._pending is not None, "record() asks for the turn"
        turn, self._pending = self._pending, None
        self._previous = turn.prompt.then(answer)
        self._remember(turn, answer)
        self._position += 1
        return self._previous.first(self._previous.tokens - 1)

    def spawned(self) -> list["Conversation"]:
        """Return sub-agents that start now, beside this conversation; asked after ``record``."""
        return []

    @abc.abstractmethod
    def _compose(self, index: int) -> Turn | None:
        """Return turn ``index`` at full length, or None past the last."""

    def _remember(self, turn: Turn, answer: Spans) -> None:  # noqa: B027
        """Keep what later turns build on, beyond ``_previous``."""

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
    """A recorded agent, ready to be run any number of times."""

    @property
    def session_id(self) -> str:
        """Name of the session, unique within a trace."""

    @property
    def turns(self) -> int:
        """Recorded turns, sub-agents included."""

    def start(self, settings: AgentSettings, contents: Contents) -> Conversation:
        """Return a fresh run; raise ``ConfigError`` where a setting does not fit this session."""

    def renamed(self, session_id: str) -> "Session":
        """Return the same session under another id."""


def scaled(tokens: int, factor: float) -> int:
    """Return ``tokens`` times ``factor``, rounded; never 0 where ``tokens`` is not."""
    return max(round(tokens * factor), 1) if tokens else 0
