"""Compute quota: Fig. 6 in small, the estimate and its fit."""

import pytest

from dualpath.core.errors import ConfigError
from dualpath.policy.batching import (
    AttentionGeometry,
    ComputeQuota,
    LayerTimeEstimate,
    LoadBound,
    admit,
    fit,
)

PAIRS = AttentionGeometry(pair_flops=1.0)
#: One million (query, key) pairs per second, 10 ms per batch.
ESTIMATE = LayerTimeEstimate(overhead_s=0.01, flops_per_s=1e6)


def test_requests_enter_in_order_until_one_is_cut_and_closes_the_batch() -> None:
    """Fig. 6, left: two requests enter whole, the third is cut, the fourth waits."""
    quota = ComputeQuota(PAIRS, ESTIMATE, quota_s=0.11, align_tokens=16)

    assert quota.admit(cached=320, remaining=64) == 64
    assert quota.admit(cached=0, remaining=128) == 128
    assert quota.admit(cached=640, remaining=400) == 96
    assert quota.closed
    assert quota.predicted_s <= 0.11
    assert quota.admit(cached=0, remaining=1) == 0

    quota.reset()
    assert quota.predicted_s == 0.0
    assert quota.admit(cached=736, remaining=304) == 112


def test_quota_evens_out_attention_time_where_token_counts_do_not() -> None:
    """Fig. 6, right: equal token counts behind different contexts take unequal time."""
    long_context, short_context = (
        ComputeQuota(PAIRS, ESTIMATE, quota_s=0.11, align_tokens=1) for _ in range(2)
    )
    long_bsz = long_context.admit(cached=2000, remaining=1000)
    short_bsz = short_context.admit(cached=100, remaining=1000)

    assert long_bsz < short_bsz < 1000
    assert long_context.predicted_s == pytest.approx(short_context.predicted_s, rel=0.02)


def test_a_cut_ends_on_a_block_boundary_even_when_the_cached_part_does_not() -> None:
    quota = ComputeQuota(PAIRS, ESTIMATE, quota_s=0.11, align_tokens=64)
    bsz = quota.admit(cached=1000, remaining=5000)
    assert bsz > 0
    assert (1000 + bsz) % 64 == 0


def test_an_empty_batch_takes_one_chunk_whatever_it_costs() -> None:
    quota = ComputeQuota(PAIRS, ESTIMATE, quota_s=0.001, align_tokens=64)
    assert quota.admit(cached=1000, remaining=500) == 24
    assert quota.admit(cached=0, remaining=1) == 0
    quota.reset()
    assert quota.admit(cached=1024, remaining=500) == 64
    quota.reset()
    assert quota.admit(cached=1024, remaining=7) == 7


def test_a_limit_caps_the_chunk_and_closes_the_batch() -> None:
    quota = ComputeQuota(PAIRS, ESTIMATE, quota_s=10.0, align_tokens=64)
    assert quota.admit(cached=0, remaining=500, limit=200) == 192
    assert quota.admit(cached=0, remaining=10) == 0
    quota.reset()
    assert quota.admit(cached=0, remaining=500, limit=0) == 0
    quota.reset()
    assert quota.admit(cached=0, remaining=500, limit=40) == 40


def test_pure_function_and_quota_agree() -> None:
    quota = ComputeQuota(PAIRS, ESTIMATE, quota_s=0.11, align_tokens=16)
    batch: list[tuple[int, int]] = []
    for cached, remaining in ((320, 64), (0, 128), (640, 400)):
        bsz = quota.admit(cached, remaining)
        assert bsz == admit(batch, cached, remaining, 0.11, PAIRS, ESTIMATE, align_tokens=16)
        batch.append((cached, bsz))


def test_attention_flops_count_causal_pairs_up_to_the_window() -> None:
    sparse = AttentionGeometry(
        pair_flops=1.0, index_pair_flops=10.0, token_flops=100.0, window_tokens=4
    )
    for cached in range(8):
        for bsz in range(1, 8):
            queries = range(cached, cached + bsz)
            seen = sum(min(query + 1, 4) for query in queries)
            indexed = sum(query + 1 for query in queries)
            # The window is reached one query earlier than it binds: both counts agree there.
            assert sparse.flops(cached, bsz) == seen + 10 * indexed + 100 * bsz


def test_geometry_from_heads_counts_both_products() -> None:
    geometry = AttentionGeometry.from_heads(
        layers=64, query_heads=40, key_dimension=128, value_dimension=128
    )
    assert geometry.pair_flops == 64 * 4 * 40 * 128


