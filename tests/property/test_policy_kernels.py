"""The kernels against readable definitions, and what §6 promises of them."""

import importlib
from collections import deque
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.rates import RecomputeWeight, fitted_recompute_weight
from dualpath.core.request import Request
from dualpath.policy.accounts import IntArray
from dualpath.policy.batching import AttentionGeometry, ComputeQuota, LayerTimeEstimate
from dualpath.policy.decode import (
    assign_decode,
    choose_caching_group,
    choose_group,
    upper_bound_set,
)
from dualpath.policy.events import (
    DE_HIGH_TOKEN,
    DE_KEPT,
    DE_LOW_TOKEN,
    PE_KEPT,
    PE_LONG_QUEUE,
    PE_SHORT_QUEUE,
    TYPICAL_COMPUTED_WEIGHT,
    UNLIMITED_TOKENS,
    EngineJoined,
    EngineSpec,
    Fetch,
    Finished,
    ReadsDone,
    SchedulerSettings,
    Submitted,
)
from dualpath.policy.placement import NOTHING_CACHED, prefill_worth
from dualpath.policy.prefill import assign_prefill
from dualpath.policy.read_side import (
    BOTH_SIDES,
    NO_READS,
    PE_READS,
    PE_SIDE,
    RULES,
    SHORTER_QUEUE,
    SIDES_IN_TURN,
    Reader,
    Reads,
    choose_reads,
    recompute_tokens,
)
from dualpath.policy.scheduler import RequestScheduler

WEIGHT = TYPICAL_COMPUTED_WEIGHT
deterministic = settings(derandomize=True, deadline=None)
tokens = st.integers(0, 1000)
lengths = st.lists(st.integers(1, 400), max_size=20)


def array(values: Sequence[int | list[int]]) -> IntArray:
    return np.array(values, np.int64)


@st.composite
def prefill_groups(draw: st.DrawFn):
    nodes = draw(st.integers(1, 3))
    engines = draw(st.lists(st.tuples(tokens, st.integers(0, nodes - 1)), min_size=1, max_size=8))
    read_q = draw(st.lists(tokens, min_size=nodes, max_size=nodes))
    return [tok for tok, _ in engines], [node for _, node in engines], read_q


@deterministic
@given(prefill_groups(), lengths, tokens, tokens)
def test_algorithm_1_reads_like_the_paper(group, queue, alpha, beta) -> None:
    tok, node, read_q = group
    before = array(tok)
    nothing = array([NOTHING_CACHED] * len(queue)), array([]).reshape(0, len(tok))
    rows, why = assign_prefill(
        before, array(node), array(read_q), array(queue), *nothing, 1.0, alpha, beta
    )

    expected = []
    load = list(tok)
    for length in queue:
        open_engines = [e for e in range(len(load)) if load[e] <= beta]
        second = [e for e in open_engines if read_q[node[e]] <= alpha]
        third = [e for e in open_engines if read_q[node[e]] > alpha]
        category = second or third
        if not category:
            break
        engine = min(category, key=lambda e: load[e])
        load[engine] += length
        expected.append((engine, PE_SHORT_QUEUE if second else PE_LONG_QUEUE))

    assert list(zip(rows.tolist(), why.tolist(), strict=True)) == expected
    assert before.tolist() == tok, "the caller's arrays are left alone"
    for engine, at_first in enumerate(tok):
        assert load[engine] <= max(at_first, beta + max(queue, default=0))


