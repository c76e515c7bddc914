"""Changes of roles and group sizes in a simulated cluster: the requests and their execution."""

from collections.abc import Mapping
from typing import Any

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.ops.launch.role_wishes import RequestedRoles
from dualpath.router.control.roles import SwitchState

#: How often the supervisor polls.
_POLL_S = 0.1
#: One in this many reports about roles is outdated, as after a long delay.
_STALE_ONE_IN = 5
#: Requested numbers of ranks of a group.
_RANKS = (1, 2, 3)
#: When another role or size is requested.
_REQUESTED_S = (0.05, 0.9)


class RoleChanges:
    """Requests ``switches`` role changes from the router, and restarts engines accordingly."""

    def __init__(self, cluster: Cluster, switches: int) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        self._report: Mapping[str, Any] | None = None
        self._left = switches
        if switches:
            self._requested_roles = RequestedRoles(
                *(self._answer, cluster.units, cluster.shapes),
                *(cluster.settings.usual_ranks, cluster.change),
            )
            self._tick()
        for _ in range(switches):
            world.after(world.chance.uniform(*_REQUESTED_S), self._request)

    @property
    def done(self) -> bool:
        """Whether all changes have been requested."""
        return self._left == 0

    def failed(self) -> list[str]:
        """Return descriptions of switches that did not complete."""
        past = self._cluster.router.service.roles.past if self._cluster.router.serves else ()
        return [
            f"{', '.join(switch.engines)} to {switch.to_role.value}: {switch.state}: {switch.note}"
            for switch in past
            if switch.state is not SwitchState.JOINED
        ]

    def _request(self) -> None:
        self._left -= 1
        router, chance = self._cluster.router, self._world.chance
        # With a unit's name, another size is requested, in its own role or in the other.
        name = chance.choice((None, *self._cluster.shapes))
        role = chance.choice(tuple(Role)) if name is None else self._other_or_own(name)
        ranks = None if name is None else chance.choice(_RANKS)
        if not (router.serves and router.process.runs):
            return
        change = f"{name or 'any'} to {role or 'its own'} role with {ranks or 'usual'} ranks"
        try:
            switch = router.service.roles.ask(role, name, ranks=ranks)
        except BadRequestError as error:
            self._world.note("operator", f"requests {change}, refused: {error}")
        else:
            self._world.note("operator", f"requests {change}: {', '.join(switch.engines)}")

    def _other_or_own(self, name: str) -> Role | None:
        now = self._cluster.shapes[name].role
        other = Role.DECODE if now is Role.PREFILL else Role.PREFILL
        return self._world.chance.choice((None, None, other))

    def _tick(self) -> None:
        self._requested_roles.poll(self._world.now_s)
        self._world.after(_POLL_S, self._tick)

    def _answer(self) -> Mapping[str, Any] | None:
        """Return the router's report on roles, or an earlier one; None if it does not answer."""
        router, before = self._cluster.router, self._report
        if not (router.serves and router.process.runs):
            return None
        self._report = router.service.roles.report()
        old = before is not None and self._world.chance.random() * _STALE_ONE_IN < 1
        return before if old else self._report