def test_where_loads_are_bounded_a_request_enters_while_all_take_a_tenth_of_a_second() -> None:
    """A millisecond per cached token; a pair takes a microsecond."""
    quota = ComputeQuota(PAIRS, ESTIMATE, quota_s=10.0, loads=LoadBound(load_token_s=1e-3))
    assert quota.admit(cached=500, remaining=1) == 1, "the first enters whatever it loads"
    assert quota.admit(cached=1, remaining=1) == 0
    quota.reset()
    assert [quota.admit(cached=60, remaining=1), quota.admit(cached=40, remaining=1)] == [1, 1]
    assert quota.admit(cached=1, remaining=1) == 0
    assert quota.closed
    assert quota.admit(cached=0, remaining=1) == 0, "no request overtakes one that waits"
    quota.reset()
    assert quota.admit(cached=0, remaining=1000) == 1000
    assert quota.admit(cached=500, remaining=1) == 1, "its attention takes 0.51 s"
    assert quota.admit(cached=100, remaining=1) == 0


def test_loads_may_take_as_long_as_the_whole_computation_not_attention_alone() -> None:
    """A batch computes for 0.2 s, and each token of it for 10 ms more."""
    bound = LoadBound(load_token_s=1e-3, batch_s=0.2, token_s=0.01)
    quota = ComputeQuota(PAIRS, ESTIMATE, quota_s=10.0, loads=bound)
    assert quota.admit(cached=50, remaining=10) == 10
    assert quota.admit(cached=250, remaining=1) == 1, "0.3 s, as 0.2 s and 10 tokens take"
    assert quota.admit(cached=30, remaining=1) == 0


def test_the_bound_counts_what_a_batch_loads_and_refuses_what_is_received_in_hbm() -> None:
    quota = ComputeQuota(PAIRS, ESTIMATE, quota_s=10.0)
    quota.reset(load_token_s=1e-3)
    assert quota.admit(cached=500, remaining=1, loaded=0) == 1, "its KV is still in HBM"
    assert quota.admit(cached=100, remaining=1) == 1
    assert quota.admit(cached=900, remaining=1, bounded=False) == 1, "received in the buffer"
    assert quota.admit(cached=1, remaining=1) == 0, "but its load takes time"
    quota.reset()
    assert [quota.admit(cached=90, remaining=1) for _ in range(2)] == [1, 0]
    quota.reset(load_token_s=0.5e-3)
    assert [quota.admit(cached=90, remaining=1) for _ in range(3)] == [1, 1, 0]
    quota.reset(load_token_s=0.0)
    assert [quota.admit(cached=90, remaining=1) for _ in range(9)] == [1] * 9, "not known"


def test_fit_recovers_overhead_and_speed() -> None:
    estimate = fit([(flops, 0.02 + flops / 5e9) for flops in (1e6, 5e8, 2e9, 7e9)])
    assert estimate.overhead_s == pytest.approx(0.02)
    assert estimate.flops_per_s == pytest.approx(5e9)


def test_fit_takes_no_negative_overhead() -> None:
    estimate = fit([(1e6, 0.5e-3), (2e6, 2.1e-3), (3e6, 3.1e-3)])
    assert estimate.overhead_s == 0.0
    assert estimate.seconds(0.0) == 0.0


@pytest.mark.parametrize("samples", [[], [(1e6, 0.1)], [(1e6, 0.1), (1e6, 0.2)]])
def test_fit_wants_different_sizes(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigError, match="several sizes"):
        fit(samples)


def test_fit_refuses_time_that_shrinks_with_work() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        fit([(1e6, 0.3), (2e6, 0.2), (3e6, 0.1)])


@pytest.mark.parametrize(("quota_s", "align_tokens"), [(0.0, 64), (-1.0, 64), (0.3, 0)])
def test_senseless_quota_is_refused(quota_s: float, align_tokens: int) -> None:
    with pytest.raises(ConfigError, match="correct the settings"):
        ComputeQuota(PAIRS, ESTIMATE, quota_s, align_tokens)


def test_the_time_of_given_chunks_is_that_of_the_batch_they_make() -> None:
    geometry = AttentionGeometry(pair_flops=2.0, window_tokens=100, index_pair_flops=0.5)
    quota = ComputeQuota(geometry, LayerTimeEstimate(0.01, 1e6), quota_s=1e9)
    chunks = [(0, 50), (320, 64), (5, 1)]
    for cached, bsz in chunks:
        assert quota.admit(cached, bsz) == bsz
    assert quota.seconds(chunks) == pytest.approx(quota.predicted_s)
    assert quota.seconds([]) == 0.0
