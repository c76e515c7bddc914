"""Where the hit tokens of a placed request come from: DRAM, storage at either side, computation.

*Read side* (§6.1).  The side with the shorter reading queue reads, in tokens queued at the node.
With unequal storage NICs the time to drain the queue counts.  Left open by the paper, decided here:
equal queues go to the node that was assigned fewer tokens to read so far, and to the PE if that is
equal as well.  On an idle cluster queues are nearly always equal, so the tie decides the balance of
the storage NICs.

*DRAM* (beyond the paper).  Hits that either engine caches in DRAM are not read.  Those that the DE
caches come first, because they need not be sent there either; then those that the PE caches behind
them.  The rule decides on the rest.  What the two engines cache beyond the stored blocks, of which
a write failed or which storage has evicted, makes the hit longer; a request on other engines
computes it.

*Recomputation* (beyond the paper).  A part of a hit is recomputed if that is faster.  A request is
prefilled when its hits are in DRAM and its PE is free.  If r tokens are read per second behind q
queued ones, c computed, and the PE is busy for w seconds, then loading x of u unread hit tokens
ends the prefill max(w, (q + x) / r) + (u - x) / c from now, without any wait for reads at x = 0.
The best x is all; none; the tokens that are read anyway while the PE is busy, x = w r - q; or, if
that is more, the fewest that leave no more than ``recompute_limit_s`` to compute.  The head is
loaded and the tail recomputed, because recomputed tokens attend to all tokens before them.

- r is the speed behind α, of either node; c is that behind β, with ``recompute_weight``: a token
  takes longer the more tokens are before it.  The end is concave in x all the same where reads take
  longer than the PE is busy, so that no other x is better.  Where engines report no such weight,
  each token counts ``computed_weight``: that of a token that is appended at the turn that β is
  stated for, more than the tokens of shorter contexts and longer appends take.
- How long the PE is busy follows from the tokens that it computes for earlier requests, each
  counted with ``computed_weight``.  Their loads delay nothing there: of tok_e, their prompts, most
  are hits.
- Recomputed tokens count with their weight in the PE's load; else one long reading queue would send
  all requests to PEs at once.
- Only DualPath and Split recompute.  Basic, Layerwise and Round robin are the baselines, and Oracle
  reads nothing.  If α or β is unlimited, or 0, it implies no rate: everything is loaded.

*Append at the DE* (beyond the paper).  Where the whole hit is in the DE's DRAM, or the DE reads
what is not, and few tokens follow it, the DE computes them itself: no PE loads the hit and sends
it nothing.  vLLM computes them beside the next step of the DE's requests, which then takes longer.
So the DE does that if it takes at most the request's time at its PE.  Times are in tokens to
compute: at the PE the tokens that it computes before the request and those of the append; at the DE
the appends before it, and its own tokens once for each other request there, all of which wait.  A
request that has a DE and no PE yet, because all PEs are overloaded, is compared with the PE that
has the fewest tokens to compute, if the DE caches its whole hit.  DEs that compute in lock step
compute no append, as the whole group would wait, nor does any DE in mode Basic, Layerwise, Round
robin or Oracle.

*Hand-over in HBM* (beyond the paper).  With ``handover`` HBM a DE receives the KV of each prompt in
its HBM, which its account books from the assignment on in either case.  Its buffer then holds what
the DE reads or caches, not whole prompts: requests do not wait for DRAM that they only pass
through.  AUTO takes HBM for a request if its DE's account is not overdrawn with it: a report may
show less free HBM than the DE had when it was chosen.  Baselines use the buffer, and so does a
request without a PE, which hands nothing over.  Reads that are planned again may give the DE no
more blocks than it has reserved slots for: a DE that reserved more while it holds slots could wait
for a request that waits for it.

*Third DEs* (beyond the paper).  With ``third_engine_reads`` N, up to N DEs that are not the
request's serve a part of its hit from their buffers: the PE loads it from there and sends it to the
DE.  What such a DE caches behind the blocks that PE and DE cache comes from the one that caches
most.  Of what is read, Split gives each third DE the whole blocks that its storage NIC has read
when all end together; the sides share the rest by their rule.  DualPath lets the third DE with the
shortest queue read, if that is shorter than those of both sides.  One DE of a node is considered,
and none of the nodes of PE and DE.  No request waits for slots of a third DE: if they are not free,
or blocks are evicted by then, the reads are planned again without third DEs.  Recomputation
does not count their storage NICs, and what they cache beyond the stored blocks is not used.

A new rule is a constant here, the mode that uses it in ``RULES``, a branch of ``read_tokens`` and
its reason: the live scheduler and both cores of the simulator call ``read_tokens``, the compiled
one as it stands.  A new input from engines is a field of ``core.control.Load``, which the engine's
``TrafficManager.report`` fills in, and a column of ``policy.accounts``.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dualpath.core.blocks import holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.modes import Handover, Mode
from dualpath.core.rates import RecomputeWeight
from dualpath.core.request import Request
from dualpath.core.runs import BlockRun, HitRun
from dualpath.policy.accounts import COMPUTING, FREE_HBM, NODE, SEQ, EngineAccount, Ledger
from dualpath.policy.baselines import SidesInTurn
from dualpath.policy.events import (
    ALPHA_S,
    BASELINE,
    BETA_S,
    BY_SETTING,
    HANDOVER_REASONS,
    HBM_FREE,
    HBM_FULL,
    NOTHING_SENT,
    UNLIMITED_TOKENS,
    SchedulerSettings,
)

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

#: Why hits are read where they are: ``kept`` if nothing is read, ``recompute`` if a part of them is
#: recomputed, ``third`` if a third DE reads some or has them in DRAM.
READ_REASONS = (
    "no-hit",
    "oracle",
    "pe-only",
    "round-robin",
    "shorter-queue",
    "tie",
    "split",
    "kept",
    "recompute",
    "third",
)
#: Their places, as kernels return them.
NO_HIT, ORACLE, PE_ONLY, IN_TURN, BY_QUEUE, BY_TIE, SPLIT, KEPT, RECOMPUTE, THIRD = range(
    len(READ_REASONS)
)
#: Sides as kernels name them.
PE_SIDE, DE_SIDE = 0, 1

Reads = tuple[tuple[HitRun, ...], str]

#: As many slots as a DE may need.
UNLIMITED_BLOCKS = 1 << 60


class Reader(NamedTuple):
    """A node that could read: its queue, what it was given so far, and its speed (relative).

    ``cached_tokens`` at the head of the prompt are in its engine's DRAM.
    """

    queue_tokens: int
    total_tokens: int
    tokens_per_s: float = 1.0
    cached_tokens: int = 0


class ThirdReader(NamedTuple):
    """A third DE that could serve a part of a hit; its reader's ``cached_tokens`` may be 0."""

    engine_id: str
    reader: Reader


