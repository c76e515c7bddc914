"""Estimates the remaining time of a run of several stages from the stages that have ended."""

from collections.abc import Callable, Mapping


class TimeLeft:
    """``expected_s`` are times of stages on some machine, scaled by the times of stages that ended.

    Stages must begin in order.  ``now_s`` is a clock.
    """

    def __init__(self, expected_s: Mapping[str, float], now_s: Callable[[], float]) -> None:
        self._expected_s = dict(expected_s)
        self._now_s = now_s
        self._over_s = 0.0
        self._over_expected_s = 0.0
        self._current = ""
        self._since_s = now_s()

    def begin(self, stage: str) -> None:
        """End the current stage and begin ``stage``."""
        now_s = self._now_s()
        if self._current:
            self._over_s += now_s - self._since_s
            self._over_expected_s += self._expected_s.pop(self._current)
        self._current, self._since_s = stage, now_s

    def expect(self, stage: str, seconds: float) -> None:
        """Set the expected time of a stage on this machine."""
        self._expected_s[stage] = seconds / self._pace

    def left_s(self, done: float = 0.0) -> float:
        """Return the remaining seconds; ``done`` (0 to 1) is the share of the current stage."""
        current_s = self._expected_s.get(self._current, 0.0)
        return (sum(self._expected_s.values()) - done * current_s) * self._pace

    @property
    def _pace(self) -> float:
        return self._over_s / self._over_expected_s if self._over_expected_s else 1.0
