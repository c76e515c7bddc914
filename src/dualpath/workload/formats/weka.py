"""The weka format (kv-cache-tester, aiperf, inference-perf): block ids and times, no text.

One JSON document per session: ``{id, block_size, requests: [{t, type, in, out, hash_ids, …}]}``.
``hash_ids`` lists ids of full blocks; an entry ``[first, last]`` is an inclusive run of ids.  An
entry of type ``subagent`` contains the requests of a sub-agent that ran in parallel to its parent
from that point on, so the parent does not wait for it.

A recorded request that generated nothing is replayed with one token.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from dualpath.workload.conversation.block_session import BlockSession, BlockTurn, SubAgent
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.formats.block_requests import full_blocks, id_runs
from dualpath.workload.formats.lines import (
    MAX_DELAY_S,
    MAX_TURN_TOKENS,
    Document,
    Id,
    OnBroken,
    each,
)

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TURN_TOKENS)]
_SUB_AGENT = "subagent"


class _Entry(msgspec.Struct):
    type: str = "n"
    prompt_tokens: _Tokens = msgspec.field(name="in", default=0)
    generated_tokens: _Tokens = msgspec.field(name="out", default=0)
    # Ids are range-checked below: msgspec 0.22 reads invalid memory for a union of a bounded int
    # and a tuple of fixed length.
    hash_ids: list[int | tuple[int, int]] = []
    think_time: Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S)] | None = None
    agent_id: Id | None = None
    requests: list["_Entry"] = []


class _Line(msgspec.Struct):
    id: Id
    requests: Annotated[list[_Entry], msgspec.Meta(min_length=1)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 64


def looks_like(parsed: object) -> bool:
    """Return whether a parsed document is of this format."""
    return isinstance(parsed, dict) and "requests" in parsed and "id" in parsed


def read(documents: Iterable[Document], on_broken: OnBroken | None = None) -> Iterator[Session]:
    """Yield one session per document."""
    return each(documents, _top_session, on_broken)


def write(sessions: Sequence[BlockSession]) -> Iterator[bytes]:
    """Yield one document per session."""
    for session in sessions:
        entries = _entries(session, 0.0)
        line = {"id": session.session_id, "block_size": session.block_tokens, "requests": entries}
        yield msgspec.json.encode(line)


def _entries(session: BlockSession, begun_s: float) -> list[dict[str, Any]]:
    """Return requests, and sub-agents where they start; ``t`` counts from the session's start."""
    entries: list[dict[str, Any]] = []
    first_s = session.block_turns[0].start_s or 0.0
    now_s = begun_s
    for index in range(-1, len(session.block_turns)):
        if index >= 0:
            turn = session.block_turns[index]
            now_s = now_s + turn.delay_s if turn.start_s is None else turn.start_s - first_s
            entries.append(
                {
                    "t": now_s,
                    "type": "n",
                    "in": turn.prompt_tokens,
                    "out": turn.generate_tokens,
                    "hash_ids": [list(run) for run in turn.id_ranges],
                    "think_time": turn.delay_s,
                }
            )
        entries += [
            {
                "t": now_s,
                "type": _SUB_AGENT,
                # Names of sessions that were read end with the sub-agent's number.
                "agent_id": sub_agent.session.session_id.rpartition("/")[2].removesuffix(
                    f"-{number}"
                ),
                "requests": _entries(sub_agent.session, now_s),
            }
            for number, sub_agent in enumerate(session.sub_agents)
            if sub_agent.after_turn == index
        ]
    return entries


def _top_session(document: Document) -> Session:
    line = document.decode(_Line)
    name = str(line.id)
    return _session(document, name, name, line.block_size, line.requests)


def _session(
    document: Document, session_id: str, scope: str, block_tokens: int, entries: list[_Entry]
) -> BlockSession:
    turns: list[BlockTurn] = []
    sub_agents: list[SubAgent] = []
    for index, entry in enumerate(entries):
        if entry.type == _SUB_AGENT:
            name = f"{session_id}/{entry.agent_id or f'agent-{index}'}-{len(sub_agents)}"
            nested = _session(document, name, scope, block_tokens, entry.requests)
            sub_agents.append(SubAgent(len(turns) - 1, nested))
        else:
            turns.append(_turn(document, index, block_tokens, entry))
    if not turns:
        raise document.error(f"session {session_id} has no request of its own")
    return BlockSession(session_id, block_tokens, tuple(turns), tuple(sub_agents), scope)


def _turn(document: Document, index: int, block_tokens: int, entry: _Entry) -> BlockTurn:
    if entry.prompt_tokens < 1:
        raise document.error(
            f"request {index}: 'in' is {entry.prompt_tokens}; it must be at least 1"
        )
    where = f"request {index}"
    runs = id_runs(document, where, entry.hash_ids)
    return BlockTurn(
        prompt_tokens=entry.prompt_tokens,
        generate_tokens=max(entry.generated_tokens, 1),
        id_ranges=full_blocks(document, where, runs, entry.prompt_tokens, block_tokens),
        delay_s=entry.think_time or 0.0,
    )
