"""Bottleneck-free ranges of §4.2, Eq. 1-9, and the sums of plan bytes that re-derive them.

``link_bytes`` is the derivation: it adds the bytes of plans per link.  The closed forms stand
beside it so that a test can compare both.

Two remarks on the paper's text.  Eq. 1 (2Bs/g ≤ B) needs 2s ≤ g, not s ≤ g.  And the equations
leave out the KV of miss tokens, which is small at the hit rates of §2.2; ``link_bytes`` of a real
layout counts it.
"""

from collections import Counter
from collections.abc import Iterable

from dualpath.core.cluster import ClusterShape
from dualpath.datapath.plan import Link, Step


def link_bytes(steps: Iterable[Step]) -> Counter[Link]:
    """Return how many bytes each link carries for these steps."""
    total: Counter[Link] = Counter()
    for step in steps:
        for link in step.links:
            total[link] += step.bytes
    return total


def pe_pair_bytes_per_s(shape: ClusterShape) -> float:
    """T_p = Bs/(Dg²): PE-path rate of one (PE, DE) pair with all SNICs saturated (§4.2)."""
    snic_bytes_per_s = shape.snic_ratio * shape.cnic_bytes_per_s
    return snic_bytes_per_s / (shape.decode_nodes * shape.gpus_per_node**2)


def de_pair_bytes_per_s(shape: ClusterShape) -> float:
    """T_c = Bs/(Pg²): DE-path rate of one (PE, DE) pair with all SNICs saturated (§4.2)."""
    snic_bytes_per_s = shape.snic_ratio * shape.cnic_bytes_per_s
    return snic_bytes_per_s / (shape.prefill_nodes * shape.gpus_per_node**2)


def closed_form_bytes_per_s(shape: ClusterShape) -> dict[Link, float]:
    """Left sides of Eq. 1, 2, 4, 6 per GPU's CNIC and of Eq. 8 per node's DRAM."""
    s, g, rate = shape.snic_ratio, shape.gpus_per_node, shape.cnic_bytes_per_s
    p_over_d = shape.prefill_nodes / shape.decode_nodes
    return {
        Link.PE_CNIC_READ: 2 * rate * s / g,
        Link.PE_CNIC_WRITE: rate * s / g * (1 + 1 / p_over_d),
        Link.DE_CNIC_READ: rate * s / g * (p_over_d + 2),
        Link.DE_CNIC_WRITE: rate * s / g * (2 * p_over_d + 1),
        Link.PE_DRAM: 2 * s * rate,
        Link.DE_DRAM: (3 + 2 * p_over_d) * s * rate,
    }


def prefill_to_decode_range(shape: ClusterShape) -> tuple[float, float]:
    """Eq. 9: smallest and largest bottleneck-free P/D; empty if the first exceeds the second."""
    s, g = shape.snic_ratio, shape.gpus_per_node
    if s >= g or 2 * s > g:
        return (float("inf"), 0.0)
    dram = (shape.dram_bytes_per_s / (shape.cnic_bytes_per_s * s) - 3) / 2
    return s / (g - s), min((g - 2 * s) / s, (g - s) / (2 * s), dram)
