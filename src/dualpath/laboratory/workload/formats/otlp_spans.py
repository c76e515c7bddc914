"""Finds the requests among the spans of an OTLP JSON document, and their token counts."""

from typing import Any

import msgspec

from dualpath.laboratory.workload.conversation.text_session import Message
from dualpath.laboratory.workload.formats.lines import MAX_TURN_TOKENS, Document

CONVERSATION = "gen_ai.conversation.id"
OPERATION = "gen_ai.operation.name"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
MESSAGES = "gen_ai.input.messages"
BLOCK_IDS = "dualpath.block_ids"
BLOCK_TOKENS = "dualpath.block_tokens"
#: Names in conventions before version 1.27 and in vLLM.
_EARLIER = {
    INPUT_TOKENS: "gen_ai.usage.prompt_tokens",
    OUTPUT_TOKENS: "gen_ai.usage.completion_tokens",
}
_INFERENCE = frozenset({"chat", "text_completion", "generate_content"})


class Value(msgspec.Struct, omit_defaults=True, rename="camel"):
    """An attribute's value, with the kinds that are used here."""

    string_value: str | None = None
    # OTLP JSON writes 64-bit integers as strings; some exporters do not.
    int_value: str | int | None = None
    array_value: "Array | None" = None


class Array(msgspec.Struct):
    """Values in order."""

    values: list[Value] = []


class _Attribute(msgspec.Struct):
    key: str
    value: Value = msgspec.field(default_factory=Value)


class _Span(msgspec.Struct, rename="camel"):
    start_time_unix_nano: str | int
    end_time_unix_nano: str | int
    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str = ""
    name: str = ""
    attributes: list[_Attribute] = []


class _Scope(msgspec.Struct):
    spans: list[_Span] = []


class _Resource(msgspec.Struct, rename="camel"):
    scope_spans: list[_Scope] = []


class _Traces(msgspec.Struct, rename="camel"):
    resource_spans: list[_Resource]


class SpanRequest(msgspec.Struct):
    """A span that is a request; times in ns since 1970."""

    document: Document
    session: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    block_ids: list[int] | None
    block_tokens: int
    messages: tuple[Message, ...]


class _Part(msgspec.Struct):
    content: Any = None
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    parts: list[_Part] = []
    content: Any = None


def span_requests(document: Document) -> list[SpanRequest]:
    """Return the requests among the spans of a document; raises ``TraceError`` for invalid ones."""
    found = []
    for resource in document.decode(_Traces).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                request = _request(document, span)
                if request is not None:
                    found.append(request)
    return found


def _request(document: Document, span: _Span) -> SpanRequest | None:
    """Return the request that a span describes, None for other spans."""
    values = {one.key: one.value for one in span.attributes}
    operation = values.get(OPERATION, Value()).string_value
    counts = {key: values.get(key) or values.get(earlier) for key, earlier in _EARLIER.items()}
    if None in counts.values() or (operation is not None and operation not in _INFERENCE):
        return None
    where = f"span {span.span_id or span.name}"

    def number(name: str, value: Value | None, least: int = 0, most: int = MAX_TURN_TOKENS) -> int:
        given = None if value is None else value.int_value
        try:
            counted = int(0 if given is None else given)
        except ValueError:
            raise document.error(f"{where}: {name} {given!r} is not an integer") from None
        if not least <= counted <= most:
            raise document.error(f"{where}: {name} is {counted}; it must be {least} to {most}")
        return counted

    listed = values.get(BLOCK_IDS, Value()).array_value
    conversation = values.get(CONVERSATION, Value()).string_value
    start_ns = number("startTimeUnixNano", Value(int_value=span.start_time_unix_nano), 0, 1 << 63)
    return SpanRequest(
        document=document,
        session=conversation or span.trace_id or f"{document.stem}-{document.line}",
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        start_ns=start_ns,
        end_ns=number(
            "endTimeUnixNano", Value(int_value=span.end_time_unix_nano), start_ns, 1 << 63
        ),
        input_tokens=number(INPUT_TOKENS, counts[INPUT_TOKENS], 1),
        output_tokens=number(OUTPUT_TOKENS, counts[OUTPUT_TOKENS]),
        cached_tokens=number(CACHED_TOKENS, values.get(CACHED_TOKENS)),
        block_ids=None
        if listed is None
        else [number(BLOCK_IDS, one, -(1 << 63), 1 << 64) for one in listed.values],
        block_tokens=number(BLOCK_TOKENS, values.get(BLOCK_TOKENS), 0, 1 << 16),
        messages=_messages(document, where, values.get(MESSAGES, Value()).string_value),
    )


def _messages(document: Document, where: str, text: str | None) -> tuple[Message, ...]:
    if text is None:
        return ()
    try:
        listed = msgspec.json.decode(text, type=list[_Message])
    except msgspec.DecodeError as error:
        raise document.error(f"{where}: {MESSAGES} is not a list of messages ({error})") from error
    return tuple(Message(one.role, _text(one)) for one in listed)


def _text(message: _Message) -> str:
    parts = [part.text if part.text is not None else part.content for part in message.parts]
    parts.append(message.content)
    return "\n".join(
        part if isinstance(part, str) else msgspec.json.encode(part, order="sorted").decode()
        for part in parts
        if part is not None
    )