@deterministic
@given(
    st.lists(st.tuples(tokens, st.integers(0, 10), st.integers(-50, 1000)), min_size=1, max_size=8),
    lengths,
)
def test_phase_2_reads_like_the_paper_and_never_exceeds_hbm(engines, queue) -> None:
    tok, seq, free = ([engine[column] for engine in engines] for column in range(3))
    bound = upper_bound_set(array(free), queue)
    assert bound == queue[: len(bound)]
    assert sum(bound) <= sum(max(f, 0) for f in free)
    nothing = array([NOTHING_CACHED] * len(bound)), array([]).reshape(0, len(tok))
    rows, why = assign_decode(array(tok), array(seq), array(free), array(bound), *nothing, 1.05)

    z = 1.05 * (sum(bound) + sum(tok)) / len(tok)
    expected = []
    for length in bound:
        fits = [e for e in range(len(tok)) if free[e] >= length]
        low = [e for e in fits if tok[e] + length <= z]
        if low:
            engine = min(low, key=lambda e: (seq[e], tok[e]))
        elif fits:
            engine = min(fits, key=lambda e: tok[e])
        else:
            break
        tok[engine] += length
        seq[engine] += 1
        free[engine] -= length
        assert free[engine] >= 0
        expected.append((engine, DE_LOW_TOKEN if low else DE_HIGH_TOKEN))
    assert list(zip(rows.tolist(), why.tolist(), strict=True)) == expected


@deterministic
@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6), tokens)
def test_phase_1_takes_the_lightest_group_that_can_hold_the_request(groups, length) -> None:
    totals, largest = ([group[column] for group in groups] for column in range(2))
    row = choose_group(array(totals), array(largest), length)
    able = [g for g in range(len(groups)) if largest[g] >= length]
    assert row == (min(able, key=lambda g: totals[g]) if able else -1)


def test_kernels_compile_and_decide_the_same_compiled() -> None:
    numba = pytest.importorskip("numba")
    # It registers with numba what the kernels call.
    importlib.import_module("dualpath_sim.simulator.compiled.scheduler")
    compiled_prefill = numba.njit(assign_prefill)
    compiled_decode = numba.njit(assign_decode)
    random = np.random.default_rng(7)
    for _ in range(50):
        engines = int(random.integers(1, 12))
        tok, seq, free = (random.integers(0, 1000, engines) for _ in range(3))
        node, read_q = random.integers(0, 3, engines), random.integers(0, 1000, 3)
        queue = random.integers(1, 300, int(random.integers(1, 20)))
        keeping = random.integers(-1, 4, len(queue)), random.integers(0, 300, (4, engines))
        for kernel, compiled, arguments in (
            (assign_prefill, compiled_prefill, (tok, node, read_q, queue, *keeping, 0.7, 400, 600)),
            (assign_decode, compiled_decode, (tok, seq, free, queue, *keeping, 1.05)),
        ):
            for plain, fast in zip(kernel(*arguments), compiled(*arguments), strict=True):
                assert plain.tolist() == fast.tolist()


def test_an_engine_is_chosen_for_its_cached_blocks_while_they_outweigh_its_queue() -> None:
    """10,000 tokens are read in 1 s and computed in 2 s: of 1,000 cached the worth is 500."""
    alpha, beta = 30_000, 25_000
    worth = prefill_worth(alpha, beta)
    assert worth == 0.5
    for ahead, engine, reason in ((499, 1, PE_KEPT), (500, 0, PE_SHORT_QUEUE)):
        group = array([0, ahead]), array([0, 0]), array([0]), array([2000])
        rows, why = assign_prefill(*group, array([0]), array([[0, 1000]]), worth, alpha, beta)
        assert (rows.tolist(), why.tolist()) == ([engine], [reason])
    # A DE counts a cached token as two less, and so does a group of them.
    for ahead, engine, reason in ((1999, 1, DE_KEPT), (2000, 0, DE_HIGH_TOKEN)):
        group = array([0, ahead]), array([0, 1]), array([9000, 9000]), array([2000])
        rows, why = assign_decode(*group, array([0]), array([[0, 1000]]), 0.9)
        assert (rows.tolist(), why.tolist()) == ([engine], [reason])
        totals, largest = array([0, ahead]), array([9000, 9000])
        assert choose_caching_group(totals, largest, 2000, array([0, 1000]), 0) == engine


