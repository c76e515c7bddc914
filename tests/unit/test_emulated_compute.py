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


def request(tokens: int, done: int = 0, *, in_hbm: bool = False) -> PrefillRequest:
    prefix = TokenPrefix([1] * tokens, 4, cache_salt=None, vocab_size=9, capacity_tokens=tokens)
    there = tuple(range(-(-tokens // 4))) if in_hbm else ()
    prefill_transfer = PrefillTransfer(
        "r", tokens, done // 4, b"", (), "d", "e", (), de_hbm_blocks=there
    )
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


def passes_of_agents(*, in_hbm: bool, speedup: float = 1.0, load_token_s: float) -> list[int]:
    """Return how many requests each of 24 passes has, of 8 agents of equal pauses.

    All begin at once.  A pass ends when it is loaded and computed, and 5 s later the agents in it
    send their next requests, of 4 tokens behind 40; it computes for 2 s and 6 s per request.
    """
    batch_former = former(settings(Mode.DUALPATH, compute_quota_s=0.0, speedup=speedup))
    now_s, sizes, arrivals = 0.0, [], [0.0] * 8
    for _ in range(24):
        now_s = max(now_s, min(arrivals))
        waiting = [request(44, done=40, in_hbm=in_hbm) for at_s in arrivals if at_s <= now_s]
        arrivals = [at_s for at_s in arrivals if at_s > now_s]
        batch = batch_former.form(waiting, load_token_s)
        assert batch is not None
        sizes.append(len(batch.chunks))
        for one in waiting:
            if one.hbm_blocks:
                batch_former._hbm.free(one.hbm_blocks)
        load_s = 40 * load_token_s * len(batch.chunks)
        now_s += max(load_s, batch.compute_s / speedup)
        waits = len(waiting) - len(batch.chunks)
        arrivals = sorted([*arrivals, *[now_s + 5.0] * len(batch.chunks), *[now_s] * waits])
    return sizes


@pytest.mark.parametrize("speedup", [1.0, 10.0])
def test_agents_of_equal_pauses_do_not_enter_the_same_pass_again_and_again(speedup: float) -> None:
    """A request loads for 7 s and computes for 8 s: two would load longer than one computes."""
    load_token_s = 7.0 / 40 / speedup
    convoy = passes_of_agents(in_hbm=False, speedup=speedup, load_token_s=load_token_s)
    assert convoy == [8] * 24, "the buffer's slots divide them, which this story does not have"
    divided = passes_of_agents(in_hbm=True, speedup=speedup, load_token_s=load_token_s)
    assert divided == [1] * 24


def test_loads_that_take_as_long_as_the_computation_do_not_divide_a_pass() -> None:
    """Two requests load for 7.8 s, as long as one computes."""
    assert passes_of_agents(in_hbm=True, load_token_s=3.9 / 40) == [8] * 24


def test_a_chunk_of_which_all_earlier_layers_are_in_hbm_loads_nothing() -> None:
    """With a region per layer only a prompt's first chunk loads its hits."""
    for layer_buffers, entered in ((0, 2), (2, 1)):
        chosen = settings(
            Mode.DUALPATH, compute_quota_s=0.0, layer_buffers=layer_buffers, speedup=1.0
        )
        later = request(44, done=20, in_hbm=True)
        later.done_tokens = 40
        batch = former(chosen).form([later, request(8, done=4, in_hbm=True)], load_token_s=0.5)
        assert batch is not None
        assert len(batch.chunks) == entered


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
