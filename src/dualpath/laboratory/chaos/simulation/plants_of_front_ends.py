"""Bugs to plant where front ends are apart from the scheduler, and where roles change."""

from unittest import mock

from dualpath.core.cluster import Role
from dualpath.engine.membership import Membership
from dualpath.laboratory.chaos.simulation.plant import Plant, instead
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
#: An attribute that is false whatever it is set to.
_NEVER = property(lambda self: False, lambda self, value: None)

#: By name, in the order of the reference.
FRONT_END_PLANTS: dict[str, Plant] = {
    "guest-stays": Plant(
        "what a front end had at the scheduler stays there when its session is over",
        instead(Guest, "leave", lambda self, reason: None),
    ),
    "front-end-unwatched": Plant(
        "a front end that falls silent is not lost",
        instead(FrontEndDoor, "_look", lambda self: None),
    ),
    "calls-wait-on": Plant(
        "a front end goes on waiting for what it asked of a scheduler that is lost",
        instead(RemoteScheduling, "_ended", _engines_lost_only),
    ),
    "decoding-ends": Plant(
        "a stream that decodes ends with the scheduler that has placed it",
        lambda: mock.patch.object(RemoteAttempt, "decoding", _NEVER, create=True),
    ),
    "unannounced": Plant(
        "a front end does not tell the next scheduler of the requests that it has",
        instead(RemoteRequest, "_announce", _announce_once),
    ),
    "undrained": Plant(
        "an engine that is asked to end does not wait for what it has",
        instead(Membership, "drain", lambda self, reason, drained: drained()),
    ),
    "last-of-role": Plant(
        "the last engine of a role may change it",
        instead(Roles, "nodes", _twice_as_many),
    ),
    "size-kept": Plant(
        "a group is back when as many ranks are as have left, whatever its size is now",
        instead(Roles, "_all_back", lambda self, new: len(new) == len(self._epochs)),
    ),
}
