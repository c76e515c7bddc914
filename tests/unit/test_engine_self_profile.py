"""A prefill engine times its own passes at start: with vLLM's types, on the test's clock."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

# isort: split
pytest.importorskip("vllm")

from tests.guard import GUARD_S
from torch.distributed import HashStore
from vllm.v1.core.sched.output import CachedRequestData

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.rates import RateOrigin
from dualpath.engine.ranks.group import ONE_RANK
from dualpath.engine.settings import EngineSettings
from dualpath.policy.batching import AttentionGeometry, LayerTimeEstimate
from dualpath.vllm import parallel_ranks, profiling, quota_scheduler, worker_side
from dualpath.vllm import profiling as self_profile
from dualpath.vllm.metadata import StepMetadata
from dualpath.vllm.pass_costs import PassCosts, TimedPass
from dualpath.vllm.quota_scheduler import ASSUMED_FLOPS_PER_S

BLOCK_TOKENS = 16
NOW_S = 1_700_000_000.0
SETTINGS = EngineSettings(
    role=Role.PREFILL, engine_id="pe-0", router="tcp://h:1", api_url="http://h:2", storage="s",
)  # fmt: skip


class Worker:
    """Steps through a worker's batches, on a clock that the test advances."""

    def __init__(self, clock, side):
        self.clock, self.side = clock, side
        self.steps, self.ended = [], []

    def execute_model(self, step):
        assert isinstance(step.kv_connector_metadata, StepMetadata)
        self.ended += step.finished_req_ids
        if not step.scheduled_new_reqs:
            return
        (new,) = step.scheduled_new_reqs
        cached, bsz = new.num_computed_tokens, step.num_scheduled_tokens[new.req_id]
        assert len(new.prompt_token_ids) == cached + bsz == len(new.block_ids[0]) * BLOCK_TOKENS
        assert 0 not in new.block_ids[0]
        self.steps.append((cached, bsz))
        for _ in range(2):  # layers
            self.side.begin()
            self.clock.now += 1e-4 * (cached + bsz)
            self.side.end()
        self.clock.now += 1e-3

    def sample_tokens(self, grammar_output):
        self.clock.now += 1e-3


