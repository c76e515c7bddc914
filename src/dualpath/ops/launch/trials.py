"""Limits the starts of a unit of engines in a requested shape in which it has not served yet.

A shape that has served is restarted without limit, as the failure may be temporary.  A requested
shape may never start (a model without experts, too little memory), and meanwhile the unit does not
serve.  So after a few failed starts the unit returns to its former shape; the router then reports
the switch as cancelled.
"""

import logging
from collections.abc import Callable, MutableMapping

from dualpath.core.cluster import UnitShape

log = logging.getLogger(__name__)

#: Starts in a new shape before the unit returns to its former one.
MAX_STARTS = 3
#: Interval of checks whether a unit serves in its new shape.
INTERVAL_S = 1.0


class Trials:
    """Changes ``shapes`` (by unit) and reverts changes that fail; failures are logged."""

    def __init__(self, shapes: MutableMapping[str, UnitShape]) -> None:
        self._shapes = shapes
        #: The former shapes of units on trial.
        self._former: dict[str, UnitShape] = {}
        self._starts: dict[str, int] = {}
        self._due_s = 0.0

    def begin(self, unit: str, shape: UnitShape) -> None:
        """Use another shape for the next starts of a unit."""
        self._former.setdefault(unit, self._shapes[unit])
        self._shapes[unit] = shape
        self._starts[unit] = 0

    def note_start(self, unit: str) -> None:
        """Count a start of a unit; after too many, its former shape is restored first."""
        if unit not in self._former:
            return
        self._starts[unit] += 1
        if self._starts[unit] > MAX_STARTS:
            failed, former = self._shapes[unit], self._former.pop(unit)
            self._shapes[unit] = former
            log.error(
                "%s did not serve as %s after %d starts (see their errors above); it is started "
                "as %s again. Correct the cause, then request the change again with "
                "`dualpath roles`",
                *(unit, failed, MAX_STARTS, former),
            )

    def poll(self, now_s: float, serves: Callable[[str, UnitShape], bool]) -> None:
        """End the trial of units that ``serves`` reports as serving; call it periodically."""
        if now_s < self._due_s or not self._former:
            return
        self._due_s = now_s + INTERVAL_S
        # Before the first start the processes of the former shape serve.
        for unit in [unit for unit in self._former if self._starts[unit]]:
            if serves(unit, self._shapes[unit]):
                del self._former[unit]