def test_cached_blocks_do_not_change_the_category() -> None:
    cached = array([0]), array([[0, 0, 2000]])
    # The keeper is overloaded, then on a node that has much to read.
    for tok, read_q in (([0, 5, 101], [0, 0, 0]), ([0, 5, 0], [0, 0, 101])):
        group = array(tok), array([0, 1, 2]), array(read_q), array([2000])
        rows, why = assign_prefill(*group, *cached, 1.0, 100, 100)
        assert (rows.tolist(), why.tolist()) == ([0], [PE_SHORT_QUEUE])
    # It has no room.
    group = array([0, 5, 6]), array([0, 1, 2]), array([9000, 9000, 1999]), array([2000])
    rows, why = assign_decode(*group, *cached, 3.0)
    assert (rows.tolist(), why.tolist()) == ([0], [DE_LOW_TOKEN])
    totals, largest = array([0, 5, 6]), array([9000, 9000, 1999])
    assert choose_caching_group(totals, largest, 2000, cached[1][0], 0) == 0


def test_a_de_above_the_threshold_gets_the_conversation_that_it_caches() -> None:
    """Z is 1,820: only the first of three is low-token, the second caches 1,000 of 1,200."""
    for ahead, engine, reason in ((1999, 1, DE_KEPT), (2000, 0, DE_LOW_TOKEN)):
        group = array([0, ahead, 2000]), array([0, 1, 2]), array([9000] * 3), array([1200])
        rows, why = assign_decode(*group, array([0]), array([[0, 1000, 0]]), 1.05)
        assert (rows.tolist(), why.tolist()) == ([engine], [reason])


@deterministic
@given(prefill_groups(), st.integers(1, 400), st.data(), st.sampled_from([0.1, 1.0, 7.3]))
def test_no_pe_of_the_category_ends_earlier_than_the_one_chosen(group, length, data, worth) -> None:
    tok, node, read_q = group
    cached = data.draw(st.lists(tokens, min_size=len(tok), max_size=len(tok)))
    one = array(tok), array(node), array(read_q), array([length])
    rows, why = assign_prefill(*one, array([0]), array([cached]), worth, 500, 900)
    usual, _ = assign_prefill(*one, array([NOTHING_CACHED]), array([cached]), worth, 500, 900)
    assert len(rows) == len(usual)
    for chosen_row, usual_row, reason in zip(rows, usual, why, strict=True):
        short = read_q[node[usual_row]] <= 500
        category = [
            e for e in range(len(tok)) if tok[e] <= 900 and (read_q[node[e]] <= 500) is short
        ]
        assert chosen_row in category
        assert (reason == PE_KEPT) == (chosen_row != usual_row)
        cost = [tok[e] - int(cached[e] * worth) for e in range(len(tok))]
        assert cost[chosen_row] == min(cost[e] for e in category)
        assert tok[chosen_row] - tok[usual_row] <= cached[chosen_row] * worth


@deterministic
@given(
    st.sampled_from([SHORTER_QUEUE, BOTH_SIDES]),
    st.tuples(st.integers(0, 40).map(lambda blocks: 64 * blocks), st.integers(0, 4000)),
    st.tuples(st.integers(0, 5_000), st.integers(0, 60_000), st.integers(0, 60_000)),
    st.tuples(
        st.sampled_from([30, 3000, 90_000]),
        st.sampled_from([500, 50_000, 500_000]),
        st.sampled_from([1.0, 3.5, WEIGHT]),
        st.sampled_from([None, RecomputeWeight(0.0), RecomputeWeight(2.0, 0.003)]),
    ),
    st.sampled_from([0.1, 3.0, 100.0]),
)
def test_no_other_cut_of_a_hit_ends_earlier(rule, hit, queues, thresholds, limit_s) -> None:
    cached, unread = hit
    computing, pe_queue, de_queue = queues
    alpha, beta, computed_weight, recompute_weight = thresholds
    weight = recompute_weight or RecomputeWeight(computed_weight)
    rates = alpha, beta, computed_weight, weight, limit_s, 64
    cut = recompute_tokens(rule, cached, unread, computing, pe_queue, de_queue, *rates)
    read_per_s, prompt_per_s = alpha / 3, beta / 5
    queue = min(pe_queue, de_queue)
    if rule == BOTH_SIDES:
        queue, read_per_s = pe_queue + de_queue, 2 * read_per_s

    def compute_s(recomputed: int) -> float:
        return weight.tokens(cached + unread - recomputed, recomputed) / prompt_per_s

    def end_s(loaded: int) -> float:
        busy_s = computing * computed_weight / prompt_per_s
        load_s = (queue + loaded) / read_per_s if loaded else 0.0
        return max(busy_s, load_s) + compute_s(unread - loaded)

    assert 0 <= cut <= unread
    assert cut == 0 or ((unread - cut) % 64 == 0 and compute_s(cut) <= limit_s)
    possible = [unread, *(x for x in range(0, unread, 64) if compute_s(unread - x) <= limit_s)]
    # A block that is read in part while the PE is busy is all that rounding may cost.
    best_s = min(end_s(x) for x in possible)
    block_s = weight.tokens(cached + unread, 64) / prompt_per_s
    assert end_s(unread - cut) <= best_s + min(64 / read_per_s, block_s) + 1e-9


