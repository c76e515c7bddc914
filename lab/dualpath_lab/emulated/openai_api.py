"""Bodies of the emulated router's completions, chats, `/tokenize` and `/detokenize`, as in vLLM.

Prompts are token ids or text; ``emulated.words`` makes tokens of text.  Exactly as many tokens are
generated as the request allows, and they depend on the prompt alone: sampling parameters, stop
strings and ``logprobs`` are ignored, as all fields that are not listed here.  A chat is the text of
its messages, one after the other, so the next turn of a chat begins with the tokens of this turn.
The answer to a chat never calls a tool.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from dualpath.core.errors import BadRequestError
from dualpath.router.engine_calls import TokenEvent
from dualpath_lab.emulated.words import Words

#: Tokens of a completion without ``max_tokens``, as in vLLM and OpenAI.
COMPLETION_TOKENS = 16
#: Tokens of an answer to a chat without a limit, at which a real model would end it by itself.
CHAT_TOKENS = 256


class StreamOptions(msgspec.Struct):
    """When a stream reports ``usage``: at its end, or in every chunk as well."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Request(msgspec.Struct, kw_only=True):
    """The fields of both kinds of requests; ``null`` is a field's default.

    ``model`` may be any name.  ``n`` is decoded only to refuse values other than 1, ``session_id``
    and ``vllm_xargs`` are decoded for the hints of ``core.session_hints``, ``kv_transfer_params``
    for those of ``core.kv_hints``.
    """

    model: str | None = None
    n: int | None = 1
    max_tokens: int | None = None
    cache_salt: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    session_id: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def limit_tokens(self) -> int | None:
        """The number of tokens that the client allows, None if it sets no limit."""
        return self.max_tokens

    def prompt_tokens(self, words: Words) -> list[int]:
        """Return the prompt's token ids; raises ``BadRequestError``."""
        raise NotImplementedError

    def default_tokens(self, free_tokens: int) -> int:
        """Return how many tokens are generated without a limit.

        ``free_tokens``: what the prompt leaves of the context.
        """
        raise NotImplementedError


class CompletionRequest(Request, kw_only=True):
    """A request for a completion; ``prompt`` is a text, token ids, or a list of one of them."""

    prompt: str | list[Any]

    def prompt_tokens(self, words: Words) -> list[int]:
        """See ``Request``."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise BadRequestError(
                    f"prompt is a list of {len(prompt)} prompts, but this endpoint takes one; send "
                    "a request for each"
                )
            prompt = prompt[0]
        if isinstance(prompt, str):
            return words.encode(prompt)
        try:
            return msgspec.convert(prompt, list[int])
        except msgspec.ValidationError as error:
            raise BadRequestError(f"prompt: {error}; send text or token ids") from error

    @property
    def has_token_ids(self) -> bool:
        """Whether the prompt is token ids; then the answer is, too."""
        first = self.prompt[:1]
        return not isinstance(self.prompt, str) and not (first and isinstance(first[0], str))

    def default_tokens(self, free_tokens: int) -> int:
        """See ``Request``."""
        return COMPLETION_TOKENS


class ContentPart(msgspec.Struct):
    """A part of a message; only text is served."""

    type: str
    text: str = ""


class Message(msgspec.Struct):
    """A message of a chat; ``tool_calls`` are those of an earlier answer, from a recorded chat."""

    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    def text(self) -> str:
        """Return the message as text; raises ``BadRequestError`` for images and other parts."""
        parts = [f"<|{self.role}|>", self.reasoning_content or ""]
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text":
                    raise BadRequestError(
                        f"a message has a part of type {part.type!r}; an emulated cluster takes "
                        "only text: leave the part out"
                    )
                parts.append(part.text)
        else:
            parts.append(self.content or "")
        if self.tool_calls:
            parts.append(msgspec.json.encode(self.tool_calls).decode())
        return "\n".join(parts)


class ChatRequest(Request, kw_only=True):
    """A request for the next message of a chat; ``tools`` are part of the prompt."""

    messages: list[Message]
    tools: list[Any] | None = None
    max_completion_tokens: int | None = None

    @property
    def limit_tokens(self) -> int | None:
        """``max_completion_tokens``, or its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompt_tokens(self, words: Words) -> list[int]:
        """See ``Request``."""
        tools = msgspec.json.encode(self.tools).decode() if self.tools else ""
        messages = [message.text() for message in self.messages]
        return words.encode("\n".join([tools, *messages, "<|assistant|>"]))

    def default_tokens(self, free_tokens: int) -> int:
        """See ``Request``."""
        return max(min(CHAT_TOKENS, free_tokens), 1)


