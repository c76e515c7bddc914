"""The monotonic clock of a simulated machine."""

import msgspec

#: By how much rounding may make a clock early.
_ROUNDED_S = 1e-9


class Clock(msgspec.Struct, frozen=True):
    """Advances by ``rate`` seconds per second, from ``zero_s`` at time 0."""

    rate: float = 1.0
    zero_s: float = 0.0

    def shows(self, now_s: float) -> float:
        """Return its reading at a time of the simulation."""
        return now_s * self.rate + self.zero_s

    def when_s(self, shown_s: float) -> float:
        """Return the time of the simulation at which its reading is at least this."""
        # A timer that fires a little too early would be set again with a delay of 0 s for ever.
        late_s = 0.0 if self == TRUE_CLOCK else _ROUNDED_S
        return (shown_s - self.zero_s) / self.rate + late_s


#: Its reading is the time of the simulation.
TRUE_CLOCK = Clock()
