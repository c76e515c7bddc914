"""Resources that a cluster requests from Ray: a bundle for each unit.

A bundle has a whole unit, so that the ranks of a data-parallel group are on one node.
"""

from collections.abc import Iterable, Mapping, Sequence

from dualpath.ops.launch.units import Unit

CPU, GPU = "CPU", "GPU"
Resources = Mapping[str, float]


def bundle(unit: Unit, cpus: int, *, with_devices: bool) -> dict[str, float]:
    """Return the resources of a unit: ``cpus`` per process, and its devices if engines have any."""
    processes = len(unit.processes)
    devices = {GPU: float(unit.devices * processes)} if with_devices and unit.devices else {}
    return {CPU: float(cpus * processes), **devices}


def shortage(bundles: Mapping[str, Resources], nodes: Sequence[Resources]) -> str:
    """Return what the nodes lack for all ``bundles`` (by unit), in words; empty if they suffice.

    Does not consider resources used by other jobs, nor whether bundles fit beside each other.
    """
    needed, available = _sum(bundles.values()), _sum(nodes)
    lacking = [
        f"{amount:g} {name} are needed and it has {available.get(name, 0):g}"
        for name, amount in needed.items()
        if amount > available.get(name, 0)
    ]
    if lacking:
        return ", ".join(lacking)
    for unit, one in bundles.items():
        if not any(_holds(node, one) for node in nodes):
            return f"{unit} needs {format_resources(one)} on one node, and no node has as much"
    return ""


def format_resources(resources: Resources) -> str:
    """Return resources as text: "1 CPU, 8 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _holds(node: Resources, one: Resources) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in one.items())


def _sum(parts: Iterable[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total
