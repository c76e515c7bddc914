"""Where the hit tokens of a placed request are read: at the PE, at the DE, or at both (§6.1).

The side with the shorter reading queue reads, in tokens queued at the node.  With unequal storage
NICs what counts is the time to drain the queue.  Left open by the paper, decided here: equal
queues go to the node that was given fewer tokens to read so far, and to the PE when that is equal
as well.  On an idle cluster queues are equal nearly always, so the tie decides the balance of
the storage NICs.
"""

from typing import NamedTuple

from dualpath.core.cluster import Role
from dualpath.policy.events import ReadPart


class Reader(NamedTuple):
    """A node that could read: its queue, what it was given so far, and its speed (relative)."""

    queue_tokens: int
    total_tokens: int
    tokens_per_s: float = 1.0


def read_whole(side: Role, hit_tokens: int) -> tuple[ReadPart, ...]:
    """Return the one part that reads everything on one side."""
    return (ReadPart(side=side, first_token=0, tokens=hit_tokens),)


def shorter_queue(prefill: Reader, decode: Reader) -> tuple[Role, str]:
    """Return the side that reads and the reason, "shorter-queue" or "tie"."""
    at_prefill = prefill.queue_tokens * decode.tokens_per_s
    at_decode = decode.queue_tokens * prefill.tokens_per_s
    if at_prefill != at_decode:
        return (Role.PREFILL if at_prefill < at_decode else Role.DECODE), "shorter-queue"
    return _less_charged(prefill, decode), "tie"


def split(
    prefill: Reader, decode: Reader, hit_tokens: int, block_tokens: int
) -> tuple[tuple[ReadPart, ...], str]:
    """Divide the hit blocks so that both sides finish together, their queues included.

    The PE reads the first blocks, the DE the rest.  Of the two whole numbers of blocks around the
    optimum the one with the earlier end is taken, on equal ends the one that gives less to the
    node charged more so far.  A side left without blocks makes it a whole read on the other,
    with the reason that ``shorter_queue`` gives.
    """
    blocks = -(-hit_tokens // block_tokens)
    speeds = prefill.tokens_per_s + decode.tokens_per_s
    ideal_tokens = (
        prefill.tokens_per_s * (decode.queue_tokens + hit_tokens)
        - decode.tokens_per_s * prefill.queue_tokens
    ) / speeds
    below = min(max(int(ideal_tokens // block_tokens), 0), blocks)
    above = min(below + 1, blocks)
    order = (below, above) if _less_charged(prefill, decode) is Role.DECODE else (above, below)
    first = min(order, key=lambda count: _end_s(prefill, decode, count * block_tokens, hit_tokens))
    head = min(first * block_tokens, hit_tokens)
    if 0 < head < hit_tokens:
        parts = (
            ReadPart(side=Role.PREFILL, first_token=0, tokens=head),
            ReadPart(side=Role.DECODE, first_token=head, tokens=hit_tokens - head),
        )
        return parts, "split"
    reason = shorter_queue(prefill, decode)[1]
    return read_whole(Role.PREFILL if head else Role.DECODE, hit_tokens), reason


def _end_s(prefill: Reader, decode: Reader, head_tokens: int, hit_tokens: int) -> float:
    head = min(head_tokens, hit_tokens)
    return max(
        (prefill.queue_tokens + head) / prefill.tokens_per_s if head else 0.0,
        (decode.queue_tokens + hit_tokens - head) / decode.tokens_per_s if head < hit_tokens else 0,
    )


def _less_charged(prefill: Reader, decode: Reader) -> Role:
    at_prefill = prefill.total_tokens * decode.tokens_per_s
    at_decode = decode.total_tokens * prefill.tokens_per_s
    return Role.PREFILL if at_prefill <= at_decode else Role.DECODE
