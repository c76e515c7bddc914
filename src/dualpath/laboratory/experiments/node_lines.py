"""Plot lines of nodes over a run; many nodes are merged to one line per role."""

import statistics
from collections.abc import Sequence

from dualpath.report.model import Series

#: More nodes than this are drawn as the mean and the range of each role.
_MOST_NODES = 4


def merged_by_role(nodes: Sequence[Series]) -> tuple[Series, ...]:
    """Return the lines of few nodes unchanged, those of many merged to one per role.

    Nodes are named as in a lab, like ``pe0`` or ``de1``, and all have the same ``x``.
    """
    if len(nodes) <= _MOST_NODES:
        return tuple(nodes)
    roles = {"PEs": "pe", "DEs": "de"}
    lines = {role: [n for n in nodes if n.name.startswith(name)] for role, name in roles.items()}
    return tuple(_mean(f"mean of {len(of)} {role}", of) for role, of in lines.items() if of)


def _mean(name: str, nodes: Sequence[Series]) -> Series:
    known = [[y for y in at if y is not None] for at in zip(*(n.y for n in nodes), strict=True)]
    return Series(
        name,
        nodes[0].x,
        tuple(statistics.fmean(at) if at else None for at in known),
        low=tuple(min(at, default=None) for at in known),
        high=tuple(max(at, default=None) for at in known),
    )