def choose_reads(
    rule: int,
    turn: int,
    prefill: Reader,
    decode: Reader,
    hit_tokens: int,
    block_tokens: int,
    decode_slots: int = UNLIMITED_BLOCKS,
    thirds: Sequence[ThirdReader] = (),
    *,
    third_reads: bool = True,
) -> Reads:
    """Return the runs of hit blocks, each with its side, and the reason; see ``read_tokens``.

    The DE has ``decode_slots`` for what it caches and reads.  ``thirds`` may serve a part, from
    DRAM or, with ``third_reads``, from storage; the first is the only one that may have it in DRAM.
    """
    at_decode, at_prefill = cache_hit_tokens(rule, prefill.cached_tokens, decode.cached_tokens)
    unread = hit_tokens - at_decode - at_prefill
    at_third: list[ThirdRun] = []
    if thirds and rule in (SHORTER_QUEUE, BOTH_SIDES):
        cached = at_decode + at_prefill
        at_third = cached_third_run(thirds[0], cached, unread, block_tokens)
        unread -= sum(tokens for _, tokens, _ in at_third)
    if thirds and third_reads and rule in (SHORTER_QUEUE, BOTH_SIDES):
        reading = third_read_runs(rule, prefill, decode, thirds, unread, block_tokens)
        unread -= sum(tokens for _, tokens, _ in reading)
        at_third += reading
    head, tail, reason = read_tokens(rule, turn, *prefill[:3], *decode[:3], unread, block_tokens)
    most_blocks = decode_slots - holding_blocks(at_decode, block_tokens)
    if holding_blocks(tail, block_tokens) > most_blocks:
        head = unread
        if rule == BOTH_SIDES:
            head = (holding_blocks(unread, block_tokens) - most_blocks) * block_tokens
        tail = unread - head
    runs = hit_runs(at_decode, at_prefill, head, tail, block_tokens, at_third)
    if at_third:
        reason = THIRD
    elif hit_tokens and not unread:
        reason = KEPT
    return runs, READ_REASONS[reason]


