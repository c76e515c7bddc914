"""Chooses the storage rate at which loading matters as much as in the paper.

On one machine the page cache would make loading almost free, so reads of each engine are throttled;
the throttle stands for the storage NIC of a node.  With a fixed rate, loading would dominate on a
fast machine and be negligible on a slow one.  So the rate is calibrated with Oracle's run (§7.2),
which computes the same tokens but loads nothing: storage is throttled so that Basic's reads take
``LOAD_SHARE`` times as long as that run.  At 1P1D (DS 27B, §7.3) the paper's Basic takes up to 1.78
times as long as DualPath, and DualPath 1.09 to 1.85 times as long as Oracle: so Basic takes up to
3.3 times as long as Oracle, with more agents longer.
"""

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.laboratory.workload.replay.result import ReplayResult

#: Time of Basic's reads, as a multiple of Oracle's job completion time.
LOAD_SHARE = 2.8


class ChosenRate(msgspec.Struct, frozen=True):
    """The storage rate ``bytes_per_s`` of each engine, for hits of ``load_bytes`` in total."""

    bytes_per_s: float
    load_bytes: int
    oracle_jct_s: float

    def line(self) -> str:
        """Return a line that explains the choice."""
        return (
            f"Storage is throttled to {self.bytes_per_s / 1e6:.1f} MB/s per engine: Oracle's run "
            f"took {self.oracle_jct_s:.1f} s here, and at this rate reading the "
            f"{self.load_bytes / 1e6:,.0f} MB that agents hit through one path takes "
            f"{LOAD_SHARE:g} times as long, about as in the paper for Basic at 1P1D (§7.3, DS 27B)."
        )


def choose_rate(oracle: ReplayResult, namespace: StoreNamespace, prefill: int) -> ChosenRate:
    """Return the rate for ``prefill`` engines that read in mode Basic."""
    hit_tokens = oracle.summary.hit_tokens or oracle.summary.ideal_hit_tokens
    geometry = namespace.geometry
    load_bytes = hit_tokens // geometry.block_tokens * geometry.full_block_bytes
    jct_s = oracle.summary.jct_s
    return ChosenRate(max(load_bytes, 1) / (LOAD_SHARE * jct_s * prefill), load_bytes, jct_s)
