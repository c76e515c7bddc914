"""How engines are numbered and grouped: PEs first, groups of whole nodes, units that step."""

from typing import NamedTuple

from dualpath.core.cluster import Role
from dualpath.model.sim import rules
from dualpath.model.sim.settings import ClusterSettings


class Group(NamedTuple):
    """Engines that fetch together (§6.1)."""

    name: str
    role: Role
    engines: range


class ClusterLayout(NamedTuple):
    """Groups in the order in which they fetch, and units of each role in order of engine.

    ``node_of`` says on which node an engine is.
    """

    groups: tuple[Group, ...]
    prefill_units: tuple[range, ...]
    decode_units: tuple[range, ...]


def cluster_layout(cluster: ClusterSettings) -> ClusterLayout:
    """Return the layout of a cluster."""
    prefill = _runs(0, cluster.prefill_engines, cluster.group_engines(Role.PREFILL))
    decode = _runs(cluster.prefill_engines, cluster.engines, cluster.group_engines(Role.DECODE))
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


def node_of(cluster: ClusterSettings, engine: int) -> int:
    """Return the node of an engine."""
    return rules.node_of(
        engine,
        cluster.prefill_engines,
        cluster.prefill_nodes,
        cluster.node_engines(Role.PREFILL),
        cluster.node_engines(Role.DECODE),
    )


def _runs(first: int, end: int, group: int) -> list[range]:
    return [range(engine, min(engine + group, end)) for engine in range(first, end, group)]
