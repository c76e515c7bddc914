"""Bottleneck-free ranges of §4.2, Eq. 1-9, and the sums of plan bytes that re-derive them.

``link_bytes`` is the derivation: it adds the bytes of plans per link.  The closed forms are here
too, so that a test can compare both.

Three remarks on the paper's text.  Eq. 1 (2Bs/g ≤ B) requires 2s ≤ g instead of s ≤ g.  The
equations omit the KV of miss tokens, which is small at the hit rates of §2.2; ``plan_bytes_per_s``
of a real layout counts it, and the writes of new blocks.  DRAM is half duplex: its reads and writes
add up, those of a NIC do not.

With tensor parallelism nothing changes while each GPU of an engine has its own KV heads: a byte
then crosses one CNIC on either side.  If GPUs replicate KV, loads are repeated for each replica.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import ClusterShape, Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.movements import Link, Replicas
from dualpath.plan.steps import PromptLayout, Step, read_steps, whole_plan

#: Links that the GPUs of a node share; all others belong to one GPU's CNIC.
NODE_LINKS = frozenset(
    {Link.PE_SNIC_READ, Link.DE_SNIC_READ, Link.DE_SNIC_WRITE, Link.PE_DRAM, Link.DE_DRAM}
)

#: Every byte of KV is in the HBM of one GPU of its engine.
ONE_HOLDER = Replicas()

_PREFILL_LINKS = frozenset({Link.PE_SNIC_READ, Link.PE_CNIC_READ, Link.PE_CNIC_WRITE, Link.PE_DRAM})
_DRAM_LINKS = frozenset({Link.PE_DRAM, Link.DE_DRAM})
_SNIC_LINKS = frozenset({Link.PE_SNIC_READ, Link.DE_SNIC_READ, Link.DE_SNIC_WRITE})


class LinkBound(msgspec.Struct, frozen=True, kw_only=True):
    """An inequality of §4.2: ``load_bytes_per_s`` of a link must not exceed its limit.

    ``equation`` is the paper's number, "§4.2" for the inequality that the paper gives in words.
    """

    equation: str
    link: Link
    formula: str
    load_bytes_per_s: float
    limit_bytes_per_s: float

    @property
    def margin(self) -> float:
        """Unused share of the limit; negative if it is exceeded."""
        return 1 - self.load_bytes_per_s / self.limit_bytes_per_s


class RatioBound(msgspec.Struct, frozen=True, kw_only=True):
    """An inequality of §4.2 solved for P/D; ``least``: ``ratio`` is a lower bound.

    ``ratio`` is infinite for a lower bound and negative for an upper bound that no P/D meets.
    """

    equation: str
    link: Link
    formula: str
    ratio: float
    least: bool


def link_bytes(steps: Iterable[Step], replicas: Replicas = ONE_HOLDER) -> Counter[Link]:
    """Return the bytes that each link carries for these steps, over all GPUs of an engine."""
    total: Counter[Link] = Counter()
    for step in steps:
        carried = round(step.bytes * step.movement.copies(replicas))
        for link in step.links:
            total[link] += carried
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
    """Left sides of Eq. 1, 2, 4, 6 per GPU's CNIC and of Eq. 8 per node's DRAM.

    With r and q replicas a load enters HBM r times at a PE and q times at a DE; r = q = 1 gives the
    paper's equations.
    """
    s, g, rate = shape.snic_ratio, shape.gpus_per_node, shape.cnic_bytes_per_s
    r, q = shape.prefill_replicas, shape.decode_replicas
    p_over_d = shape.prefill_nodes / shape.decode_nodes
    return {
        Link.PE_CNIC_READ: (1 + r) * rate * s / g,
        Link.PE_CNIC_WRITE: rate * s / g * r * (1 + 1 / p_over_d),
        Link.DE_CNIC_READ: rate * s / g * (q * p_over_d + q + r),
        Link.DE_CNIC_WRITE: rate * s / g * ((1 + q) * p_over_d + q),
        Link.PE_DRAM: (1 + r) * s * rate,
        Link.DE_DRAM: (1 + q + r + (1 + q) * p_over_d) * s * rate,
    }


def limit_bytes_per_s(shape: ClusterShape, link: Link) -> float:
    """Return the capacity of a link: B, M or s·B."""
    if link in _DRAM_LINKS:
        return shape.dram_bytes_per_s
    if link in _SNIC_LINKS:
        return shape.snic_ratio * shape.cnic_bytes_per_s
    return shape.cnic_bytes_per_s


def link_bounds(shape: ClusterShape) -> tuple[LinkBound, ...]:
    """Return Eq. 1, 2, 4, 6 and the two DRAM pressures, in the paper's order."""
    loads = closed_form_bytes_per_s(shape)
    return tuple(
        LinkBound(
            equation=equation,
            link=link,
            formula=own if _replicated(shape) else paper,
            load_bytes_per_s=loads[link],
            limit_bytes_per_s=limit_bytes_per_s(shape, link),
        )
        for equation, link, paper, own in (
            ("Eq. 1", Link.PE_CNIC_READ, "2Bs/g ≤ B", "(1 + r) · Bs/g ≤ B"),
            ("Eq. 2", Link.PE_CNIC_WRITE, "Bs/g · (1 + D/P) ≤ B", "Bs/g · r(1 + D/P) ≤ B"),
            ("Eq. 4", Link.DE_CNIC_READ, "Bs/g · (P/D + 2) ≤ B", "Bs/g · (qP/D + q + r) ≤ B"),
            ("Eq. 6", Link.DE_CNIC_WRITE, "Bs/g · (2P/D + 1) ≤ B", "Bs/g · ((1 + q)P/D + q) ≤ B"),
            ("§4.2", Link.PE_DRAM, "2Bs ≤ M", "(1 + r) · Bs ≤ M"),
            ("Eq. 8", Link.DE_DRAM, "(3 + 2P/D) · Bs ≤ M", "(1 + q + r + (1 + q)P/D) · Bs ≤ M"),
        )
    )


