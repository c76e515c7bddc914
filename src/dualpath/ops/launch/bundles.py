"""What a cluster asks of Ray: a bundle for each unit, and what is missing where it has none.

A bundle holds a whole unit, so that the ranks of a group share a node, as its engines do elsewhere.
"""

from collections.abc import Iterable, Mapping, Sequence

from dualpath.ops.launch.units import Unit

CPU, GPU = "CPU", "GPU"
Resources = Mapping[str, float]


def bundle(unit: Unit, cpus: int, *, with_devices: bool) -> dict[str, float]:
    """Return what a unit takes: ``cpus`` for each process, and its devices if engines have any."""
    processes = len(unit.processes)
    devices = {GPU: float(unit.devices * processes)} if with_devices and unit.devices else {}
    return {CPU: float(cpus * processes), **devices}


def missing(bundles: Mapping[str, Resources], nodes: Sequence[Resources]) -> str:
    """Say what the nodes lack for all bundles, which are by unit; empty if nothing is.

    What other jobs hold is not looked at, nor whether bundles fit beside each other.
    """
    needed, there = _sum(bundles.values()), _sum(nodes)
    lacks = [
        f"{amount:g} {name} are needed and it has {there.get(name, 0):g}"
        for name, amount in needed.items()
        if amount > there.get(name, 0)
    ]
    if lacks:
        return ", ".join(lacks)
    for unit, one in bundles.items():
        if not any(_holds(node, one) for node in nodes):
            return f"{unit} needs {shown(one)} on one node, and no node has as much"
    return ""


def shown(resources: Resources) -> str:
    """Return resources in words: "1 CPU, 8 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _holds(node: Resources, one: Resources) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in one.items())


def _sum(parts: Iterable[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total