#: Of a third DE: its id, how many tokens of a hit it serves, and whether it has them in DRAM.
ThirdRun = tuple[str, int, bool]


def hit_runs(
    at_decode: int,
    at_prefill: int,
    head: int,
    tail: int,
    block_tokens: int,
    at_third: Iterable[ThirdRun] = (),
) -> tuple[HitRun, ...]:
    """Return the runs of a hit, from the tokens that come from each place, in block order.

    What the DE caches in DRAM is first, what the PE caches behind it, and what third DEs serve
    behind that; then what the PE reads, the ``head``, and what the DE reads, the ``tail``.
    """
    runs, first = [], 0
    for side, tokens, cached, third in (
        (Role.DECODE, at_decode, True, ""),
        (Role.PREFILL, at_prefill, True, ""),
        *((Role.PREFILL, tokens, cached, engine_id) for engine_id, tokens, cached in at_third),
        (Role.PREFILL, head, False, ""),
        (Role.DECODE, tail, False, ""),
    ):
        blocks = BlockRun(first, holding_blocks(tokens, block_tokens))
        if blocks:
            runs.append(HitRun(side, blocks, cached=cached, third=third))
        first = blocks.end
    return tuple(runs)


def cached_third_run(
    third: ThirdReader, cached_tokens: int, unread_tokens: int, block_tokens: int
) -> list[ThirdRun]:
    """Return what a third DE has in DRAM behind the ``cached_tokens`` of PE and DE.

    Whole blocks, as with ``third_read_runs``: a last block that is hit in part is PE's or DE's.
    """
    tokens = min(third.reader.cached_tokens - cached_tokens, unread_tokens)
    whole = tokens - tokens % block_tokens
    return [(third.engine_id, whole, True)] if whole > 0 else []


def third_read_runs(
    rule: int,
    prefill: Reader,
    decode: Reader,
    thirds: Sequence[ThirdReader],
    unread_tokens: int,
    block_tokens: int,
) -> list[ThirdRun]:
    """Return what third DEs read of the ``unread_tokens``."""
    tokens = third_read_tokens(rule, prefill, decode, thirds, unread_tokens)
    whole = ((one.engine_id, n - n % block_tokens) for one, n in zip(thirds, tokens, strict=True))
    return [(engine_id, n, False) for engine_id, n in whole if n]


def third_read_tokens(
    rule: int,
    prefill: Reader,
    decode: Reader,
    thirds: Sequence[ThirdReader],
    unread_tokens: int,
) -> list[int]:
    """Return how many tokens each third DE reads.

    By ``BOTH_SIDES`` such that all storage NICs with a part end together, queues included.
    """
    readers = [third.reader for third in thirds]
    if rule == SHORTER_QUEUE:
        shortest = min(readers, key=_drained)
        takes = _drained(shortest) < min(_drained(prefill), _drained(decode))
        return [unread_tokens if takes and one is shortest else 0 for one in readers]
    tokens, rate, end = unread_tokens, 0.0, 0.0
    for reader in sorted((prefill, decode, *readers), key=_drained):
        if rate and _drained(reader) >= end:
            break
        tokens += reader.queue_tokens
        rate += reader.tokens_per_s
        end = tokens / rate
    return [max(int(end * r.tokens_per_s) - r.queue_tokens, 0) for r in readers]


def _least_to_read(third: ThirdReader) -> tuple[float, float]:
    """Return a key that is smaller for nodes that have less to read, then had less so far."""
    return _drained(third.reader), third.reader.total_tokens / third.reader.tokens_per_s


def _drained(reader: Reader) -> float:
    """Return when a node has read what is queued there."""
    return reader.queue_tokens / reader.tokens_per_s


