"""Requests and trajectories (§2.2, §A.3)."""

import msgspec


class Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn: ``append_tokens`` are added to the context, then ``generated_tokens``.

    ``delay_s`` is the recorded tool time before the turn starts, 0 if unknown.
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


class CachedPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that caches the first ``blocks`` ≥ 1 of a prompt in DRAM, by its last update."""

    engine_id: str
    blocks: int


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scheduler's view of one turn.

    ``prompt_tokens`` ≥ 1, of which ``hit_tokens`` ≤ ``prompt_tokens`` - 1 are stored;
    ``max_new_tokens`` ≥ 1 bounds the decode.  ``cached`` has an engine at most once.  Blocks that
    it has beyond the stored ones are hits for a request that is placed on this engine, and on no
    other one.  A stale entry costs a read or a recomputation, never a wrong byte.
    ``append_at_decode``: whether its DE may compute the tokens behind the hit, where the
    scheduler's settings allow it.
    """

    request_id: str
    prompt_tokens: int
    hit_tokens: int
    max_new_tokens: int
    cached: tuple[CachedPrefix, ...] = ()
    append_at_decode: bool = True
