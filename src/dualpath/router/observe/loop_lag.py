"""How late the event loop runs what is due: what any token and any message waits at this process.

A timer that is due every ``INTERVAL_S`` observes by how much it is late.  While the loop stalls,
the timers that would have been due meanwhile count as well, each with its own lateness, so that a
quantile is that of a moment chosen at random.
"""

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.05
#: Observations of one stall at most: a process that was stopped adds no more.
_MOST_OBSERVED = 100


def measure_loop_lag(observe: Callable[[float], None]) -> None:
    """Observe the lag of the running event loop, in seconds, until the loop ends."""
    loop = asyncio.get_running_loop()

    def due(at_s: float) -> None:
        now_s = loop.time()
        for late_s in lags_s(now_s - at_s):
            observe(late_s)
        next_s = now_s + INTERVAL_S
        loop.call_at(next_s, due, next_s)

    first_s = loop.time() + INTERVAL_S
    loop.call_at(first_s, due, first_s)


def lags_s(late_s: float) -> list[float]:
    """Return the lateness of a timer, and of those that became due while it waited."""
    late_s = max(late_s, 0.0)
    count = min(int(late_s / INTERVAL_S) + 1, _MOST_OBSERVED)
    return [late_s - number * INTERVAL_S for number in range(count)]
