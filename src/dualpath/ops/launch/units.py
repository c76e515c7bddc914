"""Units of a cluster: processes that end and start together, on one node."""

from collections.abc import Iterator

import msgspec

from dualpath.core.cluster import Role, UnitShape
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


def engine_unit(
    settings: LocalClusterSettings, role: Role, index: int, ranks: int | None = None
) -> Unit:
    """Return the engines of a node: one, or the ranks of a data-parallel group.

    They are named by ``role``, and as many as the settings say, or ``ranks``.
    """
    size = ranks or settings.ranks(role)
    names = tuple(rank_id(role, index, rank, size) for rank in range(size))
    return Unit(engine_id(role, index), names, role, index, settings.devices_per_rank(role))


def too_few_devices(settings: LocalClusterSettings, name: str, shape: UnitShape) -> str | None:
    """Return why a unit cannot be started in a shape on the devices it has, None if it can."""
    unit = next(u for u in engine_units(settings) if u.name == name)
    assert unit.role is not None
    if unit.devices != (needs := settings.devices_per_rank(shape.role)):
        return (
            f"each of its ranks has {unit.devices} devices, one of the other role {needs}; give "
            "--prefill-tp and --decode-tp one value"
        )
    if shape.ranks > (most := len(unit.processes)):
        return f"it has devices for {most} ranks; start it with a larger --{unit.role.value}-dp"
    return None
