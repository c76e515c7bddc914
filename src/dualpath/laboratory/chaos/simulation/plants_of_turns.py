"""Bugs to plant where schedulers take turns by a lease."""

from dualpath.laboratory.chaos.simulation.plant import Plant, instead
from dualpath.router.standby.kubernetes_lease import KubernetesLease
from dualpath.router.standby.leased_turn import LeasedTurn

#: A holder's, until the store has told it that the lease is another's.
_UNTIL_TOLD = property(lambda self: self._until_s > float("-inf"))

#: By name, in the order of the reference.
TURN_PLANTS: dict[str, Plant] = {
    "turn-outlived": Plant(
        "a scheduler that could not renew its lease goes on placing",
        instead(LeasedTurn, "held", _UNTIL_TOLD),
    ),
    "turn-stolen": Plant(
        "a lease is taken without a look whether it has run out",
        instead(KubernetesLease, "_stands_still", lambda self, lease: True),
    ),
}
