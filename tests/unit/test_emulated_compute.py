"""The emulated GPU: what enters a forward pass, and how long it lasts on the test's clock."""

import msgspec
import pytest
from tests.emulated_cluster import COSTS, GEOMETRY, engine_settings

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.transfers import PrefillTransfer
from dualpath_lab.emulated.checkable_kv import KvFunction, TokenPrefix
from dualpath_lab.emulated.data_plane import EmulatedHbm
from dualpath_lab.emulated.emulated_gpu import ComputeClock
from dualpath_lab.emulated.prefill import BatchFormer
from dualpath_lab.emulated.requests import PrefillRequest
from dualpath_lab.emulated.settings import EmulatedSettings

LINEAR = msgspec.structs.replace(
    COSTS,
    prefill=msgspec.structs.replace(
        COSTS.prefill, batch_s=2.0, attention_token_s=1.0, feed_forward_token_s=0.5, pair_s=0.0
    ),
)


class FakeTime:
    """Sleeps end ``late_s`` late."""

    def __init__(self, late_s: float) -> None:
        self.now_s = 100.0
        self._late_s = late_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self._late_s


def settings(mode: Mode, **changes) -> EmulatedSettings:
    return engine_settings(
        Role.PREFILL, "pe", "tcp://x:1", "memory://x", mode, costs=LINEAR, **changes
    )


def former(chosen: EmulatedSettings) -> BatchFormer:
    hbm = EmulatedHbm(KvFunction(GEOMETRY), chosen.layer_regions, chosen.hbm_bytes)
    return BatchFormer(chosen, hbm)


def request(tokens: int, done: int = 0) -> PrefillRequest:
    prefix = TokenPrefix([1] * tokens, 4, cache_salt=None, vocab_size=9, capacity_tokens=tokens)
    prefill_transfer = PrefillTransfer("r", tokens, done // 4, b"", (), "d", "e", ())
    made = PrefillRequest(prefix, prefill_transfer, lambda answer: None)
    made.done_tokens = done
    return made


def test_a_quota_admits_in_order_and_cuts_the_last_at_a_block() -> None:
    waiting = [request(6), request(22, done=12), request(4)]
    batch = former(settings(Mode.DUALPATH, compute_quota_s=15.0)).form(waiting)
    assert batch is not None
    assert [(c.cached, c.bsz) for c in batch.chunks] == [(0, 6), (12, 8)]
    assert batch.compute_s == pytest.approx(2.0 + 14 * 1.5)


def test_without_a_quota_the_token_cap_ends_a_batch() -> None:
    waiting = [request(10), request(10), request(4)]
    batch = former(settings(Mode.BASIC, batch_cap_tokens=16)).form(waiting)
    assert batch is not None
    assert [(c.cached, c.bsz) for c in batch.chunks] == [(0, 10), (0, 4)]


def test_a_quota_of_zero_is_none() -> None:
    batch = former(settings(Mode.ORACLE, compute_quota_s=0.0)).form([request(400), request(90)])
    assert batch is not None
    assert [c.bsz for c in batch.chunks] == [400, 90]


def test_a_request_that_waits_for_hbm_blocks_later_ones() -> None:
    chosen = settings(Mode.BASIC, hbm_bytes=6 * GEOMETRY.full_block_bytes)
    batch_former, first, second = former(chosen), request(12), request(16)
    batch = batch_former.form([first, second, request(4)])
    assert batch is not None
    assert [c.request for c in batch.chunks] == [first]
    assert len(first.hbm_blocks) == 3
    assert second.hbm_blocks == ()
    assert batch_former.form([second]) is None


def test_late_wake_ups_do_not_add_up() -> None:
    time = FakeTime(late_s=0.25)
    clock = ComputeClock(time.now, time.sleep)
    clock.begin()
    for _ in range(8):
        since_s = clock.now()
        clock.waited(since_s)
        clock.work(1.0)
    assert time.now_s == 100.0 + 8 * 1.0 + 0.25


def test_a_real_wait_delays_what_follows() -> None:
    time = FakeTime(late_s=0.0)
    clock = ComputeClock(time.now, time.sleep)
    clock.begin()
    clock.work(1.0)
    since_s = clock.now()
    time.now_s += 5.0
    clock.waited(since_s)
    clock.work(1.0)
    assert time.now_s == 107.0
