"""Sources of an engine's speed: timed passes, a profile file, the cache, its storage."""

import threading
from pathlib import Path

import msgspec
import pytest

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockGeometry, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError
from dualpath.core.rates import RateOrigin
from dualpath.engine.io import read_speed
from dualpath.engine.threads import OS_THREADS
from dualpath.policy.batching import AttentionGeometry, LayerTimeEstimate
from dualpath.policy.events import (
    TYPICAL_APPEND_TOKENS,
    TYPICAL_COMPUTED_WEIGHT,
    TYPICAL_CONTEXT_TOKENS,
)
from dualpath.storage.contract import WriteOutcome
from dualpath.storage.memory import MemoryStorage
from dualpath.vllm.pass_costs import (
    BesidesAttention,
    PassCosts,
    TimedPass,
    fitted_attention,
    from_passes,
    read_file,
    rough_attention,
)
from dualpath.vllm.profiling import MAX_AGE_S, CachedCosts, CostsCache

ATTENTION = AttentionGeometry(pair_flops=1000.0)
#: Seconds per FLOP and per batch of attention, and per token of everything else.
FLOP_S, BATCH_S, TOKEN_S = 1e-9, 0.01, 2e-4


def timed(cached: int, bsz: int = 512) -> TimedPass:
    attention_s = BATCH_S + ATTENTION.flops(cached, bsz) * FLOP_S
    return TimedPass(cached, bsz, attention_s + bsz * TOKEN_S, attention_s)


# ------------------------------------------------------------------ passes


def costs_of(passes: list[TimedPass], context_limit_tokens: int) -> PassCosts:
    return from_passes(passes, ATTENTION, fitted_attention(passes, ATTENTION), context_limit_tokens)


def besides(costs: PassCosts) -> BesidesAttention:
    assert costs.besides_attention is not None
    return costs.besides_attention


def test_costs_of_passes_are_found_again():
    costs = costs_of([timed(0), timed(512), timed(2048)], 131_072)
    assert costs.attention.flops_per_s == pytest.approx(1 / FLOP_S)
    assert costs.attention.overhead_s == pytest.approx(BATCH_S)
    context, append = TYPICAL_CONTEXT_TOKENS, TYPICAL_APPEND_TOKENS
    turn_s = BATCH_S + ATTENTION.flops(context, append) * FLOP_S + append * TOKEN_S
    assert costs.prefill_tokens_per_s == pytest.approx((context + append) / turn_s)
    assert costs.computed_weight == TYPICAL_COMPUTED_WEIGHT
    recomputed_s = ATTENTION.flops(1000, 5000) * FLOP_S + 5000 * TOKEN_S
    assert costs.recompute_weight is not None
    recomputed = costs.recompute_weight.tokens(1000, 5000) / costs.prefill_tokens_per_s
    assert recomputed == pytest.approx(recomputed_s, rel=1e-3)


def test_a_short_pass_shows_what_a_pass_takes_besides_attention_and_its_tokens():
    """Nothing else is derived from it: its attention is too short to measure."""
    passes = [timed(0), timed(512), timed(2048)]
    alone = costs_of(passes, 131_072)
    assert besides(alone).batch_s == 0
    assert besides(alone).token_s == pytest.approx(TOKEN_S)
    longer = [TimedPass(p.cached, p.bsz, p.pass_s + 0.03, p.attention_s) for p in passes]
    short = TimedPass(0, 16, 0.03 + 16 * TOKEN_S + 0.5, 0.5)
    slow = TimedPass(0, 16, 9.0, 0.5)
    with_short = costs_of([*longer, short, slow], 131_072)
    assert besides(with_short).batch_s == pytest.approx(0.03)
    assert besides(with_short).token_s == pytest.approx(TOKEN_S)
    without = costs_of(longer, 131_072)
    assert with_short.attention == without.attention == alone.attention
    assert with_short.prefill_tokens_per_s == without.prefill_tokens_per_s


def test_a_pass_that_takes_no_longer_with_more_tokens_has_no_time_per_token():
    costs = costs_of([timed(0), timed(512), TimedPass(0, 16, 0.9, 0.1)], 131_072)
    assert besides(costs).batch_s == pytest.approx(512 * TOKEN_S)
    assert besides(costs).token_s == 0


