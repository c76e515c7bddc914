"""Where the hit tokens of a placed request are read: at the PE, at the DE, or at both (§6.1).

*By queue* (the paper).  The side with the shorter reading queue reads, in tokens queued at the
node.  With unequal storage NICs what counts is the time to drain the queue.  Left open by the
paper, decided here: equal queues go to the node that was given fewer tokens to read so far, and to
the PE when that is equal as well.  On an idle cluster queues are equal nearly always, so the tie
decides the balance of the storage NICs.

*By finish time* (beyond the paper).  The side on which the request would be prefilled earlier
reads.  Prefill begins when the read is over and the PE is through with what it was told before;
from there the pass takes as long as the PE computes or as its CNIC carries the hits, whichever is
longer.  A hit token read at the PE leaves it twice through its CNIC (loopback into HBM, then to
the DE buffer), one read at the DE enters it once: ``PE_READ_CNIC_TRIPS``, ``DE_READ_CNIC_TRIPS``.

Often that leaves a choice: both reads are over before a busy PE gets to the request.  Such a
request takes the side that keeps links busy for the shorter time, its CNIC trips on top of the
queue it joins.  So among short queues the DE side reads, which spares the PE's CNIC, DRAM and
buffer; as soon as its queue is longer by the saved trip, the PE side does.  Considered and left:

- Always the DE side, since this request loses nothing by it.  The queue there would grow to the
  backlog of a busy PE (seconds, up to β) before any PE node's SNIC helped, and requests for idle
  PEs would find one of their two sides taken.
- Always the PE side, whose SNIC only the equally busy PEs of its node share.  The queue there
  pushes the node into category C3 of Algorithm 1, and every hit token takes one more trip.

The functions on plain numbers decide; the simulator's compiled core calls them as they stand.
"""

from typing import NamedTuple

from dualpath.core.cluster import Role
from dualpath.policy.events import ReadPart

#: What decides, as the kernels return it.
BY_FINISH, BY_QUEUE, BY_TIE = 0, 1, 2
REASONS = ("earlier-finish", "shorter-queue", "tie")

#: Passes of a hit token through the busier direction of the PE's CNIC (``plan.steps``): labels
#: 3-4 and 5-7 both read from it, label 3-5 writes to it.
PE_READ_CNIC_TRIPS = 2
DE_READ_CNIC_TRIPS = 1


class Reader(NamedTuple):
    """A node that could read: its queue, what it was given so far, and its speed (relative)."""

    queue_tokens: int
    total_tokens: int
    tokens_per_s: float = 1.0


class PrefillAhead(NamedTuple):
    """What finish time needs to know of the PE; rates of 0 are unknown and cost no time.

    ``before_tokens`` the PE was told of before this request, whose prompt is ``prompt_tokens``.
    Rates in tokens/s, as are the ``Reader.tokens_per_s`` beside them.
    """

    before_tokens: int
    prompt_tokens: int
    prefill_tokens_per_s: float = 0.0
    cnic_tokens_per_s: float = 0.0


def read_whole(side: Role, hit_tokens: int) -> tuple[ReadPart, ...]:
    """Return the one part that reads everything on one side."""
    return (ReadPart(side=side, first_token=0, tokens=hit_tokens),)


def shorter_queue(prefill: Reader, decode: Reader) -> tuple[Role, str]:
    """Return the side that reads and the reason, "shorter-queue" or "tie"."""
    at_prefill, reason = choose_by_queue(*prefill, *decode)
    return (Role.PREFILL if at_prefill else Role.DECODE), REASONS[reason]


def earlier_finish(
    prefill: Reader, decode: Reader, hit_tokens: int, ahead: PrefillAhead
) -> tuple[Role, str]:
    """Return the side that reads and the reason, "earlier-finish", "shorter-queue" or "tie"."""
    at_prefill, reason = choose_by_finish(
        *prefill,
        *decode,
        hit_tokens,
        ahead.before_tokens,
        ahead.prompt_tokens,
        ahead.prefill_tokens_per_s,
        ahead.cnic_tokens_per_s,
    )
    return (Role.PREFILL if at_prefill else Role.DECODE), REASONS[reason]


def split(
    prefill: Reader, decode: Reader, hit_tokens: int, block_tokens: int
) -> tuple[tuple[ReadPart, ...], str]:
    """Divide the hit blocks so that both sides finish together, their queues included.

    The PE reads the first blocks, the DE the rest.  Of the two whole numbers of blocks around the
    optimum the one with the earlier end is taken, on equal ends the one that gives less to the
    node charged more so far.  A side left without blocks makes it a whole read on the other,
    with the reason that ``shorter_queue`` gives.
    """
    head = split_head_tokens(*prefill, *decode, hit_tokens, block_tokens)
    if 0 < head < hit_tokens:
        parts = (
            ReadPart(side=Role.PREFILL, first_token=0, tokens=head),
            ReadPart(side=Role.DECODE, first_token=head, tokens=hit_tokens - head),
        )
        return parts, "split"
    reason = shorter_queue(prefill, decode)[1]
    return read_whole(Role.PREFILL if head else Role.DECODE, hit_tokens), reason


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


def choose_by_finish(
    pe_queue: int,
    pe_total: int,
    pe_rate: float,
    de_queue: int,
    de_total: int,
    de_rate: float,
    hit_tokens: int,
    before_tokens: int,
    prompt_tokens: int,
    prefill_rate: float,
    cnic_rate: float,
) -> tuple[bool, int]:
    """Return whether the PE reads, and ``BY_FINISH``, ``BY_QUEUE`` or ``BY_TIE``.

    All lengths in tokens, all rates in tokens/s; a rate of 0 of PE or CNIC is unknown.
    """
    free_s = compute_s = pe_cnic_s = de_cnic_s = 0.0
    if prefill_rate > 0:
        free_s = before_tokens / prefill_rate
        compute_s = prompt_tokens / prefill_rate
    if cnic_rate > 0:
        pe_cnic_s = PE_READ_CNIC_TRIPS * hit_tokens / cnic_rate
        de_cnic_s = DE_READ_CNIC_TRIPS * hit_tokens / cnic_rate
    at_prefill = max((pe_queue + hit_tokens) / pe_rate, free_s) + max(compute_s, pe_cnic_s)
    at_decode = max((de_queue + hit_tokens) / de_rate, free_s) + max(compute_s, de_cnic_s)
    if at_prefill != at_decode:
        return at_prefill < at_decode, BY_FINISH
    at_prefill, at_decode = pe_queue / pe_rate + pe_cnic_s, de_queue / de_rate + de_cnic_s
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
    blocks = -(-hit_tokens // block_tokens)
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
