"""OpenTelemetry spans of gen-AI clients, as written by a collector's file exporter (OTLP JSON).

A document is a ``TracesData``: ``{resourceSpans: [{scopeSpans: [{spans: […]}]}]}``, one per line or
one per .json file (opentelemetry.io/docs/specs/otel/protocol/file-exporter).  A span is a request
if it has token counts and its ``gen_ai.operation.name``, if given, is an inference: spans of agents
and tools repeat the counts of their requests.  Attribute names are those of the semantic
conventions for gen-AI, and ``gen_ai.usage.prompt_tokens`` and ``completion_tokens`` of earlier
conventions and of vLLM.

The spans of one ``gen_ai.conversation.id``, or else of one trace, are a session, ordered by time;
delays are from the end of a span to the start of the next.  Shared prefixes are found

- from ``dualpath.block_ids`` with ``dualpath.block_tokens``, which ``dualpath record`` writes;
- from ``gen_ai.input.messages`` if every span of a session has them (opt-in, text);
- else from lengths only, which is a guess: a prompt at least as long as the previous prompt and
  answer continues them; a shorter one shares ``gen_ai.usage.cache_read.input_tokens``.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from dualpath.core.request import Round, Trajectory
from dualpath.workload.conversation.block_session import BlockSession
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats.block_requests import (
    ListedRequest,
    Thread,
    TimedTurn,
    consistent,
    each_id,
    thread_sessions,
    timed_turns,
)
from dualpath.workload.formats.lines import MAX_DELAY_S, MAX_TURN_TOKENS, Document, OnBroken, each

# -------------------------------------------------------------------------------------- otlp spans
# Finds the requests among the spans of an OTLP JSON document, and their token counts.

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
        session=conversation or span.trace_id or f"{document.source}-{document.line}",
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


_NS_PER_S = 1_000_000_000


def looks_like(parsed: object) -> bool:
    """Return whether a parsed document is of this format."""
    return isinstance(parsed, dict) and "resourceSpans" in parsed


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield the sessions in order of their first request."""
    requests = sorted(
        chain.from_iterable(each(documents, span_requests, on_broken)), key=lambda one: one.start_ns
    )
    hashed: list[SpanRequest] = []
    for name, ones in _by_session(requests).items():
        if all(one.block_ids is not None for one in ones):
            hashed += ones
        elif all(one.messages for one in ones):
            yield _text_session(name, ones)
        else:
            yield _token_session(name, ones)
    sizes = {one.block_tokens or None for one in hashed}
    block_tokens, hashed = consistent(hashed, _facts, sizes, on_broken)
    yield from thread_sessions(_threads(_by_session(hashed)), block_tokens)


def _by_session(requests: Iterable[SpanRequest]) -> dict[str, list[SpanRequest]]:
    sessions: dict[str, list[SpanRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    return sessions


def _facts(request: SpanRequest) -> tuple[Document, int, Sequence[int]]:
    return request.document, request.input_tokens, request.block_ids or ()


def write(sessions: Sequence[BlockSession]) -> Iterator[bytes]:
    """Yield one line per conversation with a span per request; times count from 1970.

    The end of a request is the start of the next minus its delay, because sessions do not contain
    the real end.
    """
    turns = list(timed_turns(sessions))
    spans: dict[str, list[dict[str, Any]]] = {}
    block_tokens = sessions[0].block_tokens
    for timed, following in zip(turns, [*turns[1:], None], strict=True):
        end_s = timed.start_s
        if following is not None and following.before == timed.turn_id and following.place:
            end_s = max(end_s, following.start_s - following.turn.delay_s)
        span = _span(timed, end_s, block_tokens)
        spans.setdefault(timed.conversation_id, []).append(span)
    for ones in spans.values():
        scope = {"scope": {"name": "dualpath.record"}, "spans": ones}
        yield msgspec.json.encode({"resourceSpans": [{"resource": {}, "scopeSpans": [scope]}]})


def _span(timed: TimedTurn, end_s: float, block_tokens: int) -> dict[str, Any]:
    ids = [Value(int_value=str(one)) for one in each_id(timed.turn.id_ranges)]
    attributes = {
        OPERATION: Value(string_value="chat"),
        CONVERSATION: Value(string_value=timed.conversation_id),
        INPUT_TOKENS: Value(int_value=str(timed.turn.prompt_tokens)),
        OUTPUT_TOKENS: Value(int_value=str(timed.turn.generate_tokens)),
        BLOCK_TOKENS: Value(int_value=str(block_tokens)),
        BLOCK_IDS: Value(array_value=Array(ids)),
    }
    return {
        "traceId": hashlib.sha256(timed.conversation_id.encode()).hexdigest()[:32],
        "spanId": f"{timed.turn_id + 1:016x}",
        "parentSpanId": "" if timed.before is None else f"{timed.before + 1:016x}",
        "name": "chat",
        "kind": 3,
        "startTimeUnixNano": str(round(timed.start_s * _NS_PER_S)),
        "endTimeUnixNano": str(round(end_s * _NS_PER_S)),
        "attributes": [{"key": key, "value": value} for key, value in attributes.items()],
    }


def _delays_s(requests: Sequence[SpanRequest]) -> Iterator[float]:
    end_ns: int | None = None
    for request in requests:
        waited_ns = 0 if end_ns is None else max(request.start_ns - end_ns, 0)
        yield min(waited_ns / _NS_PER_S, MAX_DELAY_S)
        end_ns = request.end_ns


def _text_session(name: str, requests: Sequence[SpanRequest]) -> TextSession:
    return TextSession(
        name,
        tuple(
            TextTurn(one.messages, generate_tokens=max(one.output_tokens, 1), delay_s=delay_s)
            for one, delay_s in zip(requests, _delays_s(requests), strict=True)
        ),
    )


def _token_session(name: str, requests: Sequence[SpanRequest]) -> TokenSession:
    rounds: list[Round] = []
    retained_tokens: list[int | None] = []
    total = 0
    for one, delay_s in zip(requests, _delays_s(requests), strict=True):
        continues = one.input_tokens >= total
        retained = total if continues else min(one.cached_tokens, one.input_tokens)
        retained_tokens.append(None if continues else retained)
        generated = max(one.output_tokens, 1)
        rounds.append(Round(one.input_tokens - retained, generated, delay_s))
        total = one.input_tokens + generated
    edited = any(retained is not None for retained in retained_tokens)
    return TokenSession(Trajectory(name, tuple(rounds)), tuple(retained_tokens) if edited else ())


def _threads(hashed: dict[str, list[SpanRequest]]) -> list[Thread]:
    threads: list[Thread] = []
    seen: dict[str, tuple[int, int]] = {}
    begun_ns = min((one.start_ns for ones in hashed.values() for one in ones), default=0)
    for name, ones in hashed.items():
        thread = Thread(name)
        if ones[0].parent_id in seen:
            thread.parent, thread.after_turn = seen[ones[0].parent_id]
        for one, delay_s in zip(ones, _delays_s(ones), strict=True):
            seen[one.span_id] = len(threads), len(thread.requests)
            thread.requests.append(
                ListedRequest(
                    document=one.document,
                    prompt_tokens=one.input_tokens,
                    generated_tokens=one.output_tokens,
                    hash_ids=one.block_ids or [],
                    delay_s=delay_s,
                    start_s=(one.start_ns - begun_ns) / _NS_PER_S,
                )
            )
        threads.append(thread)
    return threads
