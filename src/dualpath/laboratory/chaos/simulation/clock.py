"""The monotonic clock of a simulated machine."""

import msgspec

#: What rounding may have a clock show too early.
_ROUNDED_S = 1e-9


class Clock(msgspec.Struct, frozen=True):
    """It shows ``rate`` seconds in one, and ``zero_s`` at the beginning of all time."""

    rate: float = 1.0
    zero_s: float = 0.0

    def shows(self, now_s: float) -> float:
        """Return what it shows at a time of the world."""
        return now_s * self.rate + self.zero_s

    def when_s(self, shown_s: float) -> float:
        """Return the time of the world at which it shows this, and no less."""
        # Who waits and finds that it is not time yet, would wait for no time at all for ever.
        late_s = 0.0 if self == TRUE_CLOCK else _ROUNDED_S
        return (shown_s - self.zero_s) / self.rate + late_s


#: It shows the time of the world.
TRUE_CLOCK = Clock()
