"""The Qwen-Bailian usage traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon).

A line is a request with its whole prompt: ``{chat_id, parent_chat_id, timestamp, input_length,
output_length, type, turn, hash_ids}``.  ``parent_chat_id`` is the previous turn, -1 for none;
``timestamp`` is in seconds since the start of the trace; ids stand for blocks of 16 tokens and are
valid in the whole file.  If a turn has several successors, the first one continues the
conversation, and the others are sub-agents that start after it.  Lines written here have two more
fields, which other readers ignore: ``block_size``, and ``session_id``, which identifies the
successor in the same session.

The end of an answer is not recorded: the delay before a turn is the time since the previous turn
was *sent*, and so includes that turn's own time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from dualpath.workload.conversation.block_session import BlockSession
from dualpath.workload.conversation.sessions import Session
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

BLOCK_TOKENS = 16
_ROOT = -1


class _Line(msgspec.Struct):
    chat_id: int
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TURN_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TURN_TOKENS)]
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    hash_ids: list[int]
    parent_chat_id: int = _ROOT
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = BLOCK_TOKENS
    session_id: Id | None = None


class _Chat(msgspec.Struct):
    document: Document
    line: _Line


def looks_like(parsed: object) -> bool:
    """Return whether a parsed line is of this format."""
    return isinstance(parsed, dict) and "chat_id" in parsed and "hash_ids" in parsed


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield one session per first turn, named by its ``chat_id``."""
    for prefix, of_file in by_file(documents):
        yield from _read_file(of_file, prefix, on_broken)


def _read_file(
    documents: Iterable[Document], prefix: str, on_broken: OnBroken | None
) -> Iterator[Session]:
    parsed = list(each(documents, _parse, on_broken))
    block_tokens, chats = consistent(
        parsed, _facts, {chat.line.block_size for chat in parsed}, on_broken
    )
    chats.sort(key=lambda chat: chat.line.timestamp)
    begun_s = chats[0].line.timestamp if chats else 0.0
    threads: list[Thread] = []
    #: For each chat: its thread, its position there and the time at which it was sent.
    placed: dict[int, tuple[int, int, float]] = {}
    for chat in chats:
        line = chat.line
        if line.chat_id in placed:
            report(chat.document.error(f"chat_id {line.chat_id} occurs twice"), on_broken)
            continue
        parent = placed.get(line.parent_chat_id)
        delay_s = 0.0 if parent is None else min(line.timestamp - parent[2], MAX_DELAY_S)
        number = _thread_of(line, threads, parent)
        placed[line.chat_id] = number, len(threads[number].requests), line.timestamp
        threads[number].requests.append(
            ListedRequest(
                document=chat.document,
                prompt_tokens=line.input_length,
                generated_tokens=line.output_length,
                hash_ids=line.hash_ids,
                delay_s=delay_s,
                start_s=line.timestamp - begun_s,
            )
        )
    for thread in threads:
        thread.name = f"{prefix}{thread.name}"
    yield from thread_sessions(threads, block_tokens)


def _thread_of(line: _Line, threads: list[Thread], parent: tuple[int, int, float] | None) -> int:
    """Return the index of the thread that a turn continues, or of a new one."""
    named = None if line.session_id in (None, "") else str(line.session_id)
    if parent is None:
        threads.append(Thread(named or str(line.chat_id)))
        return len(threads) - 1
    number, turn, _ = parent
    thread = threads[number]
    continues = turn + 1 == len(thread.requests) if named is None else named == thread.name
    if continues:
        return number
    name = named or f"{thread.name}/{line.chat_id}"
    threads.append(Thread(name, [], number, turn))
    return len(threads) - 1


def write(sessions: Sequence[BlockSession]) -> Iterator[bytes]:
    """Yield one line per request, in the order in which they were sent."""
    for timed in sorted(timed_turns(sessions), key=lambda timed: (timed.start_s, timed.turn_id)):
        line: dict[str, Any] = {
            "chat_id": timed.turn_id,
            "parent_chat_id": _ROOT if timed.before is None else timed.before,
            "timestamp": timed.start_s,
            "input_length": timed.turn.prompt_tokens,
            "output_length": timed.turn.generate_tokens,
            "type": "text",
            "turn": timed.place + 1,
            "hash_ids": list(each_id(timed.turn.id_ranges)),
            "block_size": sessions[0].block_tokens,
            "session_id": timed.conversation_id,
        }
        yield msgspec.json.encode(line)


def _facts(chat: _Chat) -> tuple[Document, int, Sequence[int]]:
    return chat.document, chat.line.input_length, chat.line.hash_ids


def _parse(document: Document) -> _Chat:
    return _Chat(document, document.decode(_Line))