def _replicated(shape: ClusterShape) -> bool:
    return (shape.prefill_replicas, shape.decode_replicas) != (1, 1)


def ratio_bounds(shape: ClusterShape) -> tuple[RatioBound, ...]:
    """Return Eq. 3, 5, 7, 8: the bounds of P/D, in the paper's order."""
    s, g = shape.snic_ratio, shape.gpus_per_node
    r, q = shape.prefill_replicas, shape.decode_replicas
    lowest = r * s / (g - r * s) if r * s < g else float("inf")
    read, write = (g - (q + r) * s) / (q * s), (g - q * s) / ((1 + q) * s)
    dram = (shape.dram_bytes_per_s / (shape.cnic_bytes_per_s * s) - (1 + q + r)) / (1 + q)
    return tuple(
        RatioBound(
            equation=equation,
            link=link,
            formula=own if _replicated(shape) else paper,
            ratio=ratio,
            least=link is Link.PE_CNIC_WRITE,
        )
        for equation, link, paper, own, ratio in (
            ("Eq. 3", Link.PE_CNIC_WRITE, "P/D ≥ s/(g - s)", "P/D ≥ rs/(g - rs)", lowest),
            ("Eq. 5", Link.DE_CNIC_READ, "P/D ≤ (g - 2s)/s", "P/D ≤ (g - (q + r)s)/qs", read),
            ("Eq. 7", Link.DE_CNIC_WRITE, "P/D ≤ (g - s)/2s", "P/D ≤ (g - qs)/(1 + q)s", write),
            (
                *("Eq. 8", Link.DE_DRAM, "P/D ≤ (M/Bs - 3)/2"),
                *("P/D ≤ (M/Bs - 1 - q - r)/(1 + q)", dram),
            ),
        )
    )


def prefill_to_decode_range(shape: ClusterShape) -> tuple[float, float]:
    """Eq. 9: smallest and largest bottleneck-free P/D; empty if the first exceeds the second."""
    s, g = shape.snic_ratio, shape.gpus_per_node
    r = shape.prefill_replicas
    if r * s >= g or (1 + r) * s > g:
        return (float("inf"), 0.0)
    bounds = ratio_bounds(shape)
    least = next(bound.ratio for bound in bounds if bound.least)
    return least, min(bound.ratio for bound in bounds if not bound.least)


def plan_bytes_per_s(
    shape: ClusterShape, geometry: BlockGeometry, hit_blocks: int, miss_blocks: int
) -> dict[Link, float]:
    """Return the load of every link with all SNICs saturated, from the plans, misses included.

    Every prompt has ``hit_blocks`` ≥ 1 and ``miss_blocks`` ≥ 1; prompts are read on either side in
    proportion to the nodes.  Loads are per GPU for CNICs and per node for ``NODE_LINKS``.
    """
    prompt_tokens = (hit_blocks + miss_blocks) * geometry.block_tokens
    replicas = Replicas(shape.prefill_replicas, shape.decode_replicas)
    loads: dict[Link, float] = {}
    for side, pair_bytes_per_s in (
        (Role.PREFILL, pe_pair_bytes_per_s(shape)),
        (Role.DECODE, de_pair_bytes_per_s(shape)),
    ):
        hits = HitRun(side, BlockRun(0, hit_blocks)).whole_behind(geometry.whole_from(hit_blocks))
        layout = PromptLayout(geometry=geometry, prompt_tokens=prompt_tokens, hits=(hits,))
        read_bytes = sum(step.bytes for step in read_steps(layout))
        for link, carried in link_bytes(whole_plan(layout), replicas).items():
            load = pair_bytes_per_s * carried / read_bytes * _pairs_sharing(shape, link)
            loads[link] = loads.get(link, 0.0) + load
    return loads


def _pairs_sharing(shape: ClusterShape, link: Link) -> int:
    """(PE, DE) pairs that share one device: a CNIC belongs to a GPU, DRAM and SNIC to a node."""
    nodes = shape.decode_nodes if link in _PREFILL_LINKS else shape.prefill_nodes
    pairs = nodes * shape.gpus_per_node
    return pairs * shape.gpus_per_node if link in NODE_LINKS else pairs
