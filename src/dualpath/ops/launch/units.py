"""Units of a cluster: processes that stop and start together, on one node."""

from collections.abc import Iterator

import msgspec

from dualpath.core.cluster import Role, UnitShape
from dualpath.ops.launch.commands import engine_id, rank_id
from dualpath.ops.launch.settings import LocalClusterSettings

ROUTER = "router"
STANDBY = "router-standby"


class Unit(msgspec.Struct, frozen=True):
    """Names of a unit and its processes; for engines also role and ``index`` of the node."""

    name: str
    processes: tuple[str, ...]
    role: Role | None = None
    index: int = 0
    #: Devices of each process, 0 on CPUs.
    devices: int = 0


def router_units(settings: LocalClusterSettings) -> list[Unit]:
    """Return the router, and the standby router if there is one."""
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

    Their names are of ``role``; their number is ``ranks``, or that of the settings.
    """
    size = ranks or settings.ranks(role)
    names = tuple(rank_id(role, index, rank, size) for rank in range(size))
    return Unit(engine_id(role, index), names, role, index, settings.devices_per_rank(role))


def too_few_devices(settings: LocalClusterSettings, name: str, shape: UnitShape) -> str | None:
    """Return why a unit's devices do not suffice for a shape, None if they do."""
    unit = next(u for u in engine_units(settings) if u.name == name)
    assert unit.role is not None
    if unit.devices != (needs := settings.devices_per_rank(shape.role)):
        return (
            f"each of its ranks has {unit.devices} devices, and one of the other role needs "
            f"{needs}; give --prefill-tp and --decode-tp the same value"
        )
    if shape.ranks > (most := len(unit.processes)):
        return f"it has devices for {most} ranks; start with a larger --{unit.role.value}-dp"
    return None
