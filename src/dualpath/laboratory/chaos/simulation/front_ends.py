"""The front ends of a simulated cluster, and the supervisor that starts them again."""

import functools
from collections.abc import Callable, Sequence

from dualpath.laboratory.chaos.simulation.cluster_parts import Shared
from dualpath.laboratory.chaos.simulation.front_end import SimFrontEnd
from dualpath.router.settings import RouterSettings

#: Until the next process of one that has ended is started.
_PAUSES_S = (0.05, 0.3, 1.0, 2.5)


class FrontEnds:
    """``count`` of them, on machines that ``host`` gives each by its name.

    In half of the clusters that have any a front end is given its name, and keeps it when its
    process is another; in the others each process has a name of its own, as by default.
    """

    def __init__(
        self, shared: Shared, settings: RouterSettings, count: int, host: Callable[[str], str]
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
        """Those whose processes live."""
        return [one for one in self._now.values() if one.process.alive]

    @property
    def serving(self) -> Sequence[SimFrontEnd]:
        """Those that clients reach."""
        return [one for one in self._now.values() if one.serves]

    def left_over(self) -> list[str]:
        """Return what they still hold though nobody is served."""
        return [what for one in self._now.values() for what in one.left_over()]

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
