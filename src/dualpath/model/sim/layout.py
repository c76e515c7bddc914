"""How engines are numbered and grouped: PEs first, groups of whole nodes, units that step."""

from typing import NamedTuple

from dualpath.core.cluster import Role
from dualpath.model.sim.settings import ClusterSettings


class Group(NamedTuple):
    """Engines that fetch together (§6.1)."""

    name: str
    role: Role
    engines: range


class ClusterLayout(NamedTuple):
    """Groups in the order in which they fetch, and units of each role in order of engine.

    Engine ``e`` is on node ``e // g``.
    """

    groups: tuple[Group, ...]
    prefill_units: tuple[range, ...]
    decode_units: tuple[range, ...]


def cluster_layout(cluster: ClusterSettings) -> ClusterLayout:
    """Return the layout of a cluster."""
    g, p = cluster.gpus_per_node, cluster.prefill_nodes
    prefill = _runs(0, p, cluster.prefill_nodes_per_group, g)
    decode = _runs(p, cluster.nodes, cluster.decode_nodes_per_group, g)
    groups = [Group(f"P{i}", Role.PREFILL, engines) for i, engines in enumerate(prefill)]
    groups += [Group(f"D{i}", Role.DECODE, engines) for i, engines in enumerate(decode)]
    if cluster.lockstep:
        return ClusterLayout(tuple(groups), tuple(prefill), tuple(decode))
    return ClusterLayout(
        groups=tuple(groups),
        prefill_units=tuple(range(e, e + 1) for e in range(cluster.prefill_engines)),
        decode_units=tuple(
            range(e, e + 1) for e in range(cluster.prefill_engines, cluster.engines)
        ),
    )


def _runs(first_node: int, end_node: int, nodes_per_group: int, g: int) -> list[range]:
    step = nodes_per_group or end_node - first_node
    return [
        range(node * g, min(node + step, end_node) * g)
        for node in range(first_node, end_node, step)
    ]