def cache_hit_tokens(rule: int, pe_cached: int, de_cached: int) -> tuple[int, int]:
    """Return how many tokens at the head are taken from the DE's DRAM, and behind them the PE's.

    ``*_cached`` tokens at the head of the hit are there.  A rule that never reads at the DE uses
    none of it either, and Oracle moves nothing.
    """
    if rule == NO_READS:
        return 0, 0
    at_decode = 0 if rule == PE_READS else de_cached
    return at_decode, max(pe_cached - at_decode, 0)


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

    ``turn`` is the next side in turn, used by ``SIDES_IN_TURN`` only.  Queues and totals
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


# ------------------------------------------------------------------------ recomputation


def weight_tokens(hit_tokens: int, recomputed_tokens: int, weight: RecomputeWeight) -> int:
    """Return how many prompt tokens are as much work as those recomputed at the end of a hit."""
    return int(weight.tokens(hit_tokens - recomputed_tokens, recomputed_tokens))


def recompute_tokens(
    rule: int,
    cached_tokens: int,
    unread_tokens: int,
    computing_tokens: int,
    pe_queue: int,
    de_queue: int,
    alpha_tokens: int,
    beta_tokens: int,
    computed_weight: float,
    weight: RecomputeWeight,
    limit_s: float,
    block_tokens: int,
) -> int:
    """Return how many tokens at the end of a hit are recomputed, 0 if loading is as fast.

    The engines have the first ``cached_tokens`` of the hit in DRAM, and none of the
    ``unread_tokens`` behind them.  ``computing_tokens`` are those that the PE has to compute of
    requests before it, ``*_queue`` are the reading queues of both nodes.  Recomputing takes
    ``limit_s`` at most; 0 recomputes nothing.
    """
    slowest, fastest = min(alpha_tokens, beta_tokens), max(alpha_tokens, beta_tokens)
    unknown = slowest <= 0 or fastest >= UNLIMITED_TOKENS
    if limit_s <= 0 or unknown or (rule != SHORTER_QUEUE and rule != BOTH_SIDES):
        return 0
    prompt_per_s, read_per_s = beta_tokens / BETA_S, alpha_tokens / ALPHA_S
    queue = min(pe_queue, de_queue)
    if rule == BOTH_SIDES:
        queue, read_per_s = pe_queue + de_queue, 2 * read_per_s
    wait_s = computing_tokens * computed_weight / prompt_per_s
    meanwhile = min(max(int(min(wait_s * read_per_s, 1e15)) - queue, 0), unread_tokens)
    hit_tokens = cached_tokens + unread_tokens
    within_limit = min(weight.most_before(hit_tokens, limit_s * prompt_per_s), unread_tokens)
    least = holding_blocks(unread_tokens - within_limit, block_tokens) * block_tokens
    loaded, end_s = unread_tokens, max(wait_s, (queue + unread_tokens) / read_per_s)
    for tokens in (meanwhile // block_tokens * block_tokens, min(least, unread_tokens), 0):
        recomputed = weight.tokens(cached_tokens + tokens, unread_tokens - tokens)
        compute_s = recomputed / prompt_per_s
        load_s = (queue + tokens) / read_per_s if tokens else 0.0
        if compute_s <= limit_s and max(wait_s, load_s) + compute_s < end_s:
            loaded, end_s = tokens, max(wait_s, load_s) + compute_s
    return unread_tokens - loaded


# ------------------------------------------------------------------------ append at the DE


def appends_at_decode(
    limit_tokens: int,
    append_tokens: int,
    prefill_computing_tokens: int,
    decode_computing_tokens: int,
    other_requests: int,
) -> bool:
    """Return whether a DE computes ``append_tokens`` behind a hit; ``limit_tokens`` 0: never.

    ``*_computing_tokens`` are those that the PE and the DE compute before it, ``other_requests``
    those of the DE, which wait for the append.
    """
    if append_tokens > limit_tokens:
        return False
    at_prefill = prefill_computing_tokens + append_tokens
    return at_prefill >= decode_computing_tokens + append_tokens * other_requests


# ------------------------------------------------------------------------ both, with the ledger


def tokens_of(blocks: int, hit_tokens: int, block_tokens: int) -> int:
    """Return how many tokens of a hit the first ``blocks`` of a prompt have, cached or stored.

    ``hit_tokens`` are stored; the last of their blocks may be hit in part.
    """
    if blocks <= holding_blocks(hit_tokens, block_tokens):
        return min(blocks * block_tokens, hit_tokens)
    return blocks * block_tokens


class HitSource(NamedTuple):
    """The runs of a hit and the reason; its last ``recompute_tokens`` are in none of them.

    ``unstored_tokens`` at its end are in DRAM only; the hit has either these or recomputed tokens.
    """

    runs: tuple[HitRun, ...]
    reason: str
    recompute_tokens: int
    unstored_tokens: int

    def recomputing_more(self, tokens: int) -> "HitSource":
        """Return the source of a hit that is longer by ``tokens``, which are recomputed."""
        recomputed = self.recompute_tokens + tokens
        reason = READ_REASONS[RECOMPUTE] if recomputed else self.reason
        return self._replace(reason=reason, recompute_tokens=recomputed)


class HitSources:
    """Plans where hits come from by the rule of a mode, for the ledger as it stands.

    It charges nothing; ``settings`` may be replaced by settings with other thresholds.
    """

    def __init__(self, settings: SchedulerSettings, ledger: Ledger) -> None:
        self.settings = settings
        self._ledger = ledger
        self._rule = RULES[settings.mode]
        self._sides = SidesInTurn()

    def cached_tokens(self, request: Request) -> dict[str, int]:
        """Return the tokens that joined engines cache and the mode can use, by engine.

        They may be more than are stored.
        """
        if self._rule == NO_READS or not request.cached:
            return {}
        engines = self._ledger.engines
        block_tokens = self.settings.block_tokens
        return {
            prefix.engine_id: tokens_of(prefix.blocks, request.hit_tokens, block_tokens)
            for prefix in request.cached
            if (engine := engines.get(prefix.engine_id)) is not None
            and (engine.spec.role is Role.PREFILL or self._rule != PE_READS)
        }

    def append_at_decode(
        self, request: Request, source: "HitSource | None", engines: Mapping[Role, str], cached: int
    ) -> "HitSource | None":
        """Return the source of a request's hit if its DE computes what follows it, else None.

        ``engines`` are those that the ledger has it at, with or without a PE; ``source`` is the
        plan for both of them, None without a PE; ``cached`` tokens of the hit are in the DE's DRAM.
        """
        settings = self.settings
        if not (settings.append_at_decode_tokens and request.append_at_decode):
            return None
        if request.given_prefill or request.only_decode:
            return None
        decode = self._ledger.engines[engines[Role.DECODE]]
        if decode.spec.lockstep or self._rule not in (SHORTER_QUEUE, BOTH_SIDES):
            return None
        if source is None:
            if cached < request.hit_tokens:
                return None
            source = self.at_decode(request.hit_tokens, cached)
            prefill = [one for one in self._ledger.ring(Role.PREFILL) if not one.paused]
        else:
            prefill = [self._ledger.engines[engines[Role.PREFILL]]]
        hit_tokens = request.hit_tokens + source.unstored_tokens
        at_prefill = any(run.side is Role.PREFILL for run in source.runs)
        if not hit_tokens or at_prefill or source.recompute_tokens or not prefill:
            return None
        appends = appends_at_decode(
            settings.append_at_decode_tokens,
            request.prompt_tokens - hit_tokens,
            min(engine.account(COMPUTING) for engine in prefill),
            decode.account(COMPUTING),
            decode.account(SEQ) - 1,
        )
        return source if appends else None

    def at_decode(self, hit_tokens: int, cached_tokens: int) -> "HitSource":
        """Return the source of a hit of which the DE caches the head and reads the rest.

        ``hit_tokens`` are stored; the DE may cache more.
        """
        unread, unstored = max(hit_tokens - cached_tokens, 0), max(cached_tokens - hit_tokens, 0)
        runs = hit_runs(cached_tokens, 0, 0, unread, self.settings.block_tokens)
        return HitSource(runs, READ_REASONS[BY_QUEUE if unread else KEPT], 0, unstored)

    def handover(self, engines: Mapping[Role, str]) -> tuple[Handover, str]:
        """Return where the DE receives the KV of a request that the ledger has at its ``engines``.

        Also the reason, one of ``HANDOVER_REASONS``.
        """
        setting, reasons = self.settings.handover, HANDOVER_REASONS
        if setting is Handover.BUFFER:
            return Handover.BUFFER, reasons[BY_SETTING]
        if self._rule not in (SHORTER_QUEUE, BOTH_SIDES):
            return Handover.BUFFER, reasons[BASELINE]
        if Role.PREFILL not in engines:
            return Handover.BUFFER, reasons[NOTHING_SENT]
        if setting is Handover.HBM:
            return Handover.HBM, reasons[BY_SETTING]
        if self._ledger.engines[engines[Role.DECODE]].account(FREE_HBM) >= 0:
            return Handover.HBM, reasons[HBM_FREE]
        return Handover.BUFFER, reasons[HBM_FULL]

    def plan(
        self,
        hit_tokens: int,
        cached_tokens: Mapping[str, int],
        engines: Mapping[Role, str],
        decode_slots: int = UNLIMITED_BLOCKS,
        *,
        use_thirds: bool = True,
        third_reads: bool = True,
    ) -> HitSource:
        """Plan for a request that the ledger has at both of its ``engines``.

        ``hit_tokens`` are stored, ``cached_tokens`` are in engines' DRAM, by engine.  The DE has
        ``decode_slots`` for what it caches and reads.  ``use_thirds`` False: no third DE serves it;
        ``third_reads`` False: none reads for it.
        """
        settings = self.settings
        prefill = self._reader(engines[Role.PREFILL], cached_tokens)
        decode = self._reader(engines[Role.DECODE], cached_tokens)
        cached = sum(cache_hit_tokens(self._rule, prefill.cached_tokens, decode.cached_tokens))
        unstored = max(cached - hit_tokens, 0)
        hit_tokens += unstored
        recomputed = recompute_tokens(
            self._rule,
            cached,
            hit_tokens - cached,
            self._ledger.engines[engines[Role.PREFILL]].account(COMPUTING),
            prefill.queue_tokens,
            decode.queue_tokens,
            settings.alpha_tokens,
            settings.beta_tokens,
            settings.computed_weight,
            settings.weight_of_recomputed,
            settings.recompute_limit_s,
            settings.block_tokens,
        )
        hit_tokens -= recomputed
        side = PE_SIDE
        if self._rule == SIDES_IN_TURN and hit_tokens > cached:
            side = self._sides.take(engines[Role.PREFILL], engines[Role.DECODE])
        thirds = self._thirds(cached_tokens, engines) if use_thirds else ()
        runs, reason = choose_reads(
            *(self._rule, side, prefill, decode, hit_tokens, settings.block_tokens),
            decode_slots,
            thirds,
            third_reads=third_reads,
        )
        reason = READ_REASONS[RECOMPUTE] if recomputed else reason
        return HitSource(runs, reason, recomputed, unstored)

    def _thirds(
        self, cached_tokens: Mapping[str, int], engines: Mapping[Role, str]
    ) -> Sequence[ThirdReader]:
        """Return the third DEs that may serve a part of a hit, the one that caches most first.

        The others are those with the shortest reading queues, then those given least to read so
        far.
        """
        most, ledger = self.settings.third_engine_reads, self._ledger
        if not most:
            return ()
        own = {ledger.engines[engine_id].account(NODE) for engine_id in engines.values()}
        by_node: dict[int, EngineAccount] = {}
        for engine in ledger.ring(Role.DECODE):
            node = engine.account(NODE)
            if engine.paused or node in own:
                continue
            known = by_node.setdefault(node, engine)
            cached = cached_tokens.get(engine.spec.engine_id, 0)
            if cached > cached_tokens.get(known.spec.engine_id, 0):
                by_node[node] = engine
        thirds = [
            ThirdReader(engine.spec.engine_id, self._reader(engine.spec.engine_id, cached_tokens))
            for engine in by_node.values()
        ]
        if not thirds:
            return ()
        caching = max(thirds, key=lambda third: third.reader.cached_tokens)
        if not caching.reader.cached_tokens:
            caching = min(thirds, key=_least_to_read)
        rest = (third for third in thirds if third is not caching)
        return [caching, *heapq.nsmallest(most - 1, rest, key=_least_to_read)]

    def _reader(self, engine_id: str, cached_tokens: Mapping[str, int]) -> Reader:
        engine = self._ledger.engines[engine_id]
        return Reader(
            queue_tokens=self._ledger.node_read_q[engine.account(NODE)],
            total_tokens=self._ledger.node_read_total[engine.account(NODE)],
            tokens_per_s=engine.spec.snic_tokens_per_s,
            cached_tokens=cached_tokens.get(engine_id, 0),
        )
