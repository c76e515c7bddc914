"""Sessions of token counts, ``[append, generated]`` per round (§A.3)."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from dualpath.core.request import Trajectory
from dualpath.workload.conversation.prompts import Contents
from dualpath.workload.conversation.sessions import (
    AgentSettings,
    Conversation,
    Session,
    Turn,
    scaled,
)
from dualpath.workload.conversation.spans import Spans


class PlannedRound(NamedTuple):
    """A round in tokens, known before any answer.

    Its prompt consists of the first ``context_tokens`` of prompt and answer of round ``source``
    (-1: none) and ``append_tokens`` new ones.  ``reuse_tokens`` of the context have KV.
    """

    source: int
    context_tokens: int
    append_tokens: int
    generated_tokens: int
    reuse_tokens: int
    delay_s: float


class _Sent(NamedTuple):
    """Tokens of prompt and answer of a round (-1: of none): as sent, and as recorded."""

    round: int
    tokens: int
    recorded_tokens: int


class TokenSession(msgspec.Struct, frozen=True):
    """A trajectory of token counts; appended tokens are random, seeded by session and round.

    If ``retained_tokens[i]`` is given and not None, round i retains only that many first tokens of
    what was sent before (a compaction or an edit); None is a pure append.
    """

    trajectory: Trajectory
    retained_tokens: tuple[int | None, ...] = ()

    @property
    def session_id(self) -> str:
        """The id of the trajectory."""
        return self.trajectory.session_id

    @property
    def turns(self) -> int:
        """The number of recorded rounds."""
        return len(self.trajectory.rounds)

    def start(self, settings: AgentSettings, contents: Contents) -> Conversation:
        """Return a new conversation."""
        return TokenConversation(self, settings, contents)

    def renamed(self, session_id: str) -> Session:
        """Return the same session with another id, and so with other random tokens."""
        trajectory = msgspec.structs.replace(self.trajectory, session_id=session_id)
        return msgspec.structs.replace(self, trajectory=trajectory)

    def planned(self, settings: AgentSettings) -> Iterator[PlannedRound]:
        """Yield the rounds, scaled but not cut at ``max_context_tokens``.

        Prompt i+1 = context + A_{i+1}.  A round that retains only a part takes its context from the
        previous round or, if that one is too short, from the longest round so far, because the
        trace does not contain from which round it is.
        """
        previous = longest = _Sent(-1, 0, 0)
        retained_tokens = self.retained_tokens
        for index, recorded in enumerate(self.trajectory.rounds[: settings.max_turns]):
            retained = retained_tokens[index] if index < len(retained_tokens) else None
            source = previous
            if retained is not None and retained > source.recorded_tokens:
                source = longest
            context, before = source.tokens, source.recorded_tokens
            if retained is not None and retained < before:
                # Scaled or cut rounds differ in length from recorded ones: retain the same share.
                context, before = retained * context // before, retained
            append = scaled(recorded.append_tokens, settings.scale_append)
            generated = scaled(recorded.generated_tokens, settings.scale_generate)
            # The last token of an answer has no KV.
            reuse = min(context, max(source.tokens - 1, 0))
            yield PlannedRound(source.round, context, append, generated, reuse, recorded.delay_s)
            in_trace = before + recorded.append_tokens + recorded.generated_tokens
            previous = _Sent(index, context + append + generated, in_trace)
            if in_trace > longest.recorded_tokens:
                longest = previous


class TokenConversation(Conversation):
    """Composes the planned rounds; retained answers are the tokens that the server generated."""

    def __init__(self, session: TokenSession, settings: AgentSettings, contents: Contents) -> None:
        """Start before the first round."""
        super().__init__(session.session_id, settings, contents)
        self._rounds = list(session.planned(settings))
        self._last_use = {planned.source: index for index, planned in enumerate(self._rounds)}
        self._sent = {-1: Spans()}

    def _compose(self, index: int) -> Turn | None:
        if index >= len(self._rounds):
            return None
        planned = self._rounds[index]
        context = self._sent[planned.source].first(planned.context_tokens)
        if self._last_use[planned.source] == index:
            del self._sent[planned.source]
        append = self.contents.random(self.session_id, index, planned.append_tokens)
        return Turn(
            prompt=context.then(append),
            generate_tokens=planned.generated_tokens,
            context_tokens=context.tokens,
            delay_s=planned.delay_s,
        )

    def _on_answer(self, turn: Turn, answer: Spans) -> None:
        if self._position in self._last_use:
            self._sent[self._position] = self._previous
