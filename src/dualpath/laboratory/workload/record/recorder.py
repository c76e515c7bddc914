"""Groups served requests into sessions, which contain neither tokens nor hashes.

A session is identified by the client's name for it, or by its tokens: a prompt that begins with all
full blocks of an earlier prompt, or of an earlier prompt and its answer, continues that session
(``policy.agent_sessions``).  Clients' names may identify persons, so recorded sessions are
numbered.  Block ids are numbered by appearance.  Block keys, from which known text could be
confirmed, are not recorded.
"""

from collections.abc import Sequence

import msgspec

from dualpath.core.blocks import BlockKey, block_keys
from dualpath.laboratory.workload.conversation.block_session import BlockSession, BlockTurn
from dualpath.laboratory.workload.conversation.text_session import Message, TextSession, TextTurn
from dualpath.policy.agent_sessions import SessionMemory

#: Blocks of sessions that can be continued; older sessions are forgotten, and start again as new.
_MAX_REMEMBERED_BLOCKS = 10_000_000


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer in tokens; times are in seconds of one clock.

    ``tenant`` is vLLM's ``cache_salt``; ``session_id`` is the client's name for the session, "" for
    none.  ``messages`` and ``answer_text`` are empty unless texts are recorded.
    """

    tenant: str = ""
    session_id: str = ""
    prompt_token_ids: Sequence[int]
    generated_token_ids: Sequence[int]
    start_s: float
    end_s: float
    messages: tuple[Message, ...] = ()
    answer_text: str = ""


class _Turn(msgspec.Struct):
    start_s: float
    end_s: float
    prompt_tokens: int
    generated_tokens: int
    block_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    answer_text: str


class Recorder:
    """Records the served requests; not thread-safe, and reads no clock."""

    def __init__(self, block_tokens: int) -> None:
        """Start without requests; ``block_tokens`` is the size of a block in the trace."""
        self._block_tokens = block_tokens
        self._memory = SessionMemory(_MAX_REMEMBERED_BLOCKS)
        self._ids: dict[tuple[str, BlockKey], int] = {}
        self._sessions: dict[tuple[str, str], list[_Turn]] = {}

    def add(self, exchange: Exchange) -> None:
        """Add an answered request; requests must be added in the order of their answers."""
        prompt = list(exchange.prompt_token_ids)
        # The last token of an answer has no KV.
        served = [*prompt, *exchange.generated_token_ids][:-1]
        keys = tuple(block_keys(served, self._block_tokens))
        own = tuple(block_keys(prompt, self._block_tokens))
        session = self._memory.find(exchange.tenant, exchange.session_id, own)
        self._memory.remember(session, keys, len(own))
        while (oldest := self._memory.too_many()) is not None:
            self._memory.forget(oldest)
        ids = tuple(self._ids.setdefault((exchange.tenant, key), len(self._ids)) for key in own)
        self._sessions.setdefault(session.name, []).append(
            _Turn(
                exchange.start_s,
                exchange.end_s,
                len(prompt),
                max(len(exchange.generated_token_ids), 1),
                ids,
                exchange.messages,
                exchange.answer_text,
            )
        )

    def block_sessions(self) -> list[BlockSession]:
        """Return the sessions with their block ids, in order of their first request."""
        begun_s = min((t.start_s for turns in self._sessions.values() for t in turns), default=0.0)
        return [
            BlockSession(
                name,
                self._block_tokens,
                tuple(
                    BlockTurn(
                        prompt_tokens=turn.prompt_tokens,
                        generate_tokens=turn.generated_tokens,
                        id_ranges=_runs(turn.block_ids),
                        delay_s=delay_s,
                        start_s=turn.start_s - begun_s,
                    )
                    for turn, delay_s in turns
                ),
            )
            for name, turns in self._ordered()
        ]

    def text_sessions(self) -> list[TextSession]:
        """Return the sessions with their texts, in the same order."""
        return [
            TextSession(
                name,
                tuple(
                    TextTurn(turn.messages, turn.answer_text, turn.generated_tokens, delay_s)
                    for turn, delay_s in turns
                ),
            )
            for name, turns in self._ordered()
        ]

    def _ordered(self) -> list[tuple[str, list[tuple[_Turn, float]]]]:
        """Return numbered sessions, with turns in order of time and the delay before each."""
        sessions = [sorted(turns, key=lambda t: t.start_s) for turns in self._sessions.values()]
        sessions.sort(key=lambda turns: turns[0].start_s)
        ordered = []
        for number, turns in enumerate(sessions, start=1):
            ends_s = [turns[0].start_s, *(turn.end_s for turn in turns[:-1])]
            delays_s = (max(t.start_s - end_s, 0.0) for t, end_s in zip(turns, ends_s, strict=True))
            ordered.append((f"session-{number}", list(zip(turns, delays_s, strict=True))))
        return ordered


def _runs(block_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], block_id)
        else:
            runs.append((block_id, block_id))
    return tuple(runs)
