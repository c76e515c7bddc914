"""How long loads of KV take, as an engine observes it in its passes."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, prompt_keys

from dualpath.core.runs import BlockRun
from dualpath.engine.passes.pump import LOAD_WINDOW_S, LoadTimes

TOKENS = 3 * GEOMETRY.block_tokens


class Clock:
    """A clock that the test moves, with locks of the operating system."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.threads: Any = SimpleNamespace(
            lock=threading.Lock, now_ns=lambda: round(self.now_s * 1e9)
        )


@pytest.fixture
def clock() -> Clock:
    return Clock()


def load(times: LoadTimes, clock: Clock, loaded_bytes: int, seconds: float) -> None:
    times.began()
    clock.now_s += seconds
    times.ended(loaded_bytes)


def test_the_time_between_loads_and_twice_the_time_of_loads_at_once_do_not_count(
    clock: Clock,
) -> None:
    times = LoadTimes(clock.threads)
    assert times.seconds(10) == 0, "no load yet"
    load(times, clock, 100, 1.0)
    clock.now_s += 50.0
    times.began()
    clock.now_s += 1.0
    load(times, clock, 100, 1.0)
    clock.now_s += 1.0
    times.ended(200)
    assert times.seconds(10) == pytest.approx(10 * 4.0 / 400)


def test_a_failed_load_says_nothing_about_the_speed_of_others(clock: Clock) -> None:
    """It may have waited for a peer that hangs."""
    times = LoadTimes(clock.threads)
    times.began()
    clock.now_s += 30.0
    times.ended(0)
    assert times.seconds(10) == 0
    times.began()
    load(times, clock, 100, 1.0)
    clock.now_s += 30.0
    times.ended(0)
    assert times.seconds(10) == pytest.approx(0.1)


def test_old_loads_count_less_and_less(clock: Clock) -> None:
    times = LoadTimes(clock.threads)
    for _ in range(100):
        load(times, clock, 1000, 1.0)
    before_s = times.seconds(1000)
    assert before_s == pytest.approx(1.0)
    for _ in range(4 * round(LOAD_WINDOW_S)):
        load(times, clock, 100, 1.0)
    assert times.seconds(1000) > 5 * before_s


@pytest.mark.parametrize("buffers", [1, 2, 0])
def test_passes_observe_the_time_of_what_they_load(buffers: int) -> None:
    cluster = ToyCluster(layer_buffers=buffers)
    pe, keys = cluster.pe.manager, prompt_keys(TOKENS)
    times = pe._rank.movers.load_times
    transfer = cluster.load("new", keys, TOKENS, 0, 0)
    assert cluster.forward([(transfer, keys, BlockRun(0, 3), range(3))]) == {}
    assert pe.load_token_s == 0, "it has loaded nothing"
    cluster.release("new")
    cluster.store(keys[:2])
    transfer = cluster.load("hits", keys, TOKENS, 1, 1)
    assert cluster.forward([(transfer, keys, BlockRun(2, 1), range(3))]) == {}
    assert times._bytes == 2 * GEOMETRY.full_block_bytes
    assert pe.load_token_s > 0
    cluster.release("hits")

    cluster.fabric.fail_next(agent=pe._rank.agents[0].agent)
    transfer = cluster.load("fails", keys, TOKENS, 2, 0)
    assert list(cluster.forward([(transfer, keys, BlockRun(2, 1), range(3))])) == ["fails"]
    failed_bytes = 2 * GEOMETRY.bytes_of(0)
    assert times._bytes == 4 * GEOMETRY.full_block_bytes - failed_bytes
    assert times._under_way == 0
    cluster.close()
