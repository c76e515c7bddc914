"""The lag of an event loop as a metric: every moment of a stall counts."""

import asyncio
import itertools

import pytest

from dualpath.router.observe.loop_lag import INTERVAL_S, lags_s, measure_loop_lag


def test_moments_of_a_stall_count_with_the_time_that_is_left_of_it() -> None:
    assert lags_s(0.0) == [0.0]
    assert lags_s(-1e-9) == [0.0]
    assert lags_s(INTERVAL_S / 2) == [INTERVAL_S / 2]
    assert lags_s(3.5 * INTERVAL_S) == pytest.approx([x * INTERVAL_S for x in (3.5, 2.5, 1.5, 0.5)])
    assert len(lags_s(3600.0)) == 100


@pytest.mark.virtual_time
async def test_a_loop_is_sampled_and_a_stall_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    observed: list[float] = []
    measure_loop_lag(observed.append)
    await asyncio.sleep(10.5 * INTERVAL_S)
    assert len(observed) == 10
    assert max(observed) < 1e-6
    # A stall: the clock is ahead when the next timer runs.
    real, ahead_s = loop.time, itertools.chain((0.0,), itertools.repeat(4 * INTERVAL_S))
    monkeypatch.setattr(loop, "time", lambda: real() + next(ahead_s))
    while len(observed) < 14:
        await asyncio.sleep(INTERVAL_S)
    assert max(observed) > 2 * INTERVAL_S
