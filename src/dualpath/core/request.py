"""Requests and trajectories (§2.2, §A.3)."""

import msgspec


class Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn: ``append_tokens`` enter the context, ``generated_tokens`` come back.

    ``delay_s`` is the recorded tool time before the turn starts, 0 where unknown.
    """

    append_tokens: int
    generated_tokens: int
    delay_s: float = 0.0


class Trajectory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One agent's run: its turns in order."""

    session_id: str
    rounds: tuple[Round, ...]

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole context after the last turn."""
        return sum(r.append_tokens + r.generated_tokens for r in self.rounds)


class KeptPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine whose DRAM is believed to hold the first ``blocks`` ≥ 1 blocks of a prompt."""

    engine_id: str
    blocks: int


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the scheduler needs to know of one turn.

    ``prompt_tokens`` ≥ 1, ``hit_tokens`` ≤ ``prompt_tokens`` - 1 are stored,
    ``max_new_tokens`` ≥ 1 bounds the decode.  ``arrival_seq`` orders requests (FIFO).  ``kept`` has
    an engine once at most, with no more blocks than the hit has; that it is stale costs a read,
    never a wrong byte.
    """

    request_id: str
    prompt_tokens: int
    hit_tokens: int
    max_new_tokens: int
    arrival_seq: int = 0
    kept: tuple[KeptPrefix, ...] = ()
