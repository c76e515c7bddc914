"""The modes of §7: two baselines, three ablation steps and the system, as one setting."""

import enum


class Mode(enum.StrEnum):
    """What is switched on; every step of the ablation (§7.5) adds one thing to the one before."""

    BASIC = "basic"
    """Reads on the PE only, all layers in HBM, load before compute and send after it."""
    LAYERWISE = "layerwise"
    """Basic plus layerwise prefill."""
    ROUND_ROBIN = "round-robin"
    """Layerwise plus dual-path loading, engines and read sides in turn."""
    DUALPATH = "dualpath"
    """Round robin's data path under the scheduler of §6."""
    SPLIT = "split"
    """DualPath that also divides one request's blocks between both sides (§6.1, future work)."""
    ORACLE = "oracle"
    """No reads and no transfers; lengths only, generated text is meaningless (§7.2)."""

    @property
    def layerwise(self) -> bool:
        """Whether the PE keeps only a few layers of KV in HBM and overlaps transfers."""
        return self is not Mode.BASIC

    @property
    def dual_path(self) -> bool:
        """Whether the DE side may read."""
        return self in (Mode.ROUND_ROBIN, Mode.DUALPATH, Mode.SPLIT)

    @property
    def compute_quota(self) -> bool:
        """Whether PEs batch by the compute quota (§6.2; §A.4 sets it for DualPath and Oracle)."""
        return self in (Mode.DUALPATH, Mode.SPLIT, Mode.ORACLE)

    @property
    def moves_bytes(self) -> bool:
        """Whether KV really moves; False only for Oracle."""
        return self is not Mode.ORACLE


#: What serves where nobody chooses: with both storage NICs on each request it was as fast as the
#: paper's rule or faster wherever both were measured (``docs/measured.md``, ``benchmarks``).
DEFAULT_MODE = Mode.SPLIT