@pytest.fixture
def timed(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("dualpath.vllm.profiling.time.perf_counter", lambda: clock.now)
    stopwatch = self_profile.AttentionStopwatch(lambda: None)
    worker = Worker(clock, stopwatch)

    def run(*limits):
        return self_profile.PassTimer(worker, stopwatch, self_profile.PassLimits(*limits)).run()

    return SimpleNamespace(worker=worker, run=run)


def test_passes_are_timed_after_more_and_more_tokens_and_removed(timed):
    passes = timed.run(BLOCK_TOKENS, 100, 60, 10_000)
    assert [(p.cached, p.bsz) for p in passes] == [
        *((cached, 48) for cached in (0, 48, 96, 192, 384, 768, 1536, 1552)),
        (0, BLOCK_TOKENS),
    ]
    for p in passes:
        assert p.attention_s == pytest.approx(2e-4 * (p.cached + p.bsz))
        assert p.pass_s == pytest.approx(p.attention_s + 2e-3)
    assert len(timed.worker.steps) == len(timed.worker.ended) == 1 + 2 * len(passes)


def test_passes_end_when_they_get_long(timed):
    passes = timed.run(BLOCK_TOKENS, 100_000, 2048, 1_000_000)
    assert passes[-1].cached < 100_000
    assert timed.worker.clock.now < 1.1 * self_profile.BUDGET_S


def test_compilation_at_the_first_use_of_a_shape_is_not_part_of_a_passes_time(timed, monkeypatch):
    compute = timed.worker.execute_model
    compilations_s = {cached: [10.0, 5.0] for cached in (48, 96, 192, 384, 768, 1536, 1552)}

    def compiling(step):
        for new in step.scheduled_new_reqs:
            if left := compilations_s.get(new.num_computed_tokens):
                timed.worker.clock.now += left.pop(0)
        compute(step)

    monkeypatch.setattr(timed.worker, "execute_model", compiling)
    passes = timed.run(BLOCK_TOKENS, 100, 60, 10_000)
    assert [p.cached for p in passes] == [0, *compilations_s, 0]
    assert all(p.pass_s == pytest.approx(2e-4 * (p.cached + p.bsz) + 2e-3) for p in passes)


@pytest.mark.parametrize("limits", [(16, 1, 2048, 1000), (16, 100, 2048, 17), (16, 100, 15, 1000)])
def test_an_engine_too_small_for_two_passes_times_none(timed, limits):
    assert timed.run(*limits) == []


def test_a_failed_pass_ends_the_timing_and_is_removed(timed, monkeypatch, caplog):
    sample = timed.worker.sample_tokens

    def sample_short(grammar_output):
        if timed.worker.steps[-1][0] > 48:
            raise RuntimeError("no kernel")
        sample(grammar_output)

    monkeypatch.setattr(timed.worker, "sample_tokens", sample_short)
    assert [p.cached for p in timed.run(BLOCK_TOKENS, 100, 60, 10_000)] == [0, 48]
    assert len(timed.worker.steps) == len(timed.worker.ended)
    assert "cannot compute 48 tokens after 96 cached ones (no kernel)" in caplog.text


def test_a_worker_that_fails_prevents_its_engine_from_serving(timed, monkeypatch):
    monkeypatch.setattr(timed.worker, "execute_model", None)
    with pytest.raises(
        ConfigError, match=r"cannot continue after a timed pass of 48 tokens.*profile.* to off"
    ):
        timed.run(BLOCK_TOKENS, 100, 60, 10_000)


@pytest.mark.parametrize(
    ("set_flops", "costs", "flops_per_s"),
    [
        (0.0, None, ASSUMED_FLOPS_PER_S["cpu"]),
        (0.0, PassCosts(LayerTimeEstimate(0.1, 7.0), 1.0, 2.0), 7.0),
        (5.0, PassCosts(LayerTimeEstimate(0.1, 7.0), 1.0, 2.0), 5.0),
    ],
)
def test_the_quota_is_set_or_else_measured(set_flops, costs, flops_per_s, monkeypatch):
    settings = msgspec.structs.replace(SETTINGS, quota_flops_per_s=set_flops, compute_quota_s=0.3)
    monkeypatch.setattr(quota_scheduler, "settings_of", lambda config: settings)
    monkeypatch.setattr(
        quota_scheduler, "attention_geometry", lambda config: AttentionGeometry(pair_flops=1.0)
    )
    quota = quota_scheduler.quota_for(None, BLOCK_TOKENS, costs)
    assert quota.admit(0, BLOCK_TOKENS) == BLOCK_TOKENS
    overhead_s = 0.1 if flops_per_s == 7.0 else 0.0
    assert quota.predicted_s == pytest.approx(overhead_s + 136 / flops_per_s)


def test_the_quota_predicts_what_the_step_computes():
    step = self_profile.step_of(96, 48, BLOCK_TOKENS)
    running = CachedRequestData.make_empty()
    running.req_ids, running.num_computed_tokens = ["r", "s"], [512, 16]
    step.scheduled_cached_reqs = running
    step.num_scheduled_tokens |= {"s": 16, "r": 64}
    assert quota_scheduler.chunks_of(step) == [(96, 48), (16, 16), (512, 64)]


# ------------------------------------------------------------------ ranks of a data-parallel group


class RankWorker:
    """A rank's worker: every step waits until all ranks compute the same one, as experts do."""

    def __init__(self, barrier, rank, fails_at=None):
        self.barrier, self.rank, self.fails_at = barrier, rank, fails_at
        self.steps, self.ended = [], 0

    def execute_model(self, step):
        self.ended += len(step.finished_req_ids)
        for new in step.scheduled_new_reqs:
            self.steps.append((new.num_computed_tokens, *step.num_scheduled_tokens.values()))
            self.barrier.wait(GUARD_S)
            if new.num_computed_tokens == self.fails_at:
                raise RuntimeError(f"rank {self.rank} has no kernel")

    def sample_tokens(self, grammar_output):
        pass


def group_of(store, workers, blocks=(100, 60), wanted=(True, True), wait_s=GUARD_S):
    """Let all ranks of a group profile themselves; return the number of blocks and the passes."""

    def profile(rank):
        lock_step = self_profile.LockStep(store, rank, len(workers), wait_s)
        agreed = lock_step.begin(wanted[rank], blocks[rank])
        if agreed is None:
            return None, None
        limits = self_profile.PassLimits(BLOCK_TOKENS, agreed, 60, 10_000)
        stopwatch = self_profile.AttentionStopwatch(lambda: None)
        timer = self_profile.PassTimer(workers[rank], stopwatch, limits, ONE_RANK, lock_step)
        return agreed, timer.run()

    with ThreadPoolExecutor(len(workers)) as ranks:
        return list(ranks.map(profile, range(len(workers))))


def test_ranks_of_a_group_time_the_same_passes_together():
    barrier = threading.Barrier(2)
    workers = [RankWorker(barrier, rank) for rank in range(2)]
    (blocks, first), (_, second) = group_of(HashStore(), workers)
    assert blocks == 60  # those of the rank that has fewer
    assert workers[0].steps == workers[1].steps
    assert workers[0].ended == workers[1].ended == len(workers[0].steps)
    sizes = [*((cached, 48) for cached in (0, 48, 96, 192, 384, 768, 912)), (0, BLOCK_TOKENS)]
    assert [(p.cached, p.bsz) for p in first] == [(p.cached, p.bsz) for p in second] == sizes


def test_a_rank_that_has_its_costs_takes_part_if_another_needs_them():
    barrier = threading.Barrier(2)
    workers = [RankWorker(barrier, rank) for rank in range(2)]
    (_, first), (_, second) = group_of(HashStore(), workers, wanted=(False, True))
    assert len(first) == len(second) > 2
    workers = [RankWorker(barrier, rank) for rank in range(2)]
    assert group_of(HashStore(), workers, wanted=(False, False)) == [(None, None)] * 2
    assert workers[0].steps == []


def test_a_pass_that_fails_at_one_rank_ends_the_passes_of_all(caplog):
    barrier = threading.Barrier(2)
    workers = [RankWorker(barrier, 0), RankWorker(barrier, 1, fails_at=96)]
    (_, first), (_, second) = group_of(HashStore(), workers)
    assert [p.cached for p in first] == [p.cached for p in second] == [0, 48]
    assert workers[0].ended == workers[1].ended == len(workers[0].steps)
    assert caplog.text.count("no more passes are timed") == 2
    assert "rank 1 has no kernel" in caplog.text


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_do_not_wait_for_a_late_one_and_it_does_not_begin_alone(late, caplog):
    store = HashStore()
    on_time = self_profile.LockStep(store, 1 - late, 2, wait_s=0.01)
    assert on_time.begin(True, 100) is None
    assert "not ready within 0.01 s" in caplog.text
    assert "restart the group" in caplog.text
    caplog.clear()
    assert self_profile.LockStep(store, late, 2, GUARD_S).begin(True, 100) is None
    assert "its passes are not timed" in caplog.text


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_lost_during_the_passes_ends_the_others(lost):
    store, barrier = HashStore(), threading.Barrier(1)
    both = [self_profile.LockStep(store, rank, 2, wait_s=0.01) for rank in range(2)]
    left = both[1 - lost]
    limits = self_profile.PassLimits(BLOCK_TOKENS, 100, 60, 10_000)
    timer = self_profile.PassTimer(
        RankWorker(barrier, 1 - lost),
        self_profile.AttentionStopwatch(lambda: None),
        limits,
        ONE_RANK,
        left,
    )
    with pytest.raises(ConfigError, match=r"within 0.01 s; see the logs .* or set profile to off"):
        timer.run()


def test_a_rank_with_a_profile_file_takes_part_and_does_not_ask_for_passes(find, tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text("prefill_tokens_per_s = 9.0\n[prefill]\npair_s = 0.5\n")
    asked: list[bool] = []
    settings = msgspec.structs.replace(SETTINGS, profile=str(file))
    profiling.find_costs(settings, vllm_config(size=2), NAMESPACE, asked.append, NOW_S)
    assert asked == [False]


def test_ranks_of_a_group_on_one_machine_cache_their_costs_apart(find):
    for start in range(3):
        assert find(PASSES, vllm_config(rank=0, size=2), now_s=NOW_S + start)[1] == 1
    assert find(PASSES, vllm_config(rank=0, size=2), now_s=NOW_S + 3)[1] == 0
    assert find(PASSES, vllm_config(rank=1, size=2))[1] == 1
    assert find(PASSES, vllm_config())[1] == 1


class DeviceRanks:
    """The ranks of one engine, each on a thread: all receive what rank 0 broadcasts."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.value = None

    def of(self, rank):
        def broadcast(value):
            self.barrier.wait(GUARD_S)
            if rank == 0:
                self.value = value
            self.barrier.wait(GUARD_S)
            return self.value

        return SimpleNamespace(rank=rank, broadcast=broadcast)


@pytest.mark.parametrize(("engines", "wanted"), [(1, True), (1, False), (2, True), (2, False)])
def test_all_devices_of_all_ranks_compute_the_same_passes_or_none(engines, wanted, monkeypatch):
    """Tensor parallelism, alone and inside data parallelism."""
    store, devices = HashStore(), 2
    computing = threading.Barrier(engines * devices)
    workers = [RankWorker(computing, number) for number in range(engines * devices)]
    found = []

    def find_costs(settings, config, namespace, time_passes, now_s):
        found.append(time_passes(wanted))

    monkeypatch.setattr(worker_side, "find_costs", find_costs)
    monkeypatch.setattr(parallel_ranks, "_get_default_store", lambda: store)

    def profile(engine, rank, group):
        side: Any = object.__new__(worker_side.WorkerSide)
        side._settings, side._place = SETTINGS, SimpleNamespace(group=group.of(rank))
        side._config = vllm_config(rank=engine, size=engines)
        side._num_blocks, side.geometry = 101 - engine, NAMESPACE.geometry
        side._synchronize, side._namespace = (lambda: None), (lambda: NAMESPACE)
        side.profile(workers[engine * devices + rank])

    with ThreadPoolExecutor(engines * devices) as threads:
        jobs = []
        for engine in range(engines):
            group = DeviceRanks(devices)
            jobs += [threads.submit(profile, engine, rank, group) for rank in range(devices)]
        for job in jobs:
            job.result(GUARD_S)
    steps = workers[0].steps
    assert all(worker.steps == steps for worker in workers)
    assert len(found) == engines
    if wanted:
        assert len(steps) > 4
        assert all(len(passes) > 2 for passes in found)
    else:
        assert steps == []
        assert found == [None] * engines


# ------------------------------------------------------------------ where costs come from

PASSES = [TimedPass(0, 512, 0.2, 0.1), TimedPass(512, 512, 0.3, 0.2)]
NAMESPACE = StoreNamespace(
    model="m",
    dtype="float32",
    layout="l",
    geometry=BlockGeometry.uniform(layers=2, block_tokens=BLOCK_TOKENS, layer_block_bytes=1024),
)


def vllm_config(max_model_len=4096, rank=0, size=1):
    group = {"data_parallel_rank": rank, "data_parallel_size": size}
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        compilation_config=SimpleNamespace(mode=0, cudagraph_mode=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, **group),
    )


@pytest.fixture
def find(monkeypatch, tmp_path):
    monkeypatch.setenv("DUALPATH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        profiling, "attention_geometry", lambda config: AttentionGeometry(pair_flops=1.0)
    )

    def find(passes, config=None, now_s=NOW_S, **changes):
        settings = msgspec.structs.replace(SETTINGS, **changes)
        asked = []

        def measure(wanted):
            if wanted:
                asked.append(1)
            return passes if wanted else None

        found = profiling.find_costs(settings, config or vllm_config(), NAMESPACE, measure, now_s)
        return found, len(asked)

    return find


def test_passes_are_timed_three_times_for_one_model_device_and_settings(find):
    for start in range(3):
        found, timings = find(PASSES, now_s=NOW_S + start)
        assert (found.origin, timings) == (RateOrigin.MEASURED, 1)
    later, timings = find([], now_s=NOW_S + 62)
    assert (later.costs, later.origin, later.age_s, timings) == (
        found.costs, RateOrigin.REMEMBERED, 60, 0,
    )  # fmt: skip
    assert later.rate.age_s == 60
    assert find(PASSES, layer_buffers=1)[1] == 1
    assert find(PASSES, vllm_config(max_model_len=8192))[1] == 1


def test_a_start_on_a_busy_machine_uses_the_faster_earlier_start(find):
    fast, _ = find(PASSES)
    slow = [TimedPass(p.cached, p.bsz, 9 * p.pass_s, 9 * p.attention_s) for p in PASSES]
    found, timings = find(slow, now_s=NOW_S + 5)
    assert (found.costs, found.origin, found.age_s) == (fast.costs, RateOrigin.REMEMBERED, 5)
    assert timings == 1
    assert find(slow, layer_buffers=1)[0].costs != fast.costs


def test_cached_costs_of_an_earlier_version_are_used_and_completed(find, tmp_path):
    """They have no time besides attention: after three starts passes are timed once more."""
    for start in range(3):
        known, _ = find(PASSES, now_s=NOW_S + start)
    (file,) = (tmp_path / "cache").rglob("costs-*.json")
    cached = msgspec.json.decode(file.read_bytes())
    assert set(cached["costs"].pop("besides_attention")) == {"batch_s", "token_s"}
    cached["costs"]["prefill_tokens_per_s"] *= 2
    file.write_bytes(msgspec.json.encode(cached))
    former, timings = find(None, now_s=NOW_S + 3)
    assert (former.costs.besides_attention, former.origin, timings) == (
        None, RateOrigin.REMEMBERED, 1,
    )  # fmt: skip
    completed, timings = find(PASSES, now_s=NOW_S + 4)
    assert timings == 1
    assert completed.costs.besides_attention == known.costs.besides_attention
    assert completed.rate.per_s == pytest.approx(2 * known.rate.per_s), "the fastest start counts"
    assert find([], now_s=NOW_S + 5)[1] == 0


def test_rough_costs_are_used_and_not_cached(find):
    flat = [PASSES[0], TimedPass(512, 512, 0.2, 0.05)]
    for _ in range(2):
        found, timings = find(flat)
        assert (found.origin, timings) == (RateOrigin.MEASURED, 1)
    assert find([]) == (None, 1)
    good, _ = find(PASSES)
    found, _ = find(flat)
    assert (found.costs, found.origin) == (good.costs, RateOrigin.REMEMBERED)


def test_a_file_is_not_measured(find, tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text("prefill_tokens_per_s = 9.0\n[prefill]\npair_s = 0.5\n")
    found, timings = find(PASSES, profile=str(file))
    assert (found.costs.prefill_tokens_per_s, found.origin, timings) == (9.0, RateOrigin.FILE, 0)
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        find(PASSES, profile=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"profile": "off"}, False),
        ({"role": Role.DECODE}, False),
        ({"mode": Mode.BASIC}, False),
        ({"mode": Mode.ORACLE}, True),
    ],
)
def test_only_engines_that_need_costs_profile_themselves(changes, wanted):
    assert profiling.needs_costs(msgspec.structs.replace(SETTINGS, **changes)) is wanted
