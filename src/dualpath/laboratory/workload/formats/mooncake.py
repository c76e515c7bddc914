"""Mooncake's traces, with what aiperf and Dynamo add for sessions.

A line is a request: ``{timestamp, input_length, output_length, hash_ids}``, ``timestamp`` in
milliseconds and ``hash_ids`` one id per block of the whole prompt, the partial last one included;
equal ids are equal tokens in all requests of the file (github.com/kvcache-ai/Mooncake,
FAST25-release).  The number of tokens per block (512 there) is in no line; it is found from
lengths and numbers of ids unless lines have a field ``block_size``.

Lines of one ``session_id`` follow each other, ``delay`` (or ``delay_ms``) and ``tool_wait_ms``
milliseconds after the answer before.  A session that first waits for a request of another
(``wait_for``) is a sub-agent of it.  Lines may carry ``messages`` or ``text_input`` in place of a
length (aiperf).  They hold all messages so far, or with ``message_mode`` "delta" the new ones.

Of lines with lengths aiperf takes each as what is *new* unless ``context_mode`` says otherwise,
Dynamo as the whole prompt.  Decided here by content: whole prompts begin with the ids of an
earlier one of the session; lines without ids, or with other ones, append.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dualpath.core.request import Round, Trajectory
from dualpath.laboratory.workload.conversation.block_session import BlockSession
from dualpath.laboratory.workload.conversation.session import Session
from dualpath.laboratory.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.laboratory.workload.conversation.token_session import TokenSession
from dualpath.laboratory.workload.formats.block_ids import each_id
from dualpath.laboratory.workload.formats.lines import (
    MAX_DELAY_S,
    MAX_TURN_TOKENS,
    Document,
    OnBroken,
    each,
)
from dualpath.laboratory.workload.formats.messages import RawMessage, flatten
from dualpath.laboratory.workload.formats.threads import (
    ListedRequest,
    Thread,
    thread_sessions,
    timed_turns,
)

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TURN_TOKENS)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e16)]
_Delay = Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S * 1000)]
#: As aiperf calls the two ways to read a line.
_DELTAS, _WHOLE_PROMPTS = "deltas_without_responses", "message_array_with_responses"


class _Line(msgspec.Struct):
    output_length: _Tokens | None = None
    input_length: _Tokens | None = None
    hash_ids: list[int] | None = None
    messages: list[RawMessage] | None = None
    message_mode: Literal["history", "delta"] = "history"
    tools: list[Any] | None = None
    text_input: str | None = None
    context_mode: str | None = None
    timestamp: _Milliseconds | None = None
    created_time: _Milliseconds | None = None
    delay: _Delay | None = None
    delay_ms: _Delay | None = None
    tool_wait_ms: _Delay = 0.0
    session_id: str | int | None = None
    request_id: str | int | None = None
    wait_for: list[str | int] = []
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] | None = None

    @property
    def at_s(self) -> float | None:
        """When it was sent, in seconds of the trace's own clock."""
        at_ms = self.created_time if self.timestamp is None else self.timestamp
        return None if at_ms is None else at_ms / 1000


class _Request(msgspec.Struct):
    document: Document
    line: _Line
    delay_s: float = 0.0
    start_s: float | None = None


