"""Planted bugs of leader election by a lease."""

import asyncio
from unittest import mock

from dualpath.laboratory.chaos.simulation.plant import PlantedBug, replaced
from dualpath.router.standby import leased_turn
from dualpath.router.standby.kubernetes_lease import KubernetesLease
from dualpath.router.standby.leased_turn import LeasedTurn

#: Whether the store has not yet reported another holder.
_UNTIL_REPORTED = property(lambda self: self._until_s > float("-inf"))


async def _renew_until_reported(self: LeasedTurn) -> str:
    """``LeasedTurn._renew`` that does not check the clock."""
    while True:
        await asyncio.sleep(self._gap_s)
        sent_s = self._clock()
        renewed = await self._tried("renewed", self._store.renew())
        if renewed:
            self._granted(sent_s)
        elif renewed is not None:
            self._until_s = float("-inf")
            return f"the lease {self._name} is another's"


#: By name, in the order of docs/reference/simulated-faults.md.
TURN_BUGS: dict[str, PlantedBug] = {
    "lease-outlived": PlantedBug(
        "a scheduler that cannot renew its lease continues until the store reports another holder",
        lambda: mock.patch.multiple(LeasedTurn, held=_UNTIL_REPORTED, _renew=_renew_until_reported),
    ),
    "lease-stolen": PlantedBug(
        "a lease is acquired without checking whether its holder has renewed it",
        replaced(KubernetesLease, "_stands_still", lambda self, lease: True),
    ),
    "lease-without-margin": PlantedBug(
        "a scheduler relies on its lease to the last moment, although clocks differ",
        replaced(leased_turn, "_MARGIN", 0.0),
    ),
}
