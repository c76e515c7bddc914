"""Sessions of token counts, ``[append, generated]`` per round (§A.3)."""

from collections.abc import Sequence

import msgspec
import numpy as np

from dualpath.core.request import Trajectory
from dualpath.laboratory.workload.conversation.session import (
    Conversation,
    Session,
    SessionSettings,
    Turn,
    random_token_ids,
    scaled,
)


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

    def start(self, settings: SessionSettings) -> Conversation:
        """Return a fresh run of the trajectory."""
        return TokenConversation(self, settings)

    def renamed(self, session_id: str) -> Session:
        """Return the same rounds under another id, hence with other random tokens."""
        trajectory = msgspec.structs.replace(self.trajectory, session_id=session_id)
        return msgspec.structs.replace(self, trajectory=trajectory)


class _Sent(msgspec.Struct, frozen=True):
    """Tokens really sent and received up to some turn, and how many the trace says they were."""

    token_ids: "np.ndarray[tuple[int], np.dtype[np.uint32]]"
    recorded_tokens: int

    def first(self, kept_tokens: int | None) -> list[int]:
        """Return the leading tokens that correspond to ``kept_tokens`` recorded ones."""
        count = len(self.token_ids)
        if kept_tokens is not None and kept_tokens < self.recorded_tokens:
            # Scaled or cut rounds are longer or shorter than recorded: keep the same share.
            count = kept_tokens * count // self.recorded_tokens
        kept: list[int] = self.token_ids[:count].tolist()
        return kept


class TokenConversation(Conversation):
    """Prompt i+1 = context + A_{i+1}; the context holds the tokens the server really generated.

    A round that keeps less than everything takes its prefix from the previous request or, where
    that one is too short, from the longest so far: the trace tells lengths, not which request.
    """

    def __init__(self, session: TokenSession, settings: SessionSettings) -> None:
        """Start before round one."""
        super().__init__(session.session_id, settings)
        self._session = session
        nothing = _Sent(np.empty(0, np.uint32), 0)
        self._previous = nothing
        self._longest = nothing
        self._recorded_prompt_tokens = 0

    def _compose(self, index: int) -> Turn | None:
        rounds = self._session.trajectory.rounds
        if index >= len(rounds):
            return None
        recorded = rounds[index]
        kept = self._session.kept_tokens[index] if index < len(self._session.kept_tokens) else None
        source = self._previous
        if kept is not None and kept > source.recorded_tokens:
            source = self._longest
        context = source.first(kept)
        append_tokens = scaled(recorded.append_tokens, self._settings.scale_append)
        append = random_token_ids(self._settings, self.session_id, index, append_tokens)
        self._recorded_prompt_tokens = recorded.append_tokens + (
            source.recorded_tokens if kept is None else min(kept, source.recorded_tokens)
        )
        return Turn(
            prompt_token_ids=context + append,
            generate_tokens=scaled(recorded.generated_tokens, self._settings.scale_generate),
            context_tokens=len(context),
            delay_s=recorded.delay_s,
        )

    def _remember(self, index: int, turn: Turn, generated_token_ids: Sequence[int]) -> None:
        tokens = np.asarray([*turn.prompt_token_ids, *generated_token_ids], dtype=np.uint32)
        recorded = self._session.trajectory.rounds[index]
        self._previous = _Sent(tokens, self._recorded_prompt_tokens + recorded.generated_tokens)
        if self._previous.recorded_tokens > self._longest.recorded_tokens:
            self._longest = self._previous