@deterministic
@given(
    st.tuples(st.floats(0, 100), st.floats(0, 0.01)),
    st.integers(0, 100_000),
    st.floats(0, 1e9),
)
def test_the_most_tokens_within_a_limit_are_found(weight, end, limit) -> None:
    each = RecomputeWeight(*weight)
    most = each.most_before(end, limit)
    assert 0 <= most <= end
    assert each.tokens(end - most, most) <= limit * (1 + 1e-9) + 1e-9
    assert most == end or each.tokens(end - most - 1, most + 1) > limit * (1 - 1e-9) - 1e-9


def test_a_weight_by_position_is_exact_for_whole_attention_and_constant_for_a_window() -> None:
    def whole(cached: int, count: int) -> float:
        return count * (2.0 + 0.5 * (cached + count / 2))

    found = fitted_recompute_weight(whole, 1001, 10.0)
    assert (found.head, found.context_token) == pytest.approx((20.0, 5.0))
    found = fitted_recompute_weight(lambda cached, count: 3.0 * count, 1001, 10.0)
    assert (found.head, found.context_token) == pytest.approx((30.0, 0.0))
    found = fitted_recompute_weight(whole, 1, 10.0)
    assert (found.head, found.context_token) == pytest.approx((22.5, 0.0))


EACH = RecomputeWeight(WEIGHT)


def test_nothing_is_computed_again_without_rates_in_baselines_or_when_switched_off() -> None:
    busy = 0, 640, 0, 1_000_000, 1_000_000
    weights = WEIGHT, EACH

    def cut(rule: int, alpha: int, beta: int, limit_s: float = 100.0) -> int:
        return recompute_tokens(rule, *busy, alpha, beta, *weights, limit_s, 64)

    assert cut(SHORTER_QUEUE, 3000, 500_000) == 640
    assert cut(SHORTER_QUEUE, 3000, 500_000, limit_s=0.0) == 0
    for alpha, beta in ((3000, UNLIMITED_TOKENS), (UNLIMITED_TOKENS, 500_000), (3000, 0), (0, 0)):
        assert cut(SHORTER_QUEUE, alpha, beta) == 0
    assert cut(SHORTER_QUEUE, 0, 500_000) == 0
    for baseline in (PE_READS, SIDES_IN_TURN, NO_READS):
        assert cut(baseline, 3000, 500_000) == 0


def test_what_is_read_while_the_pe_is_busy_is_read_and_the_rest_computed() -> None:
    """In a second 1,000 tokens are read, and 10,000 new ones computed."""
    rates = 3000, int(5 * 10 * EACH.tokens(0, 1000)), WEIGHT, EACH, 5.0, 64
    cut = recompute_tokens(SHORTER_QUEUE, 0, 2048, 5000, 0, 900, *rates)
    assert 2048 - cut == 448, "half a second's reading, in whole blocks"
    assert recompute_tokens(SHORTER_QUEUE, 0, 2048, 5000, 500, 900, *rates) == 2048


def test_a_limit_recomputes_the_longest_tail_that_it_allows() -> None:
    """100,000 tokens are queued; a token takes 1 ms, so that a second allows 960 in blocks."""
    rates = 3000, 5000, 1.0, RecomputeWeight(1.0), 1.0, 64
    assert recompute_tokens(SHORTER_QUEUE, 0, 2048, 0, 100_000, 100_000, *rates) == 960


