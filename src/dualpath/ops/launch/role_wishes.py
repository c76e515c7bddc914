"""Applies the role changes that the router requests for engines, and changes of group sizes.

The supervisor of an engine restarts it in its new role.

The requested role is polled, and a request that is already applied is ignored: a response may be
lost or repeated, and another router may be the leader by the time the engine is back.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dualpath.core.cluster import Role, UnitShape

#: Poll interval; short compared with the start of an engine.
INTERVAL_S = 1.0


class RequestedRoles:
    """Polls the router every ``INTERVAL_S`` and changes units; call ``poll`` more often than that.

    ``ask`` returns the body of ``GET /dualpath/v1/roles``, None if no router answers.  ``shapes``
    are the shapes of this supervisor's units, and ``units`` maps engines to units; ``usual_ranks``
    returns the default number of ranks of a role.  ``change`` drains a unit and restarts it in
    another shape.
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

    def poll(self, now_s: float) -> None:
        """Query the router if it is time, and start requested changes."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        report = self._ask()
        switch = report["switch"] if report else None
        if switch is None or switch["state"] != "asked":
            return
        role = Role(switch["to_role"])
        shape = UnitShape(role, switch["to_ranks"] or self._usual_ranks(role))
        # Other engines have another supervisor.
        here = {self._units[name] for name in switch["engines"] if name in self._units}
        for unit in sorted(here):
            if self._shapes[unit] != shape:
                self._change(unit, shape)
