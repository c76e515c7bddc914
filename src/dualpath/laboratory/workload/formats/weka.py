"""The weka format (kv-cache-tester, aiperf, inference-perf): block ids and times, no text.

One JSON document per session: ``{id, block_size, requests: [{t, type, in, out, hash_ids, …}]}``.
``hash_ids`` lists ids of full blocks; an entry ``[first, last]`` is an inclusive run of ids, a
lossless short form.  An entry of type ``subagent`` nests the requests of a helper that ran beside
its parent from that point on; they become a sub-agent here and do not hold the parent up.

A recorded request that generated nothing is replayed with one token.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from dualpath.laboratory.workload.conversation.block_session import (
    BlockSession,
    BlockTurn,
    SubAgent,
)
from dualpath.laboratory.workload.conversation.session import Session
from dualpath.laboratory.workload.formats.lines import (
    MAX_DELAY_S,
    MAX_TURN_TOKENS,
    Document,
    OnBroken,
    each,
)

_MAX_BLOCK_ID = 1 << 40
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TURN_TOKENS)]
_SUB_AGENT = "subagent"


class _Entry(msgspec.Struct):
    type: str = "n"
    prompt_tokens: _Tokens = msgspec.field(name="in", default=0)
    generated_tokens: _Tokens = msgspec.field(name="out", default=0)
    # Ids are range-checked below: msgspec 0.22 reads wild memory where a bounded int and a
    # tuple of fixed length meet in one union.
    hash_ids: list[int | tuple[int, int]] = []
    think_time: Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S)] | None = None
    agent_id: str | None = None
    requests: list["_Entry"] = []


class _Line(msgspec.Struct):
    id: str
    requests: Annotated[list[_Entry], msgspec.Meta(min_length=1)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 64


def looks_like(parsed: object) -> bool:
    """Return whether a parsed document is of this format."""
    return isinstance(parsed, dict) and "requests" in parsed and "id" in parsed


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield one session per document."""
    return each(documents, _top_session, on_broken)


def _top_session(document: Document) -> Session:
    line = document.decode(_Line)
    return _session(document, line.id, line.id, line.block_size, line.requests)


def _session(
    document: Document, session_id: str, scope: str, block_tokens: int, entries: list[_Entry]
) -> BlockSession:
    turns: list[BlockTurn] = []
    helpers: list[SubAgent] = []
    for index, entry in enumerate(entries):
        if entry.type == _SUB_AGENT:
            name = f"{session_id}/{entry.agent_id or f'agent-{index}'}-{len(helpers)}"
            nested = _session(document, name, scope, block_tokens, entry.requests)
            helpers.append(SubAgent(len(turns) - 1, nested))
        else:
            turns.append(_turn(document, index, block_tokens, entry))
    if not turns:
        raise document.error(f"session {session_id} has no request of its own")
    return BlockSession(session_id, block_tokens, tuple(turns), tuple(helpers), scope)


def _turn(document: Document, index: int, block_tokens: int, entry: _Entry) -> BlockTurn:
    if entry.prompt_tokens < 1:
        raise document.error(f"request {index}: 'in' is {entry.prompt_tokens}, must be at least 1")
    ranges = _ranges(document, index, entry)
    blocks = sum(last - first + 1 for first, last in ranges)
    # Some exporters give the partial last block an id as well; it names no full block.
    if blocks * block_tokens >= entry.prompt_tokens + block_tokens:
        raise document.error(
            f"request {index}: {blocks} blocks of {block_tokens} tokens exceed its prompt of "
            f"{entry.prompt_tokens} tokens"
        )
    return BlockTurn(
        prompt_tokens=entry.prompt_tokens,
        generate_tokens=max(entry.generated_tokens, 1),
        id_ranges=ranges,
        delay_s=entry.think_time or 0.0,
    )


def _ranges(document: Document, index: int, entry: _Entry) -> tuple[tuple[int, int], ...]:
    """Return inclusive runs, short form or not; a plain list becomes runs as well."""
    runs: list[tuple[int, int]] = []
    for item in entry.hash_ids:
        first, last = (item, item) if isinstance(item, int) else item
        if not 0 <= first <= last < _MAX_BLOCK_ID or last - first >= MAX_TURN_TOKENS:
            raise document.error(f"request {index}: [{first}, {last}] is no run of block ids")
        if runs and first == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return tuple(runs)