@pytest.mark.parametrize("limit", [2048, 100])
def test_the_typical_turn_fills_a_short_context(limit):
    append = min(TYPICAL_APPEND_TOKENS, limit)
    flops = ATTENTION.flops(limit - append, append)
    turn_s = BATCH_S + flops * FLOP_S + append * TOKEN_S
    costs = costs_of([timed(0), timed(512)], limit)
    assert costs.prefill_tokens_per_s == pytest.approx(limit / turn_s)
    assert costs.computed_weight == limit / append


def test_passes_without_a_linear_fit_yield_a_throughput():
    flat = [TimedPass(0, 512, 0.2, 0.1), TimedPass(512, 512, 0.2, 0.1)]
    with pytest.raises(ConfigError, match="must be above 0"):
        fitted_attention([flat[0], TimedPass(512, 512, 0.2, 0.05)], ATTENTION)
    flops = ATTENTION.flops(0, 512) + ATTENTION.flops(512, 512)
    assert rough_attention(flat, ATTENTION).flops_per_s == pytest.approx(flops / 0.2)
    assert rough_attention(flat, ATTENTION).overhead_s == 0
    with pytest.raises(ConfigError, match=r"0 passes fit .*profile.* to a file"):
        rough_attention([], ATTENTION)


# ------------------------------------------------------------------ the file of a profile


def test_a_profile_file_gives_speed_and_attention(tmp_path: Path):
    file = tmp_path / "costs.toml"
    file.write_text('name = "m"\nprefill_tokens_per_s = 250.0\n[prefill]\npair_s = 1e-3\n')
    costs = PassCosts(LayerTimeEstimate(0.0, 1e6), 250.0, TYPICAL_COMPUTED_WEIGHT)
    assert read_file(str(file), ATTENTION) == costs
    file.write_text("computed_weight = 3.0\n" + file.read_text())
    assert read_file(str(file), ATTENTION).computed_weight == 3.0
    file.write_text(file.read_text() + "batch_s = 0.02\nfeed_forward_token_s = 1e-4\n")
    assert read_file(str(file), ATTENTION).besides_attention == BesidesAttention(0.02, 1e-4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("prefill_tokens_per_s = 1.0", "is not a file"),
        ("[", "is not a file"),
        ("prefill_tokens_per_s = 1.0\n[prefill]\npair_s = 0.0", "above 0"),
        ("prefill_tokens_per_s = nan\n[prefill]\npair_s = 1.0", "above 0"),
    ],
)
def test_a_file_that_is_not_a_profile_is_refused(text, words, tmp_path: Path):
    file = tmp_path / "costs.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_file(str(file), ATTENTION)


# ------------------------------------------------------------------ the cache


COSTS = PassCosts(LayerTimeEstimate(0.0, 1e12), 1000.0, 2.0)
OF = {"model": "m", "device": "a"}
NOW_S = 1_700_000_000.0
REMEMBERED = CachedCosts(OF, COSTS, NOW_S)


def test_costs_are_cached_for_the_same_engine_only(tmp_path: Path):
    folder = tmp_path / "new"
    assert CostsCache(folder, OF).load(NOW_S) is None
    CostsCache(folder, OF).store(COSTS, NOW_S)
    assert CostsCache(folder, dict(reversed(OF.items()))).load(NOW_S) == REMEMBERED
    assert CostsCache(folder, OF | {"device": "b"}).load(NOW_S) is None
    assert [file.suffix for file in folder.iterdir()] == [".json"]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 100_000])
def test_a_corrupt_file_counts_as_missing(content, tmp_path: Path, caplog):
    cache = CostsCache(tmp_path, OF)
    cache.file.write_bytes(content)
    assert cache.load(NOW_S) is None
    assert str(cache.file) in caplog.text
    cache.store(COSTS, NOW_S)
    assert cache.load(NOW_S) == REMEMBERED


