"""Sessions: what an agent sends, turn by turn, given what the server answered (§A.3).

A ``Session`` is a value read from a trace.  ``session.start(settings)`` makes a ``Conversation``,
the mutable run of it: ask ``next_turn()`` for a prompt, send it, hand the generated token ids to
``record()``, and so on until ``next_turn()`` is None.  Nothing here does I/O or knows a clock.
"""

import abc
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError

#: Random token ids where the vocabulary is unknown: above the special tokens that most
#: vocabularies keep at the low end, below the size of any tokenizer in common use.
UNKNOWN_VOCABULARY = (1000, 30000)


class Turn(msgspec.Struct, frozen=True):
    """One request of a conversation.

    ``prompt_token_ids`` are sent as they are and exactly ``generate_tokens`` ≥ 1 come back.
    ``context_tokens`` leading tokens repeat what this conversation sent or received before.
    ``delay_s`` ≥ 0 is the recorded tool time before the turn, 0 where none was recorded.
    """

    prompt_token_ids: list[int]
    generate_tokens: int
    context_tokens: int
    delay_s: float = 0.0


class SessionSettings(msgspec.Struct, frozen=True):
    """How sessions become token ids.

    ``seed`` fixes all random tokens, drawn from ``token_low`` ≤ id < ``token_high``.
    ``max_context_tokens`` bounds prompt plus generated tokens (MaxLen): a turn that crosses it is
    cut there and ends the conversation.  ``max_turns`` bounds each conversation.
    ``scale_append`` and ``scale_generate`` > 0 multiply every round's lengths (§7.3, Fig. 9).
    ``encode`` turns text into token ids without adding special tokens; only text sessions
    need it.
    """

    seed: int = 0
    token_low: int = UNKNOWN_VOCABULARY[0]
    token_high: int = UNKNOWN_VOCABULARY[1]
    max_context_tokens: int | None = None
    max_turns: int | None = None
    scale_append: float = 1.0
    scale_generate: float = 1.0
    encode: Callable[[str], Sequence[int]] | None = None

    def check(self) -> None:
        """Raise ``ConfigError`` where a setting is out of range."""
        if not 0 <= self.token_low < self.token_high:
            raise ConfigError(
                f"random token range {self.token_low}..{self.token_high} is empty or negative; "
                "pass the model's --vocab-size"
            )
        for name in ("max_context_tokens", "max_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1; leave it out for all")
        for name in ("scale_append", "scale_generate"):
            value = getattr(self, name)
            if not 0 < value <= 1000:
                raise ConfigError(f"{name} is {value}, must be above 0 and at most 1000")


def token_range(vocab_size: int | None) -> tuple[int, int]:
    """Return the (low, high) of random tokens for a vocabulary, skipping its low special ids."""
    if vocab_size is None:
        return UNKNOWN_VOCABULARY
    if vocab_size < 2:
        raise ConfigError(f"vocab_size is {vocab_size}, must be at least 2")
    return min(UNKNOWN_VOCABULARY[0], vocab_size // 2), vocab_size


class Conversation(abc.ABC):
    """One run of one session: alternates ``next_turn`` and ``record``.

    ``truncated`` tells that ``max_context_tokens`` ended it early.
    """

    def __init__(self, session_id: str, settings: SessionSettings) -> None:
        """Start before the first turn."""
        self.session_id = session_id
        self.truncated = False
        self._settings = settings
        self._position = 0
        self._pending: Turn | None = None

    def next_turn(self) -> Turn | None:
        """Return the next turn to send, or None when the conversation is over."""
        if self._pending is not None:
            raise RuntimeError(f"{self.session_id}: record() the last turn before the next one")
        most_turns = self._settings.max_turns
        if self.truncated or (most_turns is not None and self._position >= most_turns):
            return None
        turn = self._compose(self._position)
        if turn is not None:
            turn = self._cut(turn)
        self._pending = turn
        return turn

    def record(self, generated_token_ids: Sequence[int]) -> None:
        """Take the tokens that the server generated for the pending turn."""
        if self._pending is None:
            raise RuntimeError(f"{self.session_id}: there is no turn to record")
        turn, self._pending = self._pending, None
        self._remember(self._position, turn, generated_token_ids)
        self._position += 1

    def spawned(self) -> list["Conversation"]:
        """Return sub-agents that start now, beside this conversation; asked after ``record``."""
        return []

    @abc.abstractmethod
    def _compose(self, index: int) -> Turn | None:
        """Return turn ``index`` at full length, or None past the last."""

    @abc.abstractmethod
    def _remember(self, index: int, turn: Turn, generated_token_ids: Sequence[int]) -> None:
        """Keep what later turns build on."""

    def _cut(self, turn: Turn) -> Turn | None:
        most_tokens = self._settings.max_context_tokens
        if most_tokens is None:
            return turn
        room = most_tokens - len(turn.prompt_token_ids)
        if room >= turn.generate_tokens:
            return turn
        self.truncated = True
        return msgspec.structs.replace(turn, generate_tokens=room) if room >= 1 else None


class Session(Protocol):
    """A recorded agent, ready to be replayed any number of times."""

    @property
    def session_id(self) -> str:
        """Name of the session, unique within a trace."""

    @property
    def turns(self) -> int:
        """Recorded turns, sub-agents included."""

    def start(self, settings: SessionSettings) -> Conversation:
        """Return a fresh run; raise ``ConfigError`` where a setting does not fit this session."""

    def renamed(self, session_id: str) -> "Session":
        """Return the same session under another id."""


def random_token_ids(
    settings: SessionSettings, session_id: str, index: int, count: int
) -> list[int]:
    """Return ``count`` random tokens fixed by seed, session and ``index`` alone."""
    key = [settings.seed, zlib.crc32(session_id.encode()), index]
    generator = np.random.default_rng(key)
    drawn: list[int] = generator.integers(settings.token_low, settings.token_high, count).tolist()
    return drawn


def scaled(tokens: int, factor: float) -> int:
    """Return ``tokens`` times ``factor``, rounded; never 0 where ``tokens`` is not."""
    return max(round(tokens * factor), 1) if tokens else 0
