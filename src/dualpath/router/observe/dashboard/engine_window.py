"""Bytes that engines moved within the last seconds, from their reports; O(engines) per tick."""

from collections import deque
from collections.abc import Iterable

from dualpath.router.control.engine_state import EngineState


class _Seen:
    """What one tick saw of an engine; ``counters`` is the report's own, never changed."""

    __slots__ = ("counters", "epoch")

    def __init__(self, epoch: str, counters: dict[str, float]) -> None:
        self.epoch = epoch
        self.counters = counters


class EngineWindow:
    """The latest ``ticks`` + 1 looks at all engines' counters.

    Only differences within one process of an engine count: one that restarts, or that a restarted
    router meets with large totals, shows no leap.
    """

    def __init__(self, ticks: int) -> None:
        self._looks: deque[tuple[float, dict[str, _Seen]]] = deque(maxlen=ticks + 1)

    def tick(self, now_s: float, engines: Iterable[EngineState]) -> None:
        """Look at the engines' latest reports."""
        seen = {
            engine.info.engine_id: _Seen(engine.info.epoch, engine.report.counters)
            for engine in engines
            if engine.report is not None
        }
        self._looks.append((now_s, seen))

    @property
    def span_s(self) -> float:
        """Seconds between the oldest and the newest look; 0 before the second one."""
        return self._looks[-1][0] - self._looks[0][0] if self._looks else 0.0

    def moved(self, engine_id: str, counter: str, *, last_tick: bool = False) -> float:
        """Return how far a counter moved within the window, or since the look before the last."""
        if not self._looks or (newest := self._looks[-1][1].get(engine_id)) is None:
            return 0.0
        looks = list(self._looks)[-2:] if last_tick else self._looks
        for _, seen in looks:
            oldest = seen.get(engine_id)
            if oldest is not None and oldest.epoch == newest.epoch:
                moved = newest.counters.get(counter, 0) - oldest.counters.get(counter, 0)
                return max(moved, 0.0)
        return 0.0
