"""Roles and sizes that change in a simulated cluster: who asks for it, and who carries it out."""

from collections.abc import Mapping
from typing import Any

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.ops.launch.role_wishes import RoleWishes
from dualpath.router.control.roles import SwitchState

#: How often the supervisor looks.
_LOOK_S = 0.1
#: One in so many answers about roles is an old one: it was long under way.
_OLD_ANSWER_OF = 5
#: How many ranks a group is asked to have.
_RANKS = (1, 2, 3)
#: When somebody asks for another role or size.
_ASKED_S = (0.05, 0.9)


class RoleKeeper:
    """Asks the router ``switches`` times for an engine in another role, and sees to it.

    ``over`` once nobody will ask any more.
    """

    def __init__(self, cluster: Cluster, switches: int) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        self._report: Mapping[str, Any] | None = None
        self._left = switches
        if switches:
            self._wishes = RoleWishes(
                *(self._answer, cluster.units, cluster.shapes),
                *(cluster.settings.usual_ranks, cluster.change),
            )
            self._turn()
        for _ in range(switches):
            world.after(world.chance.uniform(*_ASKED_S), self._ask)

    @property
    def over(self) -> bool:
        """Whether everybody has asked."""
        return self._left == 0

    def failed(self) -> list[str]:
        """Return what became of switches that did not come to their end."""
        past = self._cluster.router.service.roles.past if self._cluster.router.serves else ()
        return [
            f"{', '.join(switch.engines)} to {switch.to_role.value}: {switch.state}: {switch.note}"
            for switch in past
            if switch.state is not SwitchState.JOINED
        ]

    def _ask(self) -> None:
        self._left -= 1
        router, chance = self._cluster.router, self._world.chance
        # The name of a unit asks for another size, in its own role or in the other.
        name = chance.choice((None, *self._cluster.shapes))
        role = chance.choice(tuple(Role)) if name is None else self._other_or_own(name)
        ranks = None if name is None else chance.choice(_RANKS)
        if not (router.serves and router.process.runs):
            return
        wish = f"wants {name or 'any'} as {role or 'it is'} with {ranks or 'usual'} ranks"
        try:
            switch = router.service.roles.ask(role, name, ranks=ranks)
        except BadRequestError as error:
            self._world.note("operator", f"{wish} in vain: {error}")
        else:
            self._world.note("operator", f"{wish}: {', '.join(switch.engines)}")

    def _other_or_own(self, name: str) -> Role | None:
        now = self._cluster.shapes[name].role
        other = Role.DECODE if now is Role.PREFILL else Role.PREFILL
        return self._world.chance.choice((None, None, other))

    def _turn(self) -> None:
        self._wishes.turn(self._world.now_s)
        self._world.after(_LOOK_S, self._turn)

    def _answer(self) -> Mapping[str, Any] | None:
        """Return what the router says of roles, or said before; None if it does not answer."""
        router, before = self._cluster.router, self._report
        if not (router.serves and router.process.runs):
            return None
        self._report = router.service.roles.report()
        old = before is not None and self._world.chance.random() * _OLD_ANSWER_OF < 1
        return before if old else self._report
