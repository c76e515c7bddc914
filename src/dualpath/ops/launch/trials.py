"""Units of engines in a shape that they have not served in yet: tried a few times, not for ever.

What has served once is started again however often it ends: its machine may mend.  A shape that
somebody asked for may be one that can never start (a model without experts, too little memory), and
while it is tried nobody serves.  So the unit gets its former shape back, which did serve; the
router sees that and calls the switch cancelled.
"""

import logging
from collections.abc import Callable, MutableMapping

from dualpath.core.cluster import UnitShape

log = logging.getLogger(__name__)

#: Starts in a new shape, after which the unit gets its former one.
MOST_STARTS = 3
#: How often a unit on trial is looked for.
INTERVAL_S = 1.0


class Trials:
    """Owns the change of ``shapes``, by unit; what an operator should know is logged."""

    def __init__(self, shapes: MutableMapping[str, UnitShape]) -> None:
        self._shapes = shapes
        #: What units on trial served as.
        self._former: dict[str, UnitShape] = {}
        self._starts: dict[str, int] = {}
        self._due_s = 0.0

    def begin(self, unit: str, shape: UnitShape) -> None:
        """The next starts of a unit are in another shape."""
        self._former.setdefault(unit, self._shapes[unit])
        self._shapes[unit] = shape
        self._starts[unit] = 0

    def starts(self, unit: str) -> None:
        """A unit is about to be started; its shape is the former one where a trial has failed."""
        if unit not in self._former:
            return
        self._starts[unit] += 1
        if self._starts[unit] > MOST_STARTS:
            failed, former = self._shapes[unit], self._former.pop(unit)
            self._shapes[unit] = former
            log.error(
                "%s has not served as %s after %d starts, the ends of which are told above; it is "
                "%s again. Mend what they say, then ask once more with `dualpath roles`",
                *(unit, failed, MOST_STARTS, former),
            )

    def turn(self, now_s: float, serves: Callable[[str, UnitShape], bool]) -> None:
        """Look which units ``serves`` says serve in their shape; call it often."""
        if now_s < self._due_s or not self._former:
            return
        self._due_s = now_s + INTERVAL_S
        # Before the first start it is the former processes that serve.
        for unit in [unit for unit in self._former if self._starts[unit]]:
            if serves(unit, self._shapes[unit]):
                del self._former[unit]