def test_the_fastest_start_counts_as_a_busy_machine_only_makes_passes_slow(tmp_path: Path):
    cache = CostsCache(tmp_path, OF)
    for start, (tokens_per_s, expected, expected_s) in enumerate(
        [(100.0, 100.0, 0.0), (900.0, 900.0, 1.0), (500.0, 900.0, 1.0)]
    ):
        costs = msgspec.structs.replace(COSTS, prefill_tokens_per_s=tokens_per_s)
        best = cache.store(costs, NOW_S + start)
        assert best == cache.load(NOW_S + start)
        assert (best.costs.prefill_tokens_per_s, best.measured_s) == (expected, NOW_S + expected_s)
        assert best.starts == start + 1


def test_costs_expire_after_a_week_and_with_an_impossible_time(tmp_path: Path):
    cache = CostsCache(tmp_path, OF)
    cache.store(COSTS, NOW_S)
    assert cache.load(NOW_S + MAX_AGE_S) == REMEMBERED
    assert cache.load(NOW_S + MAX_AGE_S + 1) is None
    assert cache.load(NOW_S - 1) is None
    slower = msgspec.structs.replace(COSTS, prefill_tokens_per_s=1.0)
    assert cache.store(slower, NOW_S + MAX_AGE_S + 1).costs == slower


def test_costs_without_a_time_are_measured_again(tmp_path: Path):
    cache = CostsCache(tmp_path, OF)
    cache.file.write_bytes(msgspec.json.encode({"of": OF, "costs": COSTS}))
    assert cache.load(NOW_S) is None


def test_impossible_cached_costs_are_not_used(tmp_path: Path):
    cache = CostsCache(tmp_path, OF)
    cache.store(msgspec.structs.replace(COSTS, prefill_tokens_per_s=0.0), NOW_S)
    assert cache.load(NOW_S) is None


def test_an_unwritable_cache_is_tolerated(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("")
    cache = CostsCache(tmp_path / "file" / "below", OF)
    cache.store(COSTS, NOW_S)
    assert cache.load(NOW_S) is None
    assert "cannot be written" in caplog.text


# ------------------------------------------------------------------ reading storage

NAMESPACE = StoreNamespace(
    model=read_speed.PROBE_MODEL,
    dtype="float32",
    layout="test",
    geometry=BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=4096),
)


class Probed(MemoryStorage):
    """Counts reads and new blocks written."""

    def __init__(self):
        super().__init__(NAMESPACE)
        self.reads, self.new, self.closed = [], 0, False

    def write(self, keys, sources, origin=UNKNOWN_ORIGIN):
        outcome = super().write(keys, sources, origin)
        self.new += outcome.new
        return outcome

    def read(self, key, destination, *, whole=True):
        self.reads.append(key)
        return super().read(key, destination, whole=whole)

    def close(self):
        self.closed = True


def test_reading_is_measured_with_every_block_once_and_written_once():
    storage = Probed()
    first = read_speed.measure(storage, 4, OS_THREADS)
    second = read_speed.measure(storage, 1, OS_THREADS)
    assert first is not None
    assert second is not None
    assert first.origin == second.origin == RateOrigin.MEASURED
    assert first.per_s > 0
    assert second.per_s > 0
    assert storage.new == read_speed.MAX_BLOCKS == len(set(storage.reads))
    assert len(storage.reads) == 2 * read_speed.MAX_BLOCKS
    assert storage.closed


def test_an_unwritable_storage_is_not_measured(caplog):
    class Full(Probed):
        def write(self, keys, sources, origin=UNKNOWN_ORIGIN):
            raise StorageError("no space left; remove blocks")

    assert read_speed.measure(Full(), 4, OS_THREADS) is None
    assert "no space left" in caplog.text


def test_a_storage_without_a_good_read_is_not_measured():
    class Lossy(Probed):
        def write(self, keys, sources, origin=UNKNOWN_ORIGIN):
            return WriteOutcome()

    assert read_speed.measure(Lossy(), 4, OS_THREADS) is None


def test_a_storage_that_hangs_does_not_delay_an_engine(monkeypatch, caplog):
    monkeypatch.setattr(read_speed, "LIMIT_S", 0.01)
    answer = threading.Event()

    class Hanging(Probed):
        def write(self, keys, sources, origin=UNKNOWN_ORIGIN):
            answer.wait()
            return super().write(keys, sources, origin)

    try:
        assert read_speed.measure(Hanging(), 4, OS_THREADS) is None
        assert "does not respond" in caplog.text
    finally:
        answer.set()