def test_tokens_far_behind_in_a_context_are_read_where_those_at_its_head_are_recomputed() -> None:
    """1,000 tokens are read in a second; computed 10,000 at the head, 500 behind 40,000."""
    rates = 3000, 5000, 1.0, RecomputeWeight(0.1, 4.75e-5), 100.0, 64
    assert recompute_tokens(SHORTER_QUEUE, 0, 6400, 0, 0, 0, *rates) == 6400
    assert recompute_tokens(SHORTER_QUEUE, 64 * 600, 6400, 0, 0, 0, *rates) == 0


def chosen(rule: int, prefill: Reader, decode: Reader, hit: int = 1, block: int = 1) -> Reads:
    return choose_reads(rule, PE_SIDE, prefill, decode, hit, block)


@deterministic
@given(
    st.sampled_from(sorted(RULES.values())),
    st.tuples(tokens, tokens, st.sampled_from([1.0, 3.0])),
    st.tuples(tokens, tokens, st.sampled_from([1.0, 0.5])),
    st.integers(0, 3000),
    st.sampled_from([1, 16, 64]),
    st.data(),
)
def test_runs_cover_the_hit_in_order_whatever_is_cached(rule, p, d, hit, block, data) -> None:
    blocks = -(-hit // block)
    cached = [min(data.draw(st.integers(0, blocks)) * block, hit) for _ in range(2)]
    prefill = Reader(*p)._replace(cached_tokens=cached[0])
    decode = Reader(*d)._replace(cached_tokens=cached[1])
    runs, reason = chosen(rule, prefill, decode, hit, block)
    if rule == NO_READS:
        assert runs == ()
        return
    assert [run.blocks.first for run in runs] == [0, *(run.blocks.end for run in runs[:-1])][
        : len(runs)
    ]
    assert sum(run.tokens(block, hit) for run in runs) == hit
    at_decode, at_prefill = (
        sum(run.tokens(block, hit) for run in runs if run.cached and run.side is side)
        for side in (Role.DECODE, Role.PREFILL)
    )
    assert at_decode == (0 if rule == PE_READS else cached[1])
    assert at_prefill == max(cached[0] - at_decode, 0)
    assert [run.cached for run in runs] == sorted((run.cached for run in runs), reverse=True)
    assert (reason == "kept") == (hit > 0 and all(run.cached for run in runs))
    # What is not cached is divided as if it were the whole hit.
    rest, _ = chosen(rule, Reader(*p), Reader(*d), hit - at_decode - at_prefill, block)
    assert [(run.side, run.blocks.count) for run in runs if not run.cached] == [
        (run.side, run.blocks.count) for run in rest
    ]


queues = st.tuples(tokens, tokens, st.sampled_from([1.0, 1.0, 0.5, 3.0]))


@deterministic
@given(queues, queues, st.integers(1, 3000), st.sampled_from([1, 16, 64]))
def test_split_covers_the_hits_and_no_other_division_ends_earlier(p, d, hit, block) -> None:
    prefill, decode = Reader(*p), Reader(*d)
    runs, reason = chosen(BOTH_SIDES, prefill, decode, hit, block)

    tokens = [run.tokens(block, hit) for run in runs]
    assert [run.blocks.first * block for run in runs] == [0, *tokens[:-1]]
    assert sum(tokens) == hit
    assert all(count > 0 for count in tokens)
    assert (reason == "split") == (len(runs) == 2)
    assert [run.side for run in runs] == sorted({run.side for run in runs}, reverse=True)

    def end_s(head: int) -> float:
        ends = []
        if head:
            ends.append((prefill.queue_tokens + head) / prefill.tokens_per_s)
        if head < hit:
            ends.append((decode.queue_tokens + hit - head) / decode.tokens_per_s)
        return max(ends)

    head = sum(run.tokens(block, hit) for run in runs if run.side is Role.PREFILL)
    best = min(end_s(min(count * block, hit)) for count in range(-(-hit // block) + 1))
    assert end_s(head) == pytest.approx(best)


@deterministic
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_a_stream_read_at_once_stays_balanced_over_the_sides(hits) -> None:
    """Queues are always empty: the tie-break alone has to balance the storage NICs."""
    total = {Role.PREFILL: 0, Role.DECODE: 0}
    for hit in hits:
        readers = Reader(0, total[Role.PREFILL]), Reader(0, total[Role.DECODE])
        runs, reason = chosen(SHORTER_QUEUE, *readers, hit)
        assert reason == "tie"
        for run in runs:
            total[run.side] += run.tokens(1, hit)
    assert abs(total[Role.PREFILL] - total[Role.DECODE]) <= max(hits)


def test_with_unequal_storage_nics_the_queue_that_drains_first_is_joined() -> None:
    """100 tokens drain in 0.1 s; on a NIC of three times the speed 400 do in 0.13 s."""
    slow, fast = Reader(100, 0, 1000.0), Reader(400, 0, 3000.0)
    for reader, side in ((slow, Role.PREFILL), (Reader(200, 0, 1000.0), Role.DECODE)):
        (run,), reason = chosen(SHORTER_QUEUE, reader, fast)
        assert (run.side, reason) == (side, "shorter-queue")


@pytest.mark.parametrize(
    ("mode", "expected"), [(Mode.DUALPATH, 1.0), (Mode.ROUND_ROBIN, 1.5), (Mode.BASIC, 3.0)]
)
def test_storage_nics_of_two_prefill_and_four_decode_nodes(mode: Mode, expected: float) -> None:
    """§7.5: max/avg of SNIC traffic under a steady load with reads that take no time."""
    scheduler = RequestScheduler(SchedulerSettings(mode, 10_000, 100_000))
    roles = [Role.PREFILL] * 2 + [Role.DECODE] * 4
    for number, role in enumerate(roles):
        scheduler.apply(
            EngineJoined(EngineSpec(f"e{number}", role, f"n{number}", role, number, 10**6))
        )
    read = dict.fromkeys((f"e{number}" for number in range(len(roles))), 0)
    live: deque[str] = deque()
    for number in range(1200):
        scheduler.apply(Submitted(Request(f"r{number}", 1000, 640, 100)))
        (assignment,) = [a for role in Role for a in scheduler.apply(Fetch(role)).assignments]
        (run,) = assignment.reads
        read[assignment.at(run.side).engine_id] += run.tokens(64, 640)
        scheduler.apply(ReadsDone(assignment.request_id))
        live.append(assignment.request_id)
        if len(live) > 12:
            scheduler.apply(Finished(live.popleft()))
    assert max(read.values()) / (sum(read.values()) / len(read)) == pytest.approx(expected, rel=0.1)


@deterministic
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 2000)), min_size=1, max_size=12),
    st.floats(0.001, 5.0),
    st.sampled_from([1, 16, 64]),
    st.sampled_from([None, 256]),
)
def test_quota_is_fifo_aligned_never_starves_and_is_respected(
    waiting, quota_s, align, window
) -> None:
    geometry = AttentionGeometry(pair_flops=1.0, token_flops=5.0, window_tokens=window)
    estimate = LayerTimeEstimate(overhead_s=0.01, flops_per_s=1e6)
    quota = ComputeQuota(geometry, estimate, quota_s, align)
    left = list(waiting)
    while left:
        quota.reset()
        taken = [quota.admit(cached, remaining) for cached, remaining in left]
        assert taken[0] > 0
        partial = [t < remaining for t, (_, remaining) in zip(taken, left, strict=True)]
        if True in partial:
            first = partial.index(True)
            assert not any(taken[first + 1 :])
            if taken[first]:
                assert (left[first][0] + taken[first]) % align == 0
        alone = sum(1 for t in taken if t) == 1 and taken[0] <= align
        assert alone or quota.predicted_s <= quota_s * (1 + 1e-9)
        left = [
            (cached + t, remaining - t)
            for t, (cached, remaining) in zip(taken, left, strict=True)
            if t < remaining
        ]
