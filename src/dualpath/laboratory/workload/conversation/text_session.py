"""Sessions of chat messages (mini-swe-agent, agentperf), replayed the way §A.3 does.

The context is what was really sent plus the tokens the server really generated; only appended
messages are tokenised, each by itself, so that a prefix once sent stays the same token for token.
The recorded answer to the previous turn is replaced by the generated one; recorded text of other
assistant messages is sent as it is.
"""

from collections.abc import Sequence
from itertools import takewhile

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.conversation.session import (
    Conversation,
    Session,
    SessionSettings,
    Turn,
    scaled,
)

#: ChatML, the template of SmolLM2 and Qwen; for other models its markers are plain text, which
#: changes no length that matters here.
MESSAGE_START = "<|im_start|>{role}\n"
MESSAGE_END = "<|im_end|>\n"
ASSISTANT = "assistant"


class Message(msgspec.Struct, frozen=True):
    """One chat message, flattened to text (tool calls and tool schemas as JSON)."""

    role: str
    text: str


class TextTurn(msgspec.Struct, frozen=True):
    """A request: the whole recorded prompt and what came back.

    ``generate_tokens`` None means: as many as ``answer_text`` has in the model's own tokens.
    """

    messages: tuple[Message, ...]
    answer_text: str = ""
    generate_tokens: int | None = None
    delay_s: float = 0.0


class TextSession(msgspec.Struct, frozen=True):
    """A recorded conversation; ``start`` needs ``SessionSettings.encode``."""

    session_id: str
    text_turns: tuple[TextTurn, ...]

    @property
    def turns(self) -> int:
        """Recorded requests."""
        return len(self.text_turns)

    def start(self, settings: SessionSettings) -> Conversation:
        """Tokenise every message and return a fresh run."""
        return TextConversation(self, settings)

    def renamed(self, session_id: str) -> Session:
        """Return the same messages under another id."""
        return msgspec.structs.replace(self, session_id=session_id)


class TextConversation(Conversation):
    """Keeps, for every message of the previous prompt, the tokens it was sent as."""

    def __init__(self, session: TextSession, settings: SessionSettings) -> None:
        """Tokenise up front, so that no tokenising falls into the measured time."""
        super().__init__(session.session_id, settings)
        if settings.encode is None:
            raise ConfigError(
                f"session {session.session_id} is text and no tokenizer was given; "
                "pass --tokenizer with the served model's folder"
            )
        if settings.scale_append != 1.0:
            raise ConfigError(
                f"scale_append is {settings.scale_append} but session {session.session_id} is "
                "text, which cannot be stretched; replay it as [append, generated] rounds"
            )
        self._encode = settings.encode
        self._session = session
        self._encoded: dict[str, list[int]] = {}
        self._sent: list[tuple[Message, list[int]]] = []
        self._answer: list[int] = []
        for turn in session.text_turns:
            for message in turn.messages:
                self._tokens(message.text)
        self._lengths = [self._answer_tokens(turn) for turn in session.text_turns]

    def _compose(self, index: int) -> Turn | None:
        if index >= len(self._session.text_turns):
            return None
        recorded = self._session.text_turns[index]
        known = self._common_messages(recorded.messages)
        pieces = [tokens for _, tokens in self._sent[:known]]
        context_tokens = sum(map(len, pieces))
        answer_due = index > 0
        for place in range(known, len(recorded.messages)):
            message = recorded.messages[place]
            if message.role == ASSISTANT and answer_due:
                answer_due = False
                pieces.append(self._rendered(message.role, self._answer))
                if known == len(self._sent) == place:
                    # A pure append: the answer stands where it was generated.
                    opening = len(self._tokens(MESSAGE_START.format(role=ASSISTANT)))
                    context_tokens += opening + len(self._answer)
            else:
                pieces.append(self._rendered(message.role, self._tokens(message.text)))
        self._sent = list(zip(recorded.messages, pieces, strict=True))
        prompt = [token for piece in pieces for token in piece]
        prompt += self._tokens(MESSAGE_START.format(role=ASSISTANT))
        generate = scaled(self._lengths[index], self._settings.scale_generate)
        return Turn(prompt, generate, context_tokens, recorded.delay_s)

    def _remember(self, index: int, turn: Turn, generated_token_ids: Sequence[int]) -> None:
        self._answer = list(generated_token_ids)

    def _common_messages(self, messages: tuple[Message, ...]) -> int:
        pairs = zip(self._sent, messages, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], pairs))

    def _rendered(self, role: str, content: list[int]) -> list[int]:
        opening = self._tokens(MESSAGE_START.format(role=role))
        return [*opening, *content, *self._tokens(MESSAGE_END)]

    def _answer_tokens(self, turn: TextTurn) -> int:
        if turn.generate_tokens is not None:
            return turn.generate_tokens
        return max(len(self._tokens(turn.answer_text)), 1)

    def _tokens(self, text: str) -> list[int]:
        tokens = self._encoded.get(text)
        if tokens is None:
            tokens = self._encoded[text] = list(self._encode(text)) if text else []
        return tokens
