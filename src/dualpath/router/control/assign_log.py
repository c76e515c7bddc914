"""Two numberings of one engine's assignments, and the reports between them.

The scheduler numbers assignments in the order it decides them; the engine learns of them in the
order requests get there, which differs: a request is sent to its PE only after its DE has
granted buffer space.  Reports say "I have counted everything up to ``assign_seq``", so each
numbering needs its own log to be translated without counting a token twice or never.
"""

from typing import Self

import msgspec

from dualpath.core.control import Report
from dualpath.core.request import Request
from dualpath.policy.events import Assignment, EngineReport


class _Entry:
    def __init__(self, decided_seq: int, tokens: int, read_tokens: int) -> None:
        self.decided_seq = decided_seq
        self.tokens = tokens
        self.read_tokens = read_tokens
        self.reading = False
        self.in_hbm = False
        self.sent_seq: int | None = None


class AssignLog:
    """Assignments of one engine, in one session, that are not over yet."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._entries: dict[str, _Entry] = {}
        self._last_decided = 0
        self.last_sent = 0

    @property
    def open(self) -> int:
        """Assignments that are not over."""
        return len(self._entries)

    def decided(self, request_id: str, decided_seq: int, tokens: int, read_tokens: int) -> None:
        """The scheduler has placed a request here, of whose hit ``read_tokens`` are read here."""
        self._last_decided = max(self._last_decided, decided_seq)
        self._entries[request_id] = _Entry(decided_seq, tokens, read_tokens)

    def changed(self, request_id: str, tokens: int, read_tokens: int) -> None:
        """It counts for so much, and so much of its hit is read here, after all."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.tokens, entry.read_tokens = tokens, read_tokens

    def sent(self, request_id: str) -> tuple[int, int]:
        """It is about to be sent to the engine; return its ``assign_seq`` and ``tokens``."""
        self.last_sent += 1
        entry = self._entries.get(request_id)
        if entry is None:
            return self.last_sent, 0
        entry.sent_seq = self.last_sent
        return self.last_sent, entry.tokens

    def reading(self, request_id: str) -> None:
        """The engine is about to be asked to read."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.reading = True

    def read_done(self, request_id: str) -> None:
        """The request's reads are over everywhere."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.read_tokens = 0

    def in_hbm(self, request_id: str) -> None:
        """The engine has given HBM to the request."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.in_hbm = True

    def over(self, request_id: str) -> None:
        """The request no longer counts here; idempotent."""
        self._entries.pop(request_id, None)

    def translate(self, report: Report) -> EngineReport:
        """Return the report in the scheduler's numbering.

        ``assign_seq`` becomes the last decision before the first one the engine has not counted;
        what it has counted beyond that is taken out again, since the ledger still adds it.  Two
        things are taken in that the engine cannot know: reads of counted requests that wait for
        buffer space, and HBM that counted requests will need once their KV is there.
        """
        counted: list[_Entry] = []
        uncounted: list[_Entry] = []
        for entry in self._entries.values():
            known = entry.sent_seq is not None and entry.sent_seq <= report.assign_seq
            (counted if known else uncounted).append(entry)
        bound = min((e.decided_seq - 1 for e in uncounted), default=self._last_decided)
        ahead = [e for e in counted if e.decided_seq > bound]
        before = [e for e in counted if e.decided_seq <= bound]
        to_be_read = sum(e.read_tokens for e in before if not e.reading)
        read_ahead = sum(e.read_tokens for e in ahead if e.reading)
        hbm_wanted = sum(e.tokens for e in before if not e.in_hbm)
        hbm_ahead = sum(e.tokens for e in ahead if e.in_hbm)
        return EngineReport(
            engine_id=self._engine_id,
            assign_seq=bound,
            unfinished_requests=max(report.unfinished_requests - len(ahead), 0),
            unfinished_tokens=max(report.unfinished_tokens - sum(e.tokens for e in ahead), 0),
            read_queue_tokens=max(report.read_queue_tokens - read_ahead, 0) + to_be_read,
            free_hbm_tokens=max(report.free_hbm_tokens + hbm_ahead - hbm_wanted, 0),
            free_buffer_tokens=report.free_buffer_tokens,
        )


class AssignmentNote(msgspec.Struct, frozen=True):
    """One decision with its reasons, kept for ``/dualpath/v1/status``."""

    request_id: str
    prompt_tokens: int
    hit_tokens: int
    prefill_engine: str
    decode_engine: str
    reads: tuple[dict[str, object], ...]
    pe_reason: str
    de_reason: str
    read_reason: str

    @classmethod
    def of(cls, request: Request, assignment: Assignment, block_tokens: int) -> Self:
        """Return what was decided on a request, in tokens where decisions are in blocks."""
        return cls(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            hit_tokens=request.hit_tokens,
            prefill_engine=assignment.prefill_engine,
            decode_engine=assignment.decode_engine,
            reads=_reads(assignment, request.hit_tokens, block_tokens),
            pe_reason=assignment.pe_reason,
            de_reason=assignment.de_reason,
            read_reason=assignment.read_reason,
        )

    def read_anew(self, assignment: Assignment, block_tokens: int) -> Self:
        """Return the same with the reads that were chosen anew."""
        return msgspec.structs.replace(
            self,
            reads=_reads(assignment, self.hit_tokens, block_tokens),
            read_reason=assignment.read_reason,
        )


def _reads(
    assignment: Assignment, hit_tokens: int, block_tokens: int
) -> tuple[dict[str, object], ...]:
    return tuple(
        {
            "side": run.side.value,
            "first_token": run.blocks.first * block_tokens,
            "tokens": run.tokens(block_tokens, hit_tokens),
        }
        for run in assignment.reads
    )