def looks_like(parsed: object) -> bool:
    """Return whether a parsed line is of this format."""
    if not isinstance(parsed, dict) or "chat_id" in parsed:
        return False
    lengths = "input_length" in parsed or "hash_ids" in parsed or "text_input" in parsed
    return lengths or ("messages" in parsed and "output_length" in parsed)


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield the sessions in order of appearance; raise ``TraceError`` for ids that fit no size."""
    threads: dict[str, list[_Request]] = {}
    for request in each(documents, _parse, on_broken):
        session_id = request.line.session_id
        name = f"request-{request.document.line}" if session_id is None else str(session_id)
        threads.setdefault(name, []).append(request)
    _set_times(threads.values())
    whole: dict[str, list[_Request]] = {}
    for name, requests in threads.items():
        if requests[0].line.input_length is None:
            yield _text_session(name, requests)
        elif _appends(requests):
            yield _token_session(name, requests)
        else:
            whole[name] = requests
    sizes = {r.line.block_size for requests in whole.values() for r in requests}
    yield from thread_sessions(_block_threads(whole), sizes)


def write(sessions: Sequence[BlockSession]) -> Iterator[bytes]:
    """Yield a line per request, sub-agents as sessions that wait for their parent's request.

    The first request of a session has its time, later ones the delay before them.
    """
    for timed in timed_turns(sessions):
        turn = timed.turn
        line: dict[str, Any] = {
            "request_id": str(timed.turn_id),
            "session_id": timed.conversation_id,
            "input_length": turn.prompt_tokens,
            "output_length": turn.generate_tokens,
            "hash_ids": list(each_id(turn.id_ranges)),
            "block_size": sessions[0].block_tokens,
            "context_mode": _WHOLE_PROMPTS,
        }
        if timed.place == 0:
            line["timestamp"] = timed.start_s * 1000
        if timed.before is not None:
            line |= {"delay": turn.delay_s * 1000, "wait_for": [str(timed.before)]}
        yield msgspec.json.encode(line)


def _parse(document: Document) -> _Request:
    line = document.decode(_Line)
    if line.messages is not None:
        given = "messages" if line.messages else None
    else:
        given = "text_input" if line.text_input is not None else None
    if line.input_length is None and line.hash_ids and line.block_size:
        line.input_length = len(line.hash_ids) * line.block_size
    if line.input_length is None and given is None:
        raise document.error("neither input_length nor messages nor text_input says what is sent")
    if line.input_length is not None and given is not None:
        raise document.error(f"input_length and {given} contradict each other; give one of them")
    if line.input_length == 0:
        raise document.error("input_length is 0, must be at least 1")
    if line.output_length is None:
        raise document.error("output_length is missing, so nothing says how many tokens come back")
    return _Request(document, line)


def _set_times(threads: Iterable[Sequence[_Request]]) -> None:
    """Set delays, from timestamps where there are no others, and times since the first request."""
    begun_s = min((r.line.at_s for t in threads for r in t if r.line.at_s is not None), default=0.0)
    for requests in threads:
        previous_s: float | None = None
        for request in requests:
            line, at_s = request.line, request.line.at_s
            given_ms = line.delay if line.delay_ms is None else line.delay_ms
            if given_ms is not None or line.tool_wait_ms:
                request.delay_s = ((given_ms or 0.0) + line.tool_wait_ms) / 1000
            elif at_s is not None and previous_s is not None:
                request.delay_s = min(max(at_s - previous_s, 0.0), MAX_DELAY_S)
            request.start_s = None if at_s is None else at_s - begun_s
            previous_s = at_s


def _appends(requests: Sequence[_Request]) -> bool:
    """Return whether the lines of a session hold what is new, and not whole prompts."""
    mode = requests[0].line.context_mode
    if mode is not None:
        return mode == _DELTAS
    if len(requests) == 1:
        return not requests[0].line.hash_ids
    first_ids: set[int] = set()
    for request in requests:
        ids = request.line.hash_ids
        if not ids or (first_ids and ids[0] not in first_ids):
            return True
        first_ids.add(ids[0])
    return False


def _token_session(name: str, requests: Sequence[_Request]) -> TokenSession:
    rounds = tuple(
        Round(r.line.input_length or 1, max(r.line.output_length or 1, 1), r.delay_s)
        for r in requests
    )
    return TokenSession(Trajectory(name, rounds))


def _text_session(name: str, requests: Sequence[_Request]) -> TextSession:
    turns: list[TextTurn] = []
    before: tuple[Message, ...] = ()
    for request in requests:
        line = request.line
        if line.input_length is not None:
            raise request.document.error(
                f"session {name} has text in other lines and a length here; give one of them in all"
            )
        raw = line.messages or [RawMessage("user", line.text_input)]
        messages = tuple(
            flatten(one, line.tools if place == 0 else None) for place, one in enumerate(raw)
        )
        if line.message_mode == "delta" and turns:
            # The answer stands between; what is recorded of it is replaced by the generated one.
            messages = (*before, Message("assistant", ""), *messages)
        before = messages
        generate = max(line.output_length or 1, 1)
        turns.append(TextTurn(messages, generate_tokens=generate, delay_s=request.delay_s))
    return TextSession(name, tuple(turns))


def _block_threads(whole: dict[str, list[_Request]]) -> list[Thread]:
    threads: list[Thread] = []
    seen: dict[str, tuple[int, int]] = {}
    for name, requests in whole.items():
        thread = Thread(name, [_listed(request) for request in requests])
        waited = [seen[key] for key in map(str, requests[0].line.wait_for) if key in seen]
        if waited:
            thread.parent, thread.after_turn = max(waited)
        for turn, request in enumerate(requests):
            if request.line.request_id is not None:
                seen[str(request.line.request_id)] = len(threads), turn
        threads.append(thread)
    return threads


def _listed(request: _Request) -> ListedRequest:
    line = request.line
    return ListedRequest(
        document=request.document,
        prompt_tokens=line.input_length or 1,
        generated_tokens=line.output_length or 1,
        hash_ids=line.hash_ids or [],
        delay_s=request.delay_s,
        start_s=request.start_s,
    )
