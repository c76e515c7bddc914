"""How fast storage has to be for loading to matter as much as it does in the paper.

On one machine the page cache would make loading free, so reads of each engine are throttled: the
throttle stands for the storage NIC of a node.  A fixed rate would make loading everything on a
fast machine and nothing on a slow one.  Oracle's run (§7.2) computes what all modes compute and
loads nothing: it is the calibration, and storage becomes as slow as it must be for Basic's reads to
take ``LOAD_SHARE`` times as long.  At 1P1D (DS 27B, §7.3) the paper's Basic takes up to 1.78 times
as long as DualPath and that 1.09 to 1.85 times as long as Oracle: up to 3.3 times as long as Oracle
in all, the more so the more agents there are.
"""

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.laboratory.workload.replay.result import ReplayResult

#: Basic's time for reading, in times of Oracle's job.
LOAD_SHARE = 2.8


class ChosenRate(msgspec.Struct, frozen=True):
    """``bytes_per_s`` of each engine, for ``load_bytes`` that all agents hit together."""

    bytes_per_s: float
    load_bytes: int
    oracle_jct_s: float

    def line(self) -> str:
        """Say how it was chosen."""
        return (
            f"Storage is throttled to {self.bytes_per_s / 1e6:.1f} MB/s per engine. Chosen from "
            f"Oracle's run, which took {self.oracle_jct_s:.1f} s here: so fast that reading the "
            f"{self.load_bytes / 1e6:,.0f} MB that agents hit takes one path {LOAD_SHARE:g} times "
            "as long, which is about the paper's part of Basic's time at 1P1D (§7.3, DS 27B)."
        )


def choose_rate(oracle: ReplayResult, namespace: StoreNamespace, prefill: int) -> ChosenRate:
    """Return the rate for ``prefill`` engines that read in mode Basic."""
    hit_tokens = oracle.summary.hit_tokens or oracle.summary.ideal_hit_tokens
    geometry = namespace.geometry
    load_bytes = hit_tokens // geometry.block_tokens * geometry.full_block_bytes
    jct_s = oracle.summary.jct_s
    return ChosenRate(max(load_bytes, 1) / (LOAD_SHARE * jct_s * prefill), load_bytes, jct_s)
