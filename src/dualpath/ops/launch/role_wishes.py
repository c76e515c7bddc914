"""Carries out what the router wishes of engines' roles and of groups' sizes.

Who supervises them owns the switch.

The wish is read again and again, and one that is carried out already is none: an answer may be
lost or come twice, and the router may be another one by the time the engine is back.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dualpath.core.cluster import Role, UnitShape

#: A second is nothing beside the start of an engine.
INTERVAL_S = 1.0


class RoleWishes:
    """``turn`` it often; every ``INTERVAL_S`` it asks.

    ``ask`` returns the body of ``GET /dualpath/v1/roles``, None if no router answers.  ``shapes``
    are those of the units here, which ``units`` finds by engine; ``usual_ranks`` is how many a unit
    of a role has where nobody says it.  ``change`` drains a unit, after which it starts in the
    other shape.
    """

    def __init__(
        self,
        ask: Callable[[], Mapping[str, Any] | None],
        units: Mapping[str, str],
        shapes: Mapping[str, UnitShape],
        usual_ranks: Callable[[Role], int],
        change: Callable[[str, UnitShape], None],
    ) -> None:
        self._ask = ask
        self._units = units
        self._shapes = shapes
        self._usual_ranks = usual_ranks
        self._change = change
        self._due_s = 0.0

    def turn(self, now_s: float) -> None:
        """Ask if it is time, and begin what is asked for."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        report = self._ask()
        switch = report["switch"] if report else None
        if switch is None or switch["state"] != "asked":
            return
        role = Role(switch["to_role"])
        shape = UnitShape(role, switch["to_ranks"] or self._usual_ranks(role))
        # Engines that are not here have a supervisor of their own.
        here = {self._units[name] for name in switch["engines"] if name in self._units}
        for unit in sorted(here):
            if self._shapes[unit] != shape:
                self._change(unit, shape)
