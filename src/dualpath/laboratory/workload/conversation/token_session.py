"""Sessions of token counts, ``[append, generated]`` per round (§A.3)."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from dualpath.core.request import Trajectory
from dualpath.laboratory.workload.conversation.contents import Contents
from dualpath.laboratory.workload.conversation.session import (
    AgentSettings,
    Conversation,
    Session,
    Turn,
    scaled,
)
from dualpath.laboratory.workload.conversation.spans import Spans


class PlannedRound(NamedTuple):
    """A round in tokens, known before any answer.

    Its prompt is the first ``context_tokens`` of prompt and answer of round ``source`` (-1: none
    are kept) and ``append_tokens`` new ones.  ``reuse_tokens`` of the context have KV-cache.
    """

    source: int
    context_tokens: int
    append_tokens: int
    generated_tokens: int
    reuse_tokens: int
    delay_s: float


class _Sent(NamedTuple):
    """Prompt and answer of a round (-1: of none) in tokens: really sent, and recorded."""

    round: int
    tokens: int
    recorded_tokens: int


class TokenSession(msgspec.Struct, frozen=True):
    """A trajectory of lengths; its appended tokens are random, seeded per session and round.

    ``kept_tokens[i]``, where given and not None, says that round i keeps only that many leading
    tokens of what was sent before (a compaction or an edit); None is a pure append.
    """

    trajectory: Trajectory
    kept_tokens: tuple[int | None, ...] = ()

    @property
    def session_id(self) -> str:
        """Name of the trajectory."""
        return self.trajectory.session_id

    @property
    def turns(self) -> int:
        """Recorded rounds."""
        return len(self.trajectory.rounds)

    def start(self, settings: AgentSettings, contents: Contents) -> Conversation:
        """Return a fresh run of the trajectory."""
        return TokenConversation(self, settings, contents)

    def renamed(self, session_id: str) -> Session:
        """Return the same rounds under another id, hence with other random tokens."""
        trajectory = msgspec.structs.replace(self.trajectory, session_id=session_id)
        return msgspec.structs.replace(self, trajectory=trajectory)

    def planned(self, settings: AgentSettings) -> Iterator[PlannedRound]:
        """Yield the rounds, scaled and not cut at ``max_context_tokens``.

        Prompt i+1 = context + A_{i+1}.  A round that keeps less than everything takes its context
        from the previous round or, where that one is too short, from the longest so far: the
        trace has lengths, not which request.
        """
        previous = longest = _Sent(-1, 0, 0)
        kept_tokens = self.kept_tokens
        for index, recorded in enumerate(self.trajectory.rounds[: settings.max_turns]):
            kept = kept_tokens[index] if index < len(kept_tokens) else None
            source = previous
            if kept is not None and kept > source.recorded_tokens:
                source = longest
            context, before = source.tokens, source.recorded_tokens
            if kept is not None and kept < before:
                # Scaled or cut rounds are longer or shorter than recorded: keep the same share.
                context, before = kept * context // before, kept
            append = scaled(recorded.append_tokens, settings.scale_append)
            generated = scaled(recorded.generated_tokens, settings.scale_generate)
            # The last token of an answer has no KV-cache.
            reuse = min(context, max(source.tokens - 1, 0))
            yield PlannedRound(source.round, context, append, generated, reuse, recorded.delay_s)
            in_trace = before + recorded.append_tokens + recorded.generated_tokens
            previous = _Sent(index, context + append + generated, in_trace)
            if in_trace > longest.recorded_tokens:
                longest = previous


class TokenConversation(Conversation):
    """The planned rounds; what they keep are the tokens the server really generated."""

    def __init__(self, session: TokenSession, settings: AgentSettings, contents: Contents) -> None:
        """Start before round one."""
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

    def _remember(self, turn: Turn, answer: Spans) -> None:
        if self._position in self._last_use:
            self._sent[self._position] = self._previous
