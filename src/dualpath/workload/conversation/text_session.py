"""Sessions of chat messages (mini-swe-agent, agentperf), sent as in §A.3.

The context consists of the tokens that were sent and that the server generated.  Only appended
messages are tokenised, each separately, so that the tokens of a sent prefix never change.  The
recorded answer to the previous turn is replaced by the generated one; the recorded text of other
assistant messages is sent unchanged.
"""

from itertools import accumulate
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.workload.conversation.prompts import Contents
from dualpath.workload.conversation.sessions import (
    AgentSettings,
    Conversation,
    Session,
    Turn,
    scaled,
)
from dualpath.workload.conversation.spans import Spans, common_items

#: ChatML, the template of SmolLM2 and Qwen.  For other models its markers are plain text, which
#: changes lengths only slightly.
MESSAGE_START = "<|im_start|>{role}\n"
MESSAGE_END = "<|im_end|>\n"
ASSISTANT = "assistant"


class Message(msgspec.Struct, frozen=True):
    """One chat message, flattened to text (tool calls and tool schemas as JSON)."""

    role: str
    text: str


class TextTurn(msgspec.Struct, frozen=True):
    """A request: the whole recorded prompt and its answer.

    ``generate_tokens`` None means the length of ``answer_text`` in the model's own tokens.
    """

    messages: tuple[Message, ...]
    answer_text: str = ""
    generate_tokens: int | None = None
    delay_s: float = 0.0


class TextSession(msgspec.Struct, frozen=True):
    """A recorded conversation; its contents need ``Vocabulary.encode``."""

    session_id: str
    text_turns: tuple[TextTurn, ...]

    @property
    def turns(self) -> int:
        """The number of recorded requests."""
        return len(self.text_turns)

    def start(self, settings: AgentSettings, contents: Contents) -> Conversation:
        """Tokenise every message and return a new conversation."""
        return TextConversation(self, settings, contents)

    def renamed(self, session_id: str) -> Session:
        """Return the same session with another id."""
        return msgspec.structs.replace(self, session_id=session_id)


class TextConversation(Conversation):
    """Composes prompts from messages, reusing the sent tokens of unchanged messages."""

    def __init__(self, session: TextSession, settings: AgentSettings, contents: Contents) -> None:
        """Tokenise all messages first, so that tokenising is not part of the measured time."""
        super().__init__(session.session_id, settings, contents)
        if settings.scale_append != 1.0:
            raise ConfigError(
                f"scale_append is {settings.scale_append}, but session {session.session_id} is "
                "text, which cannot be scaled; replay it as [append, generated] rounds"
            )
        self._turns = session.text_turns
        self._sent: tuple[Message, ...] = ()
        #: Tokens of the previous prompt up to the end of each message.
        self._ends: list[int] = []
        self._answer = Spans()
        for text in {message.text: None for turn in self._turns for message in turn.messages}:
            contents.text(text)
        self._lengths = [self._answer_tokens(turn) for turn in session.text_turns]

    def _compose(self, index: int) -> Turn | None:
        if index >= len(self._turns):
            return None
        recorded = self._turns[index]
        messages = recorded.messages
        known = common_items(self._sent, messages)
        context_tokens = self._ends[known - 1] if known else 0
        context = self._previous.first(context_tokens)
        pieces: list[Spans] = []
        answer_due = index > 0
        for place in range(known, len(messages)):
            message = messages[place]
            if message.role == ASSISTANT and answer_due:
                answer_due = False
                pieces.append(self._rendered(ASSISTANT, self._answer))
                if known == len(self._sent) == place:
                    # A pure append: the answer is at the position at which it was generated.
                    context_tokens += self._opening(ASSISTANT).tokens + self._answer.tokens
            else:
                pieces.append(self._rendered(message.role, self.contents.text(message.text)))
        lengths = accumulate((piece.tokens for piece in pieces), initial=context.tokens)
        self._ends = [*self._ends[:known], *list(lengths)[1:]]
        self._sent = messages
        generate = scaled(self._lengths[index], self.settings.scale_generate)
        prompt = context.then(*pieces, self._opening(ASSISTANT))
        return Turn(prompt, generate, context_tokens, recorded.delay_s)

    def _on_answer(self, turn: Turn, answer: Spans) -> None:
        self._answer = answer

    def _opening(self, role: str) -> Spans:
        return self.contents.text(MESSAGE_START.format(role=role))

    def _rendered(self, role: str, content: Spans) -> Spans:
        return self._opening(role).then(content, self.contents.text(MESSAGE_END))

    def _answer_tokens(self, turn: TextTurn) -> int:
        if turn.generate_tokens is not None:
            return turn.generate_tokens
        return max(self.contents.text(turn.answer_text).tokens, 1)


# ---------------------------------------------------------------------------------------- messages
# Converts OpenAI chat messages to a role and a text.


class RawMessage(msgspec.Struct):
    """A message as recorded; other fields are ignored."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None


def flatten(raw: RawMessage, tools: list[Any] | None = None) -> Message:
    """Return role and text, followed by tool schemas (if given) and tool calls as lines of JSON."""
    if isinstance(raw.content, list):
        parts = [str(part.get("text", "")) for part in raw.content]
    else:
        parts = [raw.content or ""]
    for extra in (tools, raw.tool_calls):
        if extra:
            parts.append(msgspec.json.encode(extra, order="sorted").decode())
    return Message(raw.role, "\n".join(part for part in parts if part))
