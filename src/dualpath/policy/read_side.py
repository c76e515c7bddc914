"""Where the hit tokens of a placed request are read: at the PE, at the DE, or at both (§6.1).

The side with the shorter reading queue reads, in tokens queued at the node.  With unequal storage
NICs what counts is the time to drain the queue.  Left open by the paper, decided here: equal queues
go to the node that was given fewer tokens to read so far, and to the PE when that is equal as well.
On an idle cluster queues are equal nearly always, so the tie decides the balance of the storage
NICs.

The functions on plain numbers decide; the simulator's compiled core calls them as they stand.
"""

from typing import NamedTuple

from dualpath.core.blocks import holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun

#: What decides, as the kernels return it.
BY_QUEUE, BY_TIE = 0, 1
REASONS = ("shorter-queue", "tie")


class Reader(NamedTuple):
    """A node that could read: its queue, what it was given so far, and its speed (relative)."""

    queue_tokens: int
    total_tokens: int
    tokens_per_s: float = 1.0


def read_whole(side: Role, hit_tokens: int, block_tokens: int) -> tuple[HitRun, ...]:
    """Return the one run that is all hit blocks, read on one side."""
    return (HitRun(side, BlockRun(0, holding_blocks(hit_tokens, block_tokens))),)


def shorter_queue(prefill: Reader, decode: Reader) -> tuple[Role, str]:
    """Return the side that reads and the reason, "shorter-queue" or "tie"."""
    at_prefill, reason = choose_by_queue(*prefill, *decode)
    return (Role.PREFILL if at_prefill else Role.DECODE), REASONS[reason]


def split(
    prefill: Reader, decode: Reader, hit_tokens: int, block_tokens: int
) -> tuple[tuple[HitRun, ...], str]:
    """Divide the hit blocks so that both sides finish together, their queues included.

    The PE reads the first blocks, the DE the rest.  Of the two whole numbers of blocks around the
    optimum the one with the earlier end is taken, on equal ends the one that gives less to the
    node charged more so far.  A side left without blocks makes it a whole read on the other,
    with the reason that ``shorter_queue`` gives.
    """
    head = split_head_tokens(*prefill, *decode, hit_tokens, block_tokens)
    if 0 < head < hit_tokens:
        first = head // block_tokens
        rest = holding_blocks(hit_tokens, block_tokens) - first
        runs = (
            HitRun(Role.PREFILL, BlockRun(0, first)),
            HitRun(Role.DECODE, BlockRun(first, rest)),
        )
        return runs, "split"
    reason = shorter_queue(prefill, decode)[1]
    side = Role.PREFILL if head else Role.DECODE
    return read_whole(side, hit_tokens, block_tokens), reason


def choose_by_queue(
    pe_queue: int, pe_total: int, pe_rate: float, de_queue: int, de_total: int, de_rate: float
) -> tuple[bool, int]:
    """Return whether the PE reads, and ``BY_QUEUE`` or ``BY_TIE``.

    Queues and totals of both nodes in tokens, ``*_rate`` of their storage NICs in tokens/s.
    """
    at_prefill, at_decode = pe_queue * de_rate, de_queue * pe_rate
    if at_prefill != at_decode:
        return at_prefill < at_decode, BY_QUEUE
    return pe_charged_less(pe_total, pe_rate, de_total, de_rate), BY_TIE


def split_head_tokens(
    pe_queue: int,
    pe_total: int,
    pe_rate: float,
    de_queue: int,
    de_total: int,
    de_rate: float,
    hit_tokens: int,
    block_tokens: int,
) -> int:
    """Return how many leading hit tokens the PE reads so that both sides finish together."""
    blocks = holding_blocks(hit_tokens, block_tokens)
    ideal_tokens = (pe_rate * (de_queue + hit_tokens) - de_rate * pe_queue) / (pe_rate + de_rate)
    below = min(max(int(ideal_tokens // block_tokens), 0), blocks)
    less = min(below * block_tokens, hit_tokens)
    more = min(min(below + 1, blocks) * block_tokens, hit_tokens)
    end_of_less_s = split_end_s(pe_queue, pe_rate, de_queue, de_rate, less, hit_tokens)
    end_of_more_s = split_end_s(pe_queue, pe_rate, de_queue, de_rate, more, hit_tokens)
    if end_of_less_s != end_of_more_s:
        return less if end_of_less_s < end_of_more_s else more
    return more if pe_charged_less(pe_total, pe_rate, de_total, de_rate) else less


def split_end_s(
    pe_queue: int, pe_rate: float, de_queue: int, de_rate: float, head_tokens: int, hit_tokens: int
) -> float:
    """Return when both sides are through if the PE reads the first ``head_tokens``."""
    at_prefill = (pe_queue + head_tokens) / pe_rate if head_tokens > 0 else 0.0
    tail_tokens = hit_tokens - head_tokens
    at_decode = (de_queue + tail_tokens) / de_rate if tail_tokens > 0 else 0.0
    return max(at_prefill, at_decode)


def pe_charged_less(pe_total: int, pe_rate: float, de_total: int, de_rate: float) -> bool:
    """Return whether the PE's node was given less to read so far, for its speed, or equally."""
    return pe_total * de_rate <= de_total * pe_rate
