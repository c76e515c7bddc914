"""Text sessions for the simulator: the replay's own conversation, run on pieces of text.

``TextConversation`` composes prompts from tokenised pieces.  Here its tokenizer returns one
number per piece and the pieces' real tokens lie in a table, so that a prompt of 15,000 tokens is
composed from some hundred numbers and equals the live one token for token.  Generated tokens
are numbered above all real ones: no two answers are alike.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dualpath.core.errors import TraceError
from dualpath.laboratory.workload.columns.walk import LaneRound, SymbolLane
from dualpath.laboratory.workload.conversation.session import SessionSettings, scaled
from dualpath.laboratory.workload.conversation.text_session import TextConversation, TextSession

#: Tokens compare as big-endian bytes in the order of their ids.
_TOKEN = np.dtype(">u4")
_FIRST_GENERATED = 1 << 31
#: What ``approximate_encode`` takes for a token.  DeepSeek-V3's tokenizer takes 3.93 bytes on
#: the mini-SWE-agent trajectories.
BYTES_PER_TOKEN = 4


def approximate_encode(text: str) -> Sequence[int]:
    """Return one token per four bytes of UTF-8, for want of the model's tokenizer.

    Equal texts are equal tokens, so what is appended, edited or shared is seen as with a real
    tokenizer; only lengths are estimates.
    """
    raw = text.encode()
    padded = raw + bytes(-len(raw) % BYTES_PER_TOKEN)
    # Below the ids of generated tokens; the lost bit never distinguishes ASCII.
    ids: list[int] = (np.frombuffer(padded, _TOKEN) & (_FIRST_GENERATED - 1)).tolist()
    return ids


class TextPieces:
    """Token ids of every piece of text met, and of every answer generated."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        """Start empty; ``encode`` as in ``SessionSettings``."""
        self._encode = encode
        self._tokens: list[bytes] = []
        self._number: dict[str, int] = {}
        self._generated = 0

    def number(self, text: str) -> list[int]:
        """Return the number of a text as the ``encode`` of a conversation."""
        number = self._number.get(text)
        if number is None:
            number = self._number[text] = len(self._tokens)
            self._tokens.append(np.asarray(self._encode(text), _TOKEN).tobytes())
        return [number]

    def generate(self, count: int) -> int:
        """Return the number of ``count`` tokens unlike all others."""
        first = _FIRST_GENERATED + self._generated
        if first + count > 1 << 32:
            raise TraceError(
                f"the sessions generate more than {_FIRST_GENERATED} tokens; "
                "simulate fewer of them (agents) or shorter ones (max_turns)"
            )
        self._generated += count
        self._tokens.append(np.arange(first, first + count, dtype=_TOKEN).tobytes())
        return len(self._tokens) - 1

    def tokens(self, numbers: Sequence[int]) -> bytes:
        """Return the tokens of several pieces."""
        return b"".join([self._tokens[number] for number in numbers])

    def length(self, text: str) -> int:
        """Return the tokens of a text."""
        return len(self._tokens[self.number(text)[0]]) // _TOKEN.itemsize if text else 0


class TextLane:
    """One text session in tokens; ``pieces`` may be shared by many."""

    width_bytes = _TOKEN.itemsize
    symbol_tokens = 1

    def __init__(self, session: TextSession, settings: SessionSettings, pieces: TextPieces) -> None:
        """Raise ``ConfigError`` where a setting does not fit text."""
        self._session = session
        self._scale = settings.scale_generate
        self._pieces = pieces
        # The conversation must neither cut nor scale: it counts pieces, not tokens.
        plain = SessionSettings(scale_append=settings.scale_append, encode=pieces.number)
        self._conversation = TextConversation(session, plain)
        self._index = 0

    def next_round(self) -> LaneRound | None:
        """Return the next prompt in tokens."""
        turn = self._conversation.next_turn()
        if turn is None:
            return None
        recorded = self._session.text_turns[self._index]
        self._index += 1
        tokens = recorded.generate_tokens
        if tokens is None:
            tokens = max(self._pieces.length(recorded.answer_text), 1)
        generated = scaled(tokens, self._scale)
        answer = self._pieces.generate(generated)
        self._conversation.record([answer])
        prompt = self._pieces.tokens(turn.prompt_token_ids)
        # The last token was sampled but never fed back, so no engine has its KV-cache.
        stored = prompt + self._pieces.tokens([answer])[: -_TOKEN.itemsize]
        return LaneRound(
            prompt, stored, len(prompt) // _TOKEN.itemsize, generated, recorded.delay_s
        )

    def spawned(self) -> Sequence[SymbolLane]:
        """Text sessions have no sub-agents."""
        return ()
