"""Where the hit tokens of a placed request are read: at the PE, at the DE, or at both (§6.1).

The side with the shorter reading queue reads, in tokens queued at the node.  With unequal storage
NICs what counts is the time to drain the queue.  Left open by the paper, decided here: equal queues
go to the node that was given fewer tokens to read so far, and to the PE when that is equal as well.
On an idle cluster queues are equal nearly always, so the tie decides the balance of the storage
NICs.

Hits that lie in the DRAM of either engine already are not read.  What the DE keeps comes first: it
need not be sent there either; then what the PE keeps behind it.  The rule decides on the rest.

A new rule is a constant here, the mode that uses it in ``RULES``, a branch of ``read_tokens``, and
its reason in ``policy.events``: the live scheduler and both cores of the simulator call
``read_tokens``, the compiled one as it stands.
"""

from typing import NamedTuple

from dualpath.core.blocks import holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.policy.events import READ_REASONS

#: The rules, and the one of each mode.
NO_READS, PE_READS, SIDES_IN_TURN, SHORTER_QUEUE, BOTH_SIDES = range(5)
RULES = {
    Mode.BASIC: PE_READS,
    Mode.LAYERWISE: PE_READS,
    Mode.ROUND_ROBIN: SIDES_IN_TURN,
    Mode.DUALPATH: SHORTER_QUEUE,
    Mode.SPLIT: BOTH_SIDES,
    Mode.ORACLE: NO_READS,
}

#: The places of ``READ_REASONS``, as kernels return them.
NO_HIT, ORACLE, PE_ONLY, IN_TURN, BY_QUEUE, BY_TIE, SPLIT, KEPT, RECOMPUTE = range(
    len(READ_REASONS)
)
#: Sides as kernels name them.
PE_SIDE, DE_SIDE = 0, 1

Reads = tuple[tuple[HitRun, ...], str]


class Reader(NamedTuple):
    """A node that could read: its queue, what it was given so far, and its speed (relative).

    ``kept_tokens`` at the head of the prompt lie in its engine's DRAM.
    """

    queue_tokens: int
    total_tokens: int
    tokens_per_s: float = 1.0
    kept_tokens: int = 0


def choose_reads(
    rule: int, turn: int, prefill: Reader, decode: Reader, hit_tokens: int, block_tokens: int
) -> Reads:
    """Return the runs of hit blocks, each with its side, and the reason; see ``read_tokens``."""
    at_decode, at_prefill = kept_tokens(rule, prefill.kept_tokens, decode.kept_tokens)
    unread = hit_tokens - at_decode - at_prefill
    head, tail, reason = read_tokens(rule, turn, *prefill[:3], *decode[:3], unread, block_tokens)
    runs = hit_runs(at_decode, at_prefill, head, tail, block_tokens)
    return runs, READ_REASONS[reason if unread or not hit_tokens else KEPT]


def hit_runs(
    at_decode: int, at_prefill: int, head: int, tail: int, block_tokens: int
) -> tuple[HitRun, ...]:
    """Return the runs of a hit, from the tokens that come from each place, in block order.

    What the DE's DRAM keeps is first, what the PE's keeps behind it; then what the PE reads, the
    ``head``, and what the DE reads, the ``tail``.
    """
    runs, first = [], 0
    for side, tokens, kept in (
        (Role.DECODE, at_decode, True),
        (Role.PREFILL, at_prefill, True),
        (Role.PREFILL, head, False),
        (Role.DECODE, tail, False),
    ):
        blocks = BlockRun(first, holding_blocks(tokens, block_tokens))
        if blocks:
            runs.append(HitRun(side, blocks, cached=kept))
        first = blocks.end
    return tuple(runs)


def kept_tokens(rule: int, pe_kept: int, de_kept: int) -> tuple[int, int]:
    """Return how many tokens at the head are taken from the DE's DRAM, and behind them the PE's.

    ``*_kept`` tokens at the head of the hit lie there.  A rule that never reads at the DE takes
    none from it either, and Oracle moves nothing.
    """
    if rule == NO_READS:
        return 0, 0
    at_decode = 0 if rule == PE_READS else de_kept
    return at_decode, max(pe_kept - at_decode, 0)


def read_tokens(
    rule: int,
    turn: int,
    pe_queue: int,
    pe_total: int,
    pe_rate: float,
    de_queue: int,
    de_total: int,
    de_rate: float,
    hit_tokens: int,
    block_tokens: int,
) -> tuple[int, int, int]:
    """Return the leading hit tokens the PE reads, the rest, which the DE reads, and the reason.

    ``turn`` is the side whose turn it is, looked at by ``SIDES_IN_TURN`` alone.  Queues and totals
    of both nodes in tokens, ``*_rate`` of their storage NICs in tokens/s; the reason is a place in
    ``READ_REASONS``.
    """
    if hit_tokens == 0:
        return 0, 0, NO_HIT
    if rule == NO_READS:
        return 0, 0, ORACLE
    if rule == PE_READS:
        return hit_tokens, 0, PE_ONLY
    if rule == SIDES_IN_TURN:
        head = hit_tokens if turn == PE_SIDE else 0
        return head, hit_tokens - head, IN_TURN
    at_prefill, reason = choose_by_queue(pe_queue, pe_total, pe_rate, de_queue, de_total, de_rate)
    head = hit_tokens if at_prefill else 0
    if rule == BOTH_SIDES:
        head = split_head_tokens(
            pe_queue, pe_total, pe_rate, de_queue, de_total, de_rate, hit_tokens, block_tokens
        )
        if 0 < head < hit_tokens:
            reason = SPLIT
    return head, hit_tokens - head, reason


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
    """Return how many leading hit tokens the PE reads so that both sides finish together.

    Whole blocks, queues included.  Of the two numbers of blocks around the optimum the one with the
    earlier end is taken, on equal ends the one that gives less to the node charged more so far.
    """
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
