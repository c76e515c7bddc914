"""A throttled storage delivers bytes at the stated rate, on a clock the test holds."""

import threading

import pytest
from tests.stored_runs import read_run, stored_head

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError
from dualpath.storage.memory import MemoryStorage
from dualpath.storage.wrapping import ThrottledStorage, TokenBucket

GEOMETRY = BlockGeometry.uniform(layers=1, block_tokens=1, layer_block_bytes=1000)
NAMESPACE = StoreNamespace("m", "float32", "NHD", GEOMETRY)
KEYS = block_keys(range(10), 1)
DATA = [memoryview(bytes(1000)) for _ in KEYS]


class Clock:
    """Sleeping is the only thing that takes time; each sleep may be ``late_s`` too long."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.late_s = late_s
        self.wakes_s: list[float] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        with self._lock:
            self.now_s += duration_s + self.late_s
            self.wakes_s.append(self.now_s)


def throttled(clock: Clock, *, burst_s: float = 0.0) -> ThrottledStorage:
    inner = MemoryStorage(NAMESPACE)
    inner.write(KEYS, DATA)
    return ThrottledStorage(inner, 1000.0, burst_s=burst_s, now_s=clock.now, sleep_s=clock.sleep)


def destinations(blocks: int = 10) -> list[memoryview]:
    return [memoryview(bytearray(1000)) for _ in range(blocks)]


def test_ten_blocks_of_one_second_arrive_one_each_second() -> None:
    clock = Clock()
    outcome = read_run(throttled(clock), KEYS, destinations())
    assert outcome.bytes_read == 10_000
    assert clock.wakes_s == pytest.approx([101.0 + i for i in range(10)])


def test_late_wakes_do_not_lower_the_rate() -> None:
    clock = Clock(late_s=0.4)
    read_run(throttled(clock, burst_s=0.5), KEYS, destinations())
    assert clock.now_s == pytest.approx(110.4)


def test_idling_accumulates_at_most_the_burst() -> None:
    clock = Clock()
    storage = throttled(clock, burst_s=0.5)
    read_run(storage, KEYS[:1], destinations(1))
    clock.now_s += 1000.0
    start_s = clock.now_s
    read_run(storage, KEYS[:3], destinations(3))
    assert clock.now_s - start_s == pytest.approx(2.5)


def test_concurrent_reads_share_the_rate_in_order_of_arrival() -> None:
    bucket = TokenBucket(1000.0, burst_s=0.0)
    passed_s = [bucket.pass_at(1000, since_s=5.0) for _ in range(4)]
    assert passed_s == [6.0, 7.0, 8.0, 9.0]


def test_only_read_bytes_are_throttled() -> None:
    clock = Clock()
    storage = throttled(clock)
    missing = block_keys([77], 1)
    outcome = read_run(storage, [KEYS[0], missing[0], KEYS[1]], destinations(3))
    assert (outcome.good_blocks, outcome.bytes_read, outcome.reason) == (1, 1000, "missing")
    assert clock.now_s == pytest.approx(101.0)


def test_look_ups_and_writes_are_not_throttled() -> None:
    clock = Clock()
    storage = throttled(clock)
    assert stored_head(storage, KEYS) == 10
    assert storage.write(KEYS, DATA).new == 0
    assert clock.now_s == 100.0


@pytest.mark.parametrize(("rate", "burst_s"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_invalid_rates_are_refused(rate: float, burst_s: float) -> None:
    with pytest.raises(ConfigError, match="rate must be above 0"):
        TokenBucket(rate, burst_s)
