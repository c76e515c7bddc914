"""Units of a cluster: processes that end and start together, on one node."""

from collections.abc import Iterator

import msgspec

from dualpath.core.cluster import Role
from dualpath.ops.launch.commands import engine_id, rank_id
from dualpath.ops.launch.settings import LocalClusterSettings

ROUTER = "router"
STANDBY = "router-standby"


class Unit(msgspec.Struct, frozen=True):
    """Its name and its processes'; of engines also their role, and the ``index`` of their node."""

    name: str
    processes: tuple[str, ...]
    role: Role | None = None
    index: int = 0
    #: Devices of each process, where engines have any.
    devices: int = 0


def router_units(settings: LocalClusterSettings) -> list[Unit]:
    """Return the router, and the one that stands by."""
    return [Unit(name, (name,)) for name in (ROUTER, STANDBY)[: 1 + settings.standby]]


def engine_units(settings: LocalClusterSettings) -> Iterator[Unit]:
    """Yield prefill engines, then decode engines."""
    for role, count in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for index in range(count):
            yield engine_unit(settings, role, index)


def engine_unit(settings: LocalClusterSettings, role: Role, index: int) -> Unit:
    """Return the engines of a node: one, or the ranks of a data-parallel group."""
    size = settings.ranks(role)
    names = tuple(rank_id(role, index, rank, size) for rank in range(size))
    return Unit(engine_id(role, index), names, role, index, settings.devices_per_rank(role))
