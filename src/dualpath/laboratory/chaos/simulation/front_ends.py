"""The front ends of a simulated cluster, and the supervisor that restarts them."""

import functools
from collections.abc import Callable, Sequence

from dualpath.laboratory.chaos.simulation.cluster_parts import ClusterResources
from dualpath.laboratory.chaos.simulation.front_end import SimFrontEnd
from dualpath.router.settings import RouterSettings

#: Delay until the next process of a front end is started.
_PAUSES_S = (0.05, 0.3, 1.0, 2.5)


class FrontEnds:
    """``count`` front ends; ``host`` returns the machine of each by its name.

    In half of the clusters with front ends a restarted process has the same front-end name; in the
    others each process has its own, as by default.
    """

    def __init__(
        self,
        shared: ClusterResources,
        settings: RouterSettings,
        count: int,
        host: Callable[[str], str],
    ) -> None:
        self._shared = shared
        self._settings = settings
        self._host = host
        self._keep_names = count > 0 and shared.world.chance.random() < 0.5
        self._starts: dict[str, int] = {}
        self._now: dict[str, SimFrontEnd] = {}
        for number in range(count):
            self._start(f"fe-{number}")

    @property
    def alive(self) -> Sequence[SimFrontEnd]:
        """Front ends whose processes are alive."""
        return [one for one in self._now.values() if one.process.alive]

    @property
    def serving(self) -> Sequence[SimFrontEnd]:
        """Front ends to which clients can connect."""
        return [one for one in self._now.values() if one.serves]

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what they still hold without requests."""
        return [what for one in self._now.values() for what in one.held_when_idle()]

    def _start(self, name: str) -> None:
        self._starts[name] = start = self._starts.get(name, 0) + 1
        process = f"{name}#{start}"
        self._now[name] = SimFrontEnd(
            *(self._shared, self._settings, name if self._keep_names else process, process),
            self._host(name),
            functools.partial(self._ended, name),
        )

    def _ended(self, name: str) -> None:
        world = self._shared.world
        world.after(world.pick(_PAUSES_S), functools.partial(self._start, name))
