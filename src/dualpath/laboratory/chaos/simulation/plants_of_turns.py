"""Bugs to plant where schedulers take turns by a lease."""

import asyncio
from unittest import mock

from dualpath.laboratory.chaos.simulation.plant import Plant, instead
from dualpath.router.standby import leased_turn
from dualpath.router.standby.kubernetes_lease import KubernetesLease
from dualpath.router.standby.leased_turn import LeasedTurn

#: A holder's, until the store has told it that the lease is another's.
_UNTIL_TOLD = property(lambda self: self._until_s > float("-inf"))


async def _renew_until_told(self: LeasedTurn) -> str:
    """``LeasedTurn._renew`` that looks at no clock."""
    while True:
        await asyncio.sleep(self._gap_s)
        asked_s = self._clock()
        renewed = await self._tried("renewed", self._store.renew())
        if renewed:
            self._granted(asked_s)
        elif renewed is not None:
            self._until_s = float("-inf")
            return f"the lease {self._name} is another's"


#: By name, in the order of the reference.
TURN_PLANTS: dict[str, Plant] = {
    "turn-outlived": Plant(
        "a scheduler that cannot renew its lease goes on until it hears whose it is",
        lambda: mock.patch.multiple(LeasedTurn, held=_UNTIL_TOLD, _renew=_renew_until_told),
    ),
    "turn-stolen": Plant(
        "a lease is taken without a look whether its holder has renewed it",
        instead(KubernetesLease, "_stands_still", lambda self, lease: True),
    ),
    "turn-to-the-last": Plant(
        "a scheduler counts on its lease to the last moment, though clocks are not alike",
        instead(leased_turn, "_MARGIN", 0.0),
    ),
}