class TokenizeRequest(msgspec.Struct):
    """A request for the tokens of a text, or of a chat's prompt."""

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None

    def prompt_tokens(self, words: Words) -> list[int]:
        """Return the token ids; raises ``BadRequestError``."""
        if self.messages is not None:
            return ChatRequest(messages=self.messages, tools=self.tools).prompt_tokens(words)
        if self.prompt is None:
            raise BadRequestError("the body has neither prompt nor messages; send one of them")
        return words.encode(self.prompt)


class DetokenizeRequest(msgspec.Struct):
    """A request for the text of token ids."""

    tokens: list[int]


class Answer:
    """Makes the body of an answer, or the chunks of a stream, from a request's token events.

    ``prompt_tokens`` is the length of the prompt.  The request, which has its tokens, is not held.
    """

    def __init__(self, request: Request, request_id: str, prompt_tokens: int, model: str) -> None:
        self._limit_tokens = request.limit_tokens
        self._prompt_tokens = prompt_tokens
        self._chat = isinstance(request, ChatRequest)
        self._token_ids = bool(request.return_token_ids) or (
            isinstance(request, CompletionRequest) and request.has_token_ids
        )
        self._head = {
            "id": request_id,
            "created": int(time.time()),
            "model": request.model or model,
        }
        options = request.stream_options or StreamOptions()
        self._usage_at_end = bool(options.include_usage)
        self._usage_in_chunks = self._usage_at_end and bool(options.continuous_usage_stats)
        self._generated_tokens = 0
        self._cached_tokens: int | None = None

    def chunk(self, event: TokenEvent) -> dict[str, Any]:
        """Return the stream's chunk with the tokens of an event."""
        first = self._generated_tokens == 0
        self._count(event)
        text = Words.decode(event.token_ids, first=first)
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, "content": text}
        else:
            choice["text"] = text
        body = self._body("chat.completion.chunk", [self._ended(choice, event)])
        if self._usage_in_chunks:
            body["usage"] = self._usage()
        return body

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the chunk that reports ``usage`` after the last token, None if not requested."""
        if not self._usage_at_end:
            return None
        return {**self._body("chat.completion.chunk", []), "usage": self._usage()}

    def whole(self, events: Sequence[TokenEvent]) -> dict[str, Any]:
        """Return the whole answer."""
        for event in events:
            self._count(event)
        token_ids = tuple(token for event in events for token in event.token_ids)
        text = Words.decode(token_ids)
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        ended = self._ended(choice, TokenEvent(token_ids, events[-1].finish_reason))
        return {**self._body("chat.completion", [ended]), "usage": self._usage()}

    def _count(self, event: TokenEvent) -> None:
        self._generated_tokens += len(event.token_ids)
        if event.cached_tokens is not None:
            self._cached_tokens = event.cached_tokens

    def _body(self, chat_object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = chat_object if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _ended(self, choice: dict[str, Any], event: TokenEvent) -> dict[str, Any]:
        """Return the choice with its finish reason, and its token ids if they were requested."""
        reason = event.finish_reason
        if self._chat and reason == "length" and self._limit_tokens is None:
            reason = "stop"
        if self._token_ids:
            choice["token_ids"] = event.token_ids
        return {**choice, "logprobs": None, "finish_reason": reason}

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._generated_tokens,
            "total_tokens": self._prompt_tokens + self._generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
