"""Which chain of cached blocks is evicted: the one with the farthest next use (beyond the paper).

Agents with equal pauses use each chain just after an LRU has evicted it: with room for a quarter of
them an LRU caches a quarter and hits nothing.  So the latest *interval* of every chain is known,
from one use to the next, counted in uses of the buffer and not in time.  The chain that is expected
last is evicted first.  A chain that is late by as long as its interval counts as abandoned: if the
least recently used chain is, that one is evicted.

A forecast is only useful if intervals repeat.  The difference of each from the one before is summed
beside the intervals, both fading with age; if the errors are too large a part, as with pauses of
very unequal length, the least recently used chain is evicted, as before.

All is in integers, so that both cores of the simulator and engines count alike; the compiled core
calls the functions as they stand.
"""

#: A chain counts as abandoned after so many of its intervals without a use.
_PATIENCE = 2
#: Forecasts are believed while the errors are at most this part of the intervals.
_ERROR_PARTS, _INTERVAL_PARTS = 3, 4


def faded_sum(total: int, sample: int, window: int) -> int:
    """Return a sum with one more sample, in which older ones fade over ``window`` ≥ 1 samples."""
    return total + sample - total // window


def expected_interval(interval: int, total: int, window: int) -> int:
    """Return a chain's interval, the mean of all where its own is not known (0)."""
    return interval if interval > 0 else total // window


def believed(interval_total: int, error_total: int) -> bool:
    """Return whether intervals repeat well enough that forecasts decide; False before any did."""
    return interval_total > 0 and _INTERVAL_PARTS * error_total <= _ERROR_PARTS * interval_total


def given_up(age: int, interval: int) -> bool:
    """Return whether a chain last used ``age`` uses ago is not waited for any more."""
    return age > _PATIENCE * interval


class ReuseForecast:
    """What one buffer has learned of intervals; samples fade over ``window`` of them."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._intervals = 0
        self._errors = 0

    @property
    def believed(self) -> bool:
        """Whether forecasts decide."""
        return believed(self._intervals, self._errors)

    def learn(self, interval: int, before: int) -> None:
        """A chain was used after ``interval`` uses, and the time before after ``before``, if not 0.

        Only an interval that was forecast measures the error of forecasts.
        """
        if before:
            self._intervals = faded_sum(self._intervals, interval, self._window)
            self._errors = faded_sum(self._errors, abs(interval - before), self._window)

    def expected(self, interval: int) -> int:
        """Return in how many uses a chain is expected that was used just now."""
        return expected_interval(interval, self._intervals, self._window)

    def given_up(self, age: int, interval: int) -> bool:
        """Return whether a chain is not waited for any more."""
        return given_up(age, self.expected(interval))
