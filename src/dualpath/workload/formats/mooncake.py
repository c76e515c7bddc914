"""Mooncake's traces, with the extensions of aiperf and Dynamo for sessions.

A line is a request: ``{timestamp, input_length, output_length, hash_ids}``.  ``timestamp`` is in
milliseconds; ``hash_ids`` has one id per block of the whole prompt, including the partial last
block; equal ids are equal tokens in the whole file (github.com/kvcache-ai/Mooncake,
FAST25-release).  The block size (512 there) is not in the lines; it is derived from lengths and
numbers of ids unless lines have a field ``block_size``.

Lines with the same ``session_id`` are consecutive turns, each sent ``delay`` (or ``delay_ms``) plus
``tool_wait_ms`` milliseconds after the previous answer.  Where no line of a file names a session or
a request, sessions are found by block ids: a request continues the latest earlier one whose full
blocks all begin its own ids (``_chained``).  A session whose first line waits for a
request of another session (``wait_for``) is its sub-agent.  Lines may have ``messages`` or
``text_input`` in place of a length (aiperf): all messages so far, or only the new ones with
``message_mode`` "delta".

In lines with lengths, aiperf takes each length as *new* tokens unless ``context_mode`` is set,
Dynamo as the whole prompt.  Here this is decided by content: whole prompts begin with the ids of an
earlier prompt of the session; lines without ids, or with other ids, are appends.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dualpath.core.request import Round, Trajectory
from dualpath.workload.conversation.block_session import BlockSession
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.conversation.text_session import (
    Message,
    RawMessage,
    TextSession,
    TextTurn,
    flatten,
)
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats.block_requests import (
    ListedRequest,
    Thread,
    consistent,
    each_id,
    thread_sessions,
    timed_turns,
)
from dualpath.workload.formats.lines import (
    MAX_DELAY_S,
    MAX_TURN_TOKENS,
    Document,
    Id,
    OnBroken,
    by_file,
    each,
    report,
)

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TURN_TOKENS)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e16)]
_Delay = Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S * 1000)]
#: aiperf's names for the two interpretations of a line.
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
    session_id: Id | None = None
    request_id: Id | None = None
    wait_for: list[Id] = []
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] | None = None

    @property
    def at_s(self) -> float | None:
        """The time at which the request was sent, in seconds of the trace's clock."""
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
    """Yield the sessions in order of appearance; raises ``TraceError`` if no block size fits."""
    for prefix, of_file in by_file(documents):
        yield from _read_file(of_file, prefix, on_broken)


def _read_file(
    documents: Iterable[Document], prefix: str, on_broken: OnBroken | None
) -> Iterator[Session]:
    threads: dict[str, list[_Request]] = {}
    for request in each(documents, _parse, on_broken):
        session_id = request.line.session_id
        name = f"request-{request.document.line}" if session_id is None else str(session_id)
        threads.setdefault(f"{prefix}{name}", []).append(request)
    kept: list[tuple[str, _Request]] = []
    for name, requests in threads.items():
        if requests[0].line.input_length is None:
            _set_times([requests])
            yield _text_session(name, requests, on_broken)
        elif _appends(requests):
            _set_times([requests])
            yield _token_session(name, requests)
        else:
            kept += [(name, request) for request in requests]
    sizes = {request.line.block_size for _, request in kept}
    block_tokens, kept = consistent(kept, _facts, sizes, on_broken)
    whole: dict[str, list[_Request]] = {}
    for name, request in kept:
        whole.setdefault(name, []).append(request)
    if all(_is_unnamed(request.line) for _, request in kept):
        whole = _chained(kept, block_tokens)
    _set_times(whole.values())
    yield from thread_sessions(_block_threads(whole), block_tokens)


def write(sessions: Sequence[BlockSession]) -> Iterator[bytes]:
    """Yield one line per request; sub-agents are sessions that wait for their parent's request.

    The first request of a session has a timestamp, later ones have a delay.
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
        raise document.error("input_length, messages and text_input are missing; one is needed")
    if line.input_length is not None and given is not None:
        raise document.error(f"input_length and {given} exclude each other; give one of them")
    if line.input_length == 0:
        raise document.error("input_length is 0; it must be at least 1")
    if line.output_length is None:
        raise document.error("output_length is missing, the number of tokens to generate")
    return _Request(document, line)


def _facts(named: tuple[str, _Request]) -> tuple[Document, int, Sequence[int]]:
    request = named[1]
    return request.document, request.line.input_length or 1, request.line.hash_ids or ()


def _is_unnamed(line: _Line) -> bool:
    return line.session_id is None and line.request_id is None and not line.wait_for


def _chained(named: Sequence[tuple[str, _Request]], block_tokens: int) -> dict[str, list[_Request]]:
    """Return the sessions of requests that name none, by the full blocks that their prompts share.

    A request continues the latest earlier one, not yet continued, whose full blocks begin its own,
    if the prompt is longer and all longer prompts of the file go on with the same block.  Where
    they differ, the common blocks are a text that many prompts begin with, such as a system prompt.
    """
    tree = _PrefixTree()
    placed = [
        (name, one, tree.add((one.line.hash_ids or [])[: _tokens(one) // block_tokens]))
        for name, one in named
    ]
    if all(request.line.at_s is not None for _, request in named):
        placed.sort(key=lambda one: one[1].line.at_s or 0.0)
    sessions: dict[str, list[_Request]] = {}
    #: The sessions that end with the blocks of a node of the tree, the latest last.
    ending: dict[int, list[list[_Request]]] = {}
    for name, request, nodes in placed:
        for node in reversed(nodes):
            ended = ending.get(node)
            if ended and tree.branches[node] <= 1 and _tokens(ended[-1][-1]) < _tokens(request):
                session = ended.pop()
                session.append(request)
                break
        else:
            session = sessions[name] = [request]
        if nodes:
            ending.setdefault(nodes[-1], []).append(session)
    return sessions


def _tokens(request: _Request) -> int:
    return request.line.input_length or 1


class _PrefixTree:
    """Sequences of ids as paths; a node stands for the ids up to it."""

    def __init__(self) -> None:
        """Start without sequences."""
        self._after: dict[tuple[int, int], int] = {}
        #: For each node, how many different ids follow it.
        self.branches: list[int] = [0]

    def add(self, ids: Sequence[int]) -> list[int]:
        """Add a sequence and return the nodes of its ids."""
        node, path = 0, []
        for one in ids:
            found = self._after.get((node, one))
            if found is None:
                found = self._after[node, one] = len(self.branches)
                self.branches[node] += 1
                self.branches.append(0)
            path.append(node := found)
        return path


def _set_times(threads: Iterable[Sequence[_Request]]) -> None:
    """Set delays, from timestamps if no others are given, and times since the first request."""
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
    """Return whether the lines of a session have only new tokens instead of whole prompts."""
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


def _text_session(
    name: str, requests: Sequence[_Request], on_broken: OnBroken | None
) -> TextSession:
    turns: list[TextTurn] = []
    before: tuple[Message, ...] = ()
    for request in requests:
        line = request.line
        if line.input_length is not None:
            fault = f"session {name} has text in other lines and a length here; use one form in all"
            report(request.document.error(fault), on_broken)
            continue
        raw = line.messages or [RawMessage("user", line.text_input)]
        messages = tuple(
            flatten(one, line.tools if place == 0 else None) for place, one in enumerate(raw)
        )
        if line.message_mode == "delta" and turns:
            # The answer is between them; its recorded text is replaced by the generated answer.
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
