"""The kernels against readable definitions, and what §6 promises of them."""

from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.policy.accounts import IntArray
from dualpath.policy.batching import AttentionGeometry, ComputeQuota, LayerTimeEstimate
from dualpath.policy.decode import assign_decode, choose_group, upper_bound_set
from dualpath.policy.events import EngineSpec, SchedulerSettings
from dualpath.policy.prefill import assign_prefill
from dualpath.policy.read_side import (
    BOTH_SIDES,
    PE_SIDE,
    SHORTER_QUEUE,
    Reader,
    Reads,
    choose_reads,
)
from dualpath.policy.scheduler import RequestScheduler

deterministic = settings(derandomize=True, deadline=None)
tokens = st.integers(0, 1000)
lengths = st.lists(st.integers(1, 400), max_size=20)


def array(values: list[int]) -> IntArray:
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
    rows, short = assign_prefill(before, array(node), array(read_q), array(queue), alpha, beta)

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
        expected.append((engine, bool(second)))

    assert list(zip(rows.tolist(), short.tolist(), strict=True)) == expected
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
    rows, low_token = assign_decode(array(tok), array(seq), array(free), array(bound), 1.05)

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
        expected.append((engine, bool(low)))
    assert list(zip(rows.tolist(), low_token.tolist(), strict=True)) == expected


@deterministic
@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6), tokens)
def test_phase_1_takes_the_lightest_group_that_can_hold_the_request(groups, length) -> None:
    totals, largest = ([group[column] for group in groups] for column in range(2))
    row = choose_group(array(totals), array(largest), length)
    able = [g for g in range(len(groups)) if largest[g] >= length]
    assert row == (min(able, key=lambda g: totals[g]) if able else -1)


def test_kernels_compile_and_decide_the_same_compiled() -> None:
    numba = pytest.importorskip("numba")
    compiled_prefill = numba.njit(assign_prefill)
    compiled_decode = numba.njit(assign_decode)
    random = np.random.default_rng(7)
    for _ in range(50):
        engines = int(random.integers(1, 12))
        tok, seq, free = (random.integers(0, 1000, engines) for _ in range(3))
        node, read_q = random.integers(0, 3, engines), random.integers(0, 1000, 3)
        queue = random.integers(1, 300, int(random.integers(1, 20)))
        for kernel, compiled, arguments in (
            (assign_prefill, compiled_prefill, (tok, node, read_q, queue, 400, 600)),
            (assign_decode, compiled_decode, (tok, seq, free, queue, 1.05)),
        ):
            for plain, fast in zip(kernel(*arguments), compiled(*arguments), strict=True):
                assert plain.tolist() == fast.tolist()


def chosen(rule: int, prefill: Reader, decode: Reader, hit: int = 1, block: int = 1) -> Reads:
    return choose_reads(rule, PE_SIDE, prefill, decode, hit, block)


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
    """§7.5: max/avg of SNIC traffic under a steady load whose reads take no time."""
    scheduler = RequestScheduler(SchedulerSettings(mode, 10_000, 100_000))
    roles = [Role.PREFILL] * 2 + [Role.DECODE] * 4
    for number, role in enumerate(roles):
        scheduler.engine_joined(EngineSpec(f"e{number}", role, f"n{number}", role, number, 10**6))
    read = dict.fromkeys((f"e{number}" for number in range(len(roles))), 0)
    live: deque[str] = deque()
    for number in range(1200):
        scheduler.submit(Request(f"r{number}", 1000, 640, 100))
        (assignment,) = [a for role in Role for a in scheduler.fetch(role)]
        (run,) = assignment.reads
        at_prefill = run.side is Role.PREFILL
        engine = assignment.prefill_engine if at_prefill else assignment.decode_engine
        read[engine] += run.tokens(64, 640)
        scheduler.read_done(assignment.request_id)
        live.append(assignment.request_id)
        if len(live) > 12:
            scheduler.finished(live.popleft())
    assert max(read.values()) / (sum(read.values()) / len(read)) == pytest.approx(expected, rel=0.1)


@deterministic
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 2000)), min_size=1, max_size=12),
    st.floats(0.001, 5.0),
    st.sampled_from([1, 16, 64]),
    st.sampled_from([None, 256]),
)
def test_quota_is_fifo_aligned_never_starves_and_is_kept(waiting, quota_s, align, window) -> None:
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
