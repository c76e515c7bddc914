"""Planted bugs of separate front ends and of role changes."""

from unittest import mock

from dualpath.core.cluster import Role
from dualpath.engine.membership import Membership
from dualpath.laboratory.chaos.simulation.plant import PlantedBug, replaced
from dualpath.router.control.engine_state import EngineState
from dualpath.router.control.roles import Roles
from dualpath.router.links.door import FrontEndDoor
from dualpath.router.links.guest import Guest
from dualpath.router.links.remote import RemoteScheduling
from dualpath.router.links.remote_requests import RemoteAttempt, RemoteRequest


def _engines_lost_only(self: RemoteScheduling, reason: str) -> None:
    self.engines.lose(self._away(reason))


def _announce_once(self: RemoteRequest) -> None:
    if not self._begun_in:
        _announce(self)


def _twice_as_many(self: Roles, role: Role) -> list[tuple[EngineState, ...]]:
    return 2 * _nodes(self, role)


_announce, _nodes = RemoteRequest._announce, Roles.nodes
#: An attribute that is always false.
_NEVER = property(lambda self: False, lambda self, value: None)

#: By name, in the order of docs/reference/simulated-faults.md.
FRONT_END_BUGS: dict[str, PlantedBug] = {
    "front-end-attempts-stay": PlantedBug(
        "a front end's attempts stay at the scheduler after its session has ended",
        replaced(Guest, "leave", lambda self, reason: None),
    ),
    "front-end-unwatched": PlantedBug(
        "a silent front end is not declared lost",
        replaced(FrontEndDoor, "_look", lambda self: None),
    ),
    "calls-keep-waiting": PlantedBug(
        "a front end keeps waiting for answers of a lost scheduler",
        replaced(RemoteScheduling, "_ended", _engines_lost_only),
    ),
    "decoding-ends": PlantedBug(
        "a decoding stream ends with the scheduler that has placed it",
        lambda: mock.patch.object(RemoteAttempt, "decoding", _NEVER, create=True),
    ),
    "unannounced": PlantedBug(
        "a front end does not report its requests to the next scheduler",
        replaced(RemoteRequest, "_announce", _announce_once),
    ),
    "undrained": PlantedBug(
        "a terminated engine does not drain its requests",
        replaced(Membership, "drain", lambda self, reason, drained: drained()),
    ),
    "last-of-role": PlantedBug(
        "the last engine of a role may change its role",
        replaced(Roles, "nodes", _twice_as_many),
    ),
    "size-kept": PlantedBug(
        "a group counts as back with its old number of ranks, whatever its new size is",
        replaced(Roles, "_all_back", lambda self, new: len(new) == len(self._epochs)),
    ),
}
